"""Discovery of installed plugins by their entry points, without importing any."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from stagelink.errors import PluginError
from stagelink.text import unknown

TRANSPORTS = "stagelink.transports"
"""Entry-point group of transports: the entry's name is `Transport.name`, its value a module."""

OBSERVERS = "stagelink.observers"
"""Entry-point group of observers: the entry's name is the word in ``[pipeline] observers``."""

DISABLE_VARIABLE = "STAGELINK_DISABLE_PLUGINS"
"""Environment variable that keeps installed plugins from being loaded.

A comma-separated list of entry-point names, of transports and observers alike; ``all`` stands for
every plugin that core does not ship itself. Read each time a handler is opened. What is registered
in code stays.
"""

_CORE = "stagelink"


@dataclass(frozen=True, slots=True)
class Found:
    """One entry point, not imported, of one installed distribution by its name and version."""

    distribution: str
    version: str
    entry_point: metadata.EntryPoint

    @property
    def shipped(self) -> bool:
        """Whether core itself brings it."""
        return self.distribution == _CORE

    def __str__(self) -> str:
        """Distribution, version and the line in its metadata."""
        line = f"{self.entry_point.name} = {self.entry_point.value}"
        return f"distribution {self.distribution!r} {self.version} (entry point {line!r})"


@dataclass(frozen=True, slots=True)
class Installed:
    """The plugins of one group of entry points."""

    group: str
    # what may be loaded; more than one where several distributions provide a name
    by_name: dict[str, tuple[Found, ...]]
    disabled: dict[str, tuple[Found, ...]]  # what `DISABLE_VARIABLE` keeps out

    def ships(self, name: str) -> bool:
        """Whether the name is one of core's own, which nobody else can take."""
        return any(found.shipped for found in self.by_name.get(name, ()))

    def usurpers(self, name: str) -> list[Found]:
        """Others' plugins under a name that core ships; they are never loaded."""
        if not self.ships(name):
            return []
        return [found for found in self.by_name[name] if not found.shipped]

    def sole(self, name: str) -> Found:
        """The one plugin of a name that is in ``by_name``; core's own where it ships one."""
        found = self.by_name[name]
        candidates = [one for one in found if one.shipped] or found
        if len(candidates) > 1:
            raise conflict(name, map(str, candidates))
        return candidates[0]

    def absent(self, kind: str, name: str, known: Iterable[str]) -> str:
        """Word why a name of a kind is not in ``by_name``, with near misses among those known."""
        if name in self.disabled:
            providers = " and ".join(map(str, self.disabled[name]))
            return (
                f"{kind} {name!r} of {providers} is disabled: take {name!r} (or 'all') out of the "
                f"environment variable {DISABLE_VARIABLE}"
            )
        text = unknown(kind, name, known, owner="this process")
        return (
            f"{text}. Install the distribution that has an entry point {name!r} in the group "
            f"{self.group!r}; one registered in code exists only in the process that "
            "registered it."
        )


def conflict(name: str, providers: Iterable[str]) -> PluginError:
    """Make the error for a name that is provided more than once."""
    listed = "".join(f"\n  - {provider}" for provider in providers)
    return PluginError(
        f"{name!r} is provided more than once, so that nobody can tell which is meant:{listed}\n"
        f"Rename or uninstall all but one."
    )


def discover(group: str) -> Installed:
    """Look through the metadata of all distributions for a group, without importing any."""
    switched_off = {word.strip() for word in os.environ.get(DISABLE_VARIABLE, "").split(",")}
    by_name: dict[str, tuple[Found, ...]] = {}
    disabled: dict[str, tuple[Found, ...]] = {}
    for found in map(_found, metadata.entry_points(group=group)):
        name = found.entry_point.name
        off = name in switched_off or ("all" in switched_off and not found.shipped)
        table = disabled if off else by_name
        table[name] = (*table.get(name, ()), found)
    return Installed(group, by_name, disabled)


def _found(entry_point: metadata.EntryPoint) -> Found:
    # A damaged installation may lack its name and version; its plugin is still to be told apart.
    dist = entry_point.dist
    name, version = (dist.name, dist.version) if dist else ("", "")
    return Found(name or "(without a name)", version or "(without a version)", entry_point)
