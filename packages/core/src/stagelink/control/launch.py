"""Launch of a process: its rank, and the job's store, given or from the environment.

All of it is checked here, before anything is opened; an error says how the value was given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed import Store

from stagelink.errors import PlanError

_FORMS = "known forms: tcp://host:port, tcp://[IPv6 address]:port, file:///path"
_PORTS = range(1, 65536)
_TCP = re.compile(r"tcp://(?P<host>\[[^\[\]]*\]|[^:/?#@\[\]]*)(?::(?P<port>[^:/]*))?/?")
_WHOLE = re.compile(r"[+-]?[0-9]+", re.ASCII)
_HOST = re.compile(r"[^\s/?#@\[\]]+")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Address of a store."""

    # ``tcp``: rank 0 hosts it. ``agent``: the launcher does. ``file``: a file that all ranks share
    kind: Literal["tcp", "agent", "file"]
    host: str = ""  # name or IP address, without brackets; empty for a file
    port: int = 0  # from 1; 0 for a file
    path: str = ""  # absolute, of a file
    given: str = ""  # how it was given, for errors: ``store='tcp://host:1'``

    def __str__(self) -> str:
        if self.kind == "file":
            return f"file://{self.path}"
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, argument: str = "store") -> StoreAddress:
        """The address in a text: ``tcp://host:port`` or ``file:///path``; else a `PlanError`."""
        given = f"{argument}={text!r}"
        if text.startswith("file:"):
            return cls("file", path=_path(text, given), given=given)
        match = _TCP.fullmatch(text)
        if match is None or not match["host"].strip("[]"):
            raise PlanError(f"connect: {given} is no address; {_FORMS}")
        if match["port"] is None:
            raise PlanError(f"connect: {given} has no port; {_FORMS}")
        return cls.of(match["host"], match["port"], given, given)

    @classmethod
    def of(
        cls,
        host: object,
        port: object,
        host_given: str,
        port_given: str,
        kind: Literal["tcp", "agent"] = "tcp",
    ) -> StoreAddress:
        """The address of a host and a port, of any types; how they were given is for errors.

        An IPv6 address may have brackets, and a port may be a text.
        """
        given = host_given if host_given == port_given else f"{host_given} and {port_given}"
        return cls(kind, _host(host, host_given), _port(port, port_given), given=given)


def _path(text: str, given: str) -> str:
    # Not by urlsplit, which takes a part of the path from "?" or "#" on for something else.
    rest = text.removeprefix("file:")
    path = rest.removeprefix("//").removeprefix("localhost") if rest.startswith("//") else rest
    if not path.startswith("/") or "\0" in path:
        raise PlanError(
            f"connect: {given} has no absolute path, which begins with a third slash; {_FORMS}"
        )
    return path


def _host(host: object, given: str) -> str:
    name = host[1:-1] if isinstance(host, str) and host[:1] + host[-1:] == "[]" else host
    if not isinstance(name, str) or not _HOST.fullmatch(name):
        raise PlanError(f"connect: {given}: that is no host name and no IP address")
    if name.count(":") == 1:
        raise PlanError(f"connect: {given}: a host's name or IP address, without a port")
    return name


def _port(port: object, given: str) -> int:
    text = port if isinstance(port, str) else str(port)
    if isinstance(port, bool) or not isinstance(port, int | str) or not _WHOLE.fullmatch(text):
        raise PlanError(f"connect: {given}: the port is not a whole number")
    if (number := int(text[:9])) not in _PORTS or len(text) > 9:  # noqa: PLR2004 - no port so long
        raise PlanError(f"connect: {given}: a port is from 1 to 65535")
    return number


@dataclass(frozen=True, slots=True)
class Launch:
    """Rank of this process, and its job."""

    rank: Any
    world_size: Any
    run_id: str  # name of the run; two runs on one store need two names
    store: Store | StoreAddress  # an open store, or where to find one
    # whether a launcher started this process that ends all ranks before it starts them again, as
    # torchrun does: what is in the store of this rank is then of a process that has ended
    restarts: bool = False

    @classmethod
    def resolve(
        cls,
        rank: int | None,
        world_size: int | None,
        store: Store | str | None,
        run_id: str | None,
        environ: Mapping[str, str] = os.environ,
    ) -> Launch:
        """Arguments where given, else what torchrun put into the environment, which is only read.

        Raises:
            PlanError: something is in neither place, or what is there is not usable; a line for
                each.
        """
        problems: list[str] = []
        found: dict[str, Any] = {}
        sources: dict[str, Callable[[], Any]] = {
            "rank": lambda: _number(environ, "RANK", "rank", rank),
            "world_size": lambda: _number(environ, "WORLD_SIZE", "world_size", world_size),
            "store": lambda: _store(store, environ),
            "run_id": lambda: _run_id(run_id, environ),
        }
        for name, value in sources.items():
            try:
                found[name] = value()
            except PlanError as error:
                problems.append(str(error))
        if problems:
            raise PlanError("\n".join(problems))
        return cls(**found, restarts="TORCHELASTIC_RUN_ID" in environ)


def _number(environ: Mapping[str, str], key: str, argument: str, given: Any) -> Any:
    if given is not None:
        return given
    text = environ.get(key)
    if text is None:
        raise PlanError(
            f"connect: no {argument}: pass {argument}=…, or start the ranks with 'stagelink run' "
            f"or torchrun, which set {key}"
        )
    if not _WHOLE.fullmatch(text) or len(text) > 18:  # noqa: PLR2004 - more than 64 bits
        raise PlanError(f"connect: {key}={text!r} in the environment is no whole number")
    return int(text)


def _run_id(run_id: object, environ: Mapping[str, str]) -> str:
    # Not torchrun's restart count, which each node counts for itself: see `Rendezvous`.
    if run_id is None:
        return environ.get("TORCHELASTIC_RUN_ID", "")
    if not isinstance(run_id, str):
        raise PlanError(f"connect: run_id={run_id!r} is no text")
    return run_id


def _store(store: object, environ: Mapping[str, str]) -> Store | StoreAddress:
    if store is None:
        return _address(environ)
    if isinstance(store, str):
        return StoreAddress.parse(store)
    if not isinstance(store, Store):
        raise PlanError(
            f"connect: store={store!r} is neither a c10d store nor the address of one; {_FORMS}"
        )
    return store


def _address(environ: Mapping[str, str]) -> StoreAddress:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if host is None or port is None:
        raise PlanError(
            "connect: no store: pass store= (a c10d store, 'tcp://host:port' or 'file:///path'), "
            "or start the ranks with 'stagelink run' or torchrun, which set MASTER_ADDR and "
            "MASTER_PORT"
        )
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return StoreAddress.of(
        host, port, f"MASTER_ADDR={host!r}", f"MASTER_PORT={port!r}", "agent" if agent else "tcp"
    )
