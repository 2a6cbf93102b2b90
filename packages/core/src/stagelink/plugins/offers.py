"""Transports that one rank can use, as it tells its peers in its HELLO."""

from __future__ import annotations

import json
from collections.abc import (
    Callable,
    Iterable,
    Mapping,  # not for type checkers only: pydantic reads End
)
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, to_json

from stagelink.errors import PlanError, PluginError, ProtocolError, UnknownTransportError
from stagelink.plugins.plugins import Plugins
from stagelink.plugins.problems import attempt, broken, raised
from stagelink.text import shown, unknown
from stagelink.transport.contract import (
    Capabilities,
    Endpoint,
    Footprint,
    Link,
    Transport,
    Verdict,
)
from stagelink.transport.interrupts import raised_by_signal_handler

State = Literal["usable", "unusable", "broken", "disabled", "absent"]
"""Whether a rank can use a transport.

``usable``: it can. ``unusable``: the transport's own probe says no. ``broken``: its plugin is.
``disabled``: by `stagelink.plugins.discovery.DISABLE_VARIABLE`. ``absent``: it is not installed.
"""


@dataclass(frozen=True, slots=True)
class Offer:
    """Word of one rank on one transport."""

    state: State  # whether it can use it
    reason: str = ""  # the whole text of why not; where it can, what is worth knowing, or ``""``
    # as the transport declares them on that rank; None where it was not loaded
    capabilities: Capabilities | None = None
    # what `Transport.describe` said there
    description: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class End:
    """One end of the links of a rank: where it is and what it offers. Travels in HELLO."""

    rank: int
    server: str  # equal on two ranks exactly when they are on one server
    process: str  # equal on two ranks exactly when they are threads of one process
    offers: Mapping[str, Offer]  # its offer of each transport it knows of, by name

    def place(self, transport: str) -> Endpoint:
        """This end as `Transport.can_connect` sees it."""
        return Endpoint(self.rank, self.server, self.process, self.offers[transport].description)

    def to_json(self) -> dict[str, Any]:
        """This end as values that JSON can carry."""
        values: dict[str, Any] = _END.dump_python(self, mode="json")
        return values

    @classmethod
    def from_json(cls, values: object) -> End:
        """The end that a peer sent; `ProtocolError` where it is none."""
        try:
            return _END.validate_python(values)
        except ValidationError as error:
            raise ProtocolError(f"a peer's transports cannot be read: {error}") from None


_END = TypeAdapter(End)


@dataclass(frozen=True, slots=True)
class Survey:
    """Findings about the transports of this process."""

    transports: Mapping[str, Transport]  # an instance of each that is usable here
    offers: Mapping[str, Offer]  # what to tell peers of each one that was looked at
    # what is wrong with those that are broken or missing here, with its causes
    errors: Mapping[str, PluginError] = field(default_factory=dict)

    def can_connect(self, link: Link, local: Endpoint, remote: Endpoint) -> Verdict:
        """Ask the transport of ``link``, which is usable here, about a pair of places."""
        transport = self.transports[link.transport]
        provider = f"transport {link.transport!r}"
        return _verdict(provider, "can_connect", transport.can_connect, link, local, remote)

    def footprint(self, name: str, window: int, message_bytes: int | None) -> Footprint | None:
        """Ask a transport that is usable here what a link takes; see `Transport.footprint`."""
        provider, transport = f"transport {name!r}", self.transports[name]
        found = attempt(provider, "footprint", transport.footprint, window, message_bytes)
        if found is None or isinstance(found, Footprint):
            return found
        raise broken(provider, [f"footprint returned {found!r}, neither a Footprint nor None"])


