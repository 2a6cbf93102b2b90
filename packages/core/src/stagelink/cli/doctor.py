"""``stagelink doctor``: which plugins are installed, and which of them this machine can use."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import click
import torch
from rich.table import Table
from rich.text import Text

from stagelink.cli.output import new_table, plugins_print_to_stderr, print_json, print_parts
from stagelink.errors import PlanError, PluginError
from stagelink.plugins.discovery import DISABLE_VARIABLE, Found, Installed
from stagelink.plugins.offers import parse_options, survey
from stagelink.plugins.plugins import Plugins
from stagelink.transport.contract import Transport

_STYLES = {"usable": "green", "unusable": "yellow", "broken": "bold red", "disabled": "dim"}


@dataclass(frozen=True, slots=True)
class _Finding:
    """One plugin of one distribution; ``state`` is a `stagelink.plugins.offers.State`."""

    name: str
    distribution: str
    version: str
    state: str
    reason: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Health:
    stagelink: str
    torch: str
    python: str
    disabled_plugins: str | None
    transports: Sequence[_Finding]
    observers: Sequence[_Finding]


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def doctor_command(*, as_json: bool) -> None:
    """Say which transports and observers are installed, and whether they can be used here.

    Loads all of them, and probes the transports with their default options. Exits with 0 whenever
    it could look, also where a plugin is broken: perhaps nobody needs that one.
    """
    with plugins_print_to_stderr():
        health = _examine(Plugins())
    if as_json:
        print_json(asdict(health))
    else:
        print_parts(_tables(health))


def _examine(plugins: Plugins) -> _Health:
    return _Health(
        stagelink=version("stagelink"),
        torch=str(torch.__version__),
        python=platform.python_version(),
        disabled_plugins=os.environ.get(DISABLE_VARIABLE),
        transports=[*_transports(plugins), *_disabled(plugins.transports)],
        observers=[*_observers(plugins), *_disabled(plugins.observers)],
    )


def _transports(plugins: Plugins) -> Iterator[_Finding]:
    classes, failed = plugins.load_all()
    for name, cls in classes.items():
        yield _probed(plugins, cls, plugins.transports.sole(name))
    for one in failed:
        yield from _broken(one.name, one.found, one.error)


def _probed(plugins: Plugins, cls: type[Transport], found: Found) -> _Finding:
    who = (cls.name, found.distribution, found.version)
    try:
        options = asdict(parse_options(cls, {}))
        offer = survey(plugins, [cls.name], {}).offers[cls.name]
    except (PlanError, PluginError) as error:  # its own defaults are refused
        return _Finding(*who, "broken", str(error))
    return _Finding(*who, offer.state, offer.reason, options)


def _observers(plugins: Plugins) -> Iterator[_Finding]:
    for name, found in plugins.observers.by_name.items():
        try:
            plugins.load_observers([name])
        except PluginError as error:
            yield from _broken(name, found, error)
        else:
            yield _Finding(name, found[0].distribution, found[0].version, "usable")


def _broken(name: str, providers: Iterable[Found], error: PluginError) -> Iterator[_Finding]:
    for found in providers:
        yield _Finding(name, found.distribution, found.version, "broken", str(error))


def _disabled(installed: Installed) -> Iterator[_Finding]:
    for name, providers in installed.disabled.items():
        for found in providers:
            reason = f"by the environment variable {DISABLE_VARIABLE}"
            yield _Finding(name, found.distribution, found.version, "disabled", reason)


def _tables(health: _Health) -> Iterator[Text | Table]:
    yield Text(f"stagelink {health.stagelink}, torch {health.torch}, Python {health.python}")
    if health.disabled_plugins is not None:
        yield Text(f"{DISABLE_VARIABLE}={health.disabled_plugins}")
    yield _table("Transports", health.transports, "options and defaults")
    if health.observers:
        yield _table("Observers", health.observers)


def _table(title: str, findings: Iterable[_Finding], *more: str) -> Table:
    table = new_table(title, "name", "distribution", "here", *more)
    for finding in findings:
        options = "\n".join(f"{key} = {value!r}" for key, value in finding.options.items())
        state = Text(finding.state, _STYLES[finding.state])
        if finding.reason:
            state.append(f": {finding.reason}", "default")
        source = f"{finding.distribution} {finding.version}"
        table.add_row(finding.name, source, state, *([options] if more else []))
    return table