def survey(
    plugins: Plugins,
    names: Iterable[str] | None,
    options: Mapping[str, Mapping[str, JsonValue]],
    devices: Iterable[str] = ("cpu", "cuda"),
) -> Survey:
    """Load, configure and probe transports; one that is missing or broken becomes such an offer.

    Args:
        plugins: where to find them.
        names: those to look at; None: all. See `stagelink.plugins.choice.asked_for`.
        options: the plan's ``[transports.NAME]`` tables.
        devices: kinds of device of the links in question. A transport for others is not asked to
            describe itself: a GPU would be set up for that.

    Raises:
        PlanError: the options of one that was loaded are wrong.
    """
    transports: dict[str, Transport] = {}
    offers: dict[str, Offer] = {}
    errors: dict[str, PluginError] = {}
    wanted = frozenset(devices)
    everything = {*plugins.known, *plugins.transports.disabled}
    for name in sorted(everything if names is None else set(names)):
        try:
            cls = plugins.load(name)
            parsed = parse_options(cls, options.get(name, {}))
            describes = bool(wanted & cls.capabilities.devices)
            offers[name] = _offer(
                plugins.provider(name), cls, parsed, transports, describes=describes
            )
        except UnknownTransportError as error:
            state: State = "disabled" if name in plugins.transports.disabled else "absent"
            offers[name], errors[name] = Offer(state, str(error)), error.with_traceback(None)
        except PluginError as error:
            offers[name], errors[name] = Offer("broken", str(error)), error.with_traceback(None)
    return Survey(transports, offers, errors)


def parse_options(cls: type[Transport], given: Mapping[str, JsonValue]) -> Any:
    """Make an instance of ``cls.Options``; unknown keys and wrong types are refused.

    Raises:
        PlanError: one line per problem with ``transports.NAME.key``, the value and what is
            allowed.
        PluginError: the class of the options raised anything but a ValueError.
    """
    # The check is strict, and TOML knows lists only: read as JSON, a list may be a tuple's value.
    table = to_json(dict(given))
    try:
        return TypeAdapter(cls.Options).validate_json(table, strict=True, extra="forbid")
    except ValidationError as error:
        problems = (_problem(cls, detail) for detail in error.errors())
        raise PlanError("\n".join(problems)) from None
    except Exception as error:
        if raised_by_signal_handler(error):
            raise
        what = f"the class of its options, {cls.Options.__qualname__},"
        raise broken(f"transport {cls.name!r}", [raised(what, error)]) from error


def _problem(cls: type[Transport], detail: ErrorDetails) -> str:
    where = ".".join(map(str, ("transports", cls.name, *detail["loc"])))
    value = shown(detail["input"])
    if detail["type"] == "value_error":  # out of the options' own __post_init__
        return f"{where}: {detail['ctx']['error']}"
    if detail["type"] != "unexpected_keyword_argument":
        return f"{where}: {detail['msg']}, not {value}"
    allowed = [field.name for field in fields(cls.Options)]
    key = unknown("option", str(detail["loc"][-1]), allowed, owner=f"transport {cls.name!r}")
    return f"{where}: {key} (value {value})"


def _offer(
    provider: str,
    cls: type[Transport],
    options: Any,
    transports: dict[str, Transport],
    *,
    describes: bool,
) -> Offer:
    verdict = _verdict(provider, "probe", cls.probe, options)
    if not verdict:
        return Offer("unusable", verdict.reason, cls.capabilities)
    transport = attempt(provider, "its constructor", cls, options)
    description = attempt(provider, "describe", _description, transport) if describes else {}
    transports[cls.name] = transport
    return Offer("usable", verdict.reason, cls.capabilities, description)


def _description(transport: Transport) -> dict[str, Any]:
    # What JSON cannot carry is to fail here, under the plugin's name, and not in a HELLO; and this
    # rank is to see the same values as its peer.
    description: dict[str, Any] = json.loads(json.dumps(dict(transport.describe())))
    return description


def _verdict(provider: str, what: str, function: Callable[..., object], *given: object) -> Verdict:
    verdict = attempt(provider, what, function, *given)
    if isinstance(verdict, Verdict):
        return verdict
    raise broken(provider, [f"{what} returned {verdict!r}, not a Verdict"])
