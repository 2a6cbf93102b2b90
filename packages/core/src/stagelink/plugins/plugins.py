"""Plugins of one handler: found by entry points or given in code, loaded when asked for.

Only what is asked for is imported. A plugin that is broken and that nobody asks for harms nobody;
one that is asked for gives an error that names distribution, entry point, cause and remedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pluggy

from stagelink.errors import PluginError, UnknownTransportError
from stagelink.plugins.discovery import (
    DISABLE_VARIABLE,
    OBSERVERS,
    TRANSPORTS,
    Found,
    conflict,
    discover,
)
from stagelink.plugins.problems import (
    attempt,
    broken,
    new_manager,
    plugin_problems,
    transport_problems,
)
from stagelink.plugins.relay import Relay
from stagelink.text import quoted
from stagelink.transport.contract import Transport


@dataclass(frozen=True, slots=True)
class Broken:
    """A transport that cannot be used: its name, the distributions that provide it, and why."""

    name: str
    found: tuple[Found, ...]
    error: PluginError


class Plugins:
    """The plugins of one handler; there is no global registry.

    What is installed is looked up once, here; the environment variable `DISABLE_VARIABLE` is read
    at the same time.

    Args:
        transports: transport classes of the caller's own, beside the installed ones. They exist in
            this process only: ranks in other processes must be given them too.
        observers: modules or objects with hook implementations.

    Raises:
        PluginError: from every call; what was given or asked for is wrong, disabled, or provided
            twice.
    """

    def __init__(
        self, transports: Iterable[type[Transport]] = (), observers: Iterable[object] = ()
    ) -> None:
        self.hooks = Relay()  # the hooks of all plugins loaded so far
        self.transports = discover(TRANSPORTS)  # the installed transports
        self.observers = discover(OBSERVERS)  # the installed observers
        self._registered: dict[str, type[Transport]] = {}
        self._loaded: dict[str, type[Transport]] = {}
        for cls in transports:
            self.register(cls)
        for observer in observers:
            self.observe(observer)

    @property
    def known(self) -> list[str]:
        """Names of all transports that may be asked for, sorted; nothing is imported."""
        return sorted({*self.transports.by_name, *self._registered})

    def register(self, cls: type[Transport]) -> None:
        """Add a transport class in code, for this handler and this process."""
        problems = transport_problems(cls)
        if problems:
            raise broken(f"the transport {cls!r} registered in code", problems)
        if self.transports.ships(cls.name):
            raise PluginError(f"{cls.name!r} is the name of core's own transport; take another")
        other = self._registered.setdefault(cls.name, cls)
        if other is not cls:
            raise conflict(cls.name, [_in_code(other), _in_code(cls)])

    def observe(self, observer: object) -> None:
        """Add an observer in code: a module, or an object with hook implementations as methods."""
        problems = plugin_problems(observer)
        if problems:
            raise broken(f"the observer {observer!r} given in code", problems)
        self.hooks.add(observer, f"observer {observer!r}")

    def load_observers(self, names: Iterable[str]) -> None:
        """Import the observers that a plan lists, in its order."""
        for name in names:
            if name not in self.observers.by_name:
                raise PluginError(self.observers.absent("observer", name, self.observers.by_name))
            plugin = _imported(self.observers.sole(name), new_manager())
            self.hooks.add(plugin, f"observer {name}")

    def load(self, name: str) -> type[Transport]:
        """The transport of that name; imports its module if need be, and no other.

        Raises:
            UnknownTransportError: nothing here provides it, or it is disabled.
        """
        if name in self._registered:
            return self._sole_registered(name)
        if name not in self._loaded:
            self._loaded[name] = self._load_installed(name)
        return self._loaded[name]

    def load_all(self) -> tuple[dict[str, type[Transport]], list[Broken]]:
        """Every transport that can be loaded, by name, and those that cannot; raises nothing."""
        usable: dict[str, type[Transport]] = {}
        failed: list[Broken] = []
        for name in self.known:
            try:
                usable[name] = self.load(name)
            except PluginError as error:
                failed.append(Broken(name, self.transports.by_name.get(name, ()), error))
            failed += map(_usurper, self.transports.usurpers(name))
        return usable, failed

    def provider(self, name: str) -> str:
        """Name the provider of a transport that can be loaded: a distribution, or code here."""
        if name in self._registered:
            return _in_code(self._registered[name])
        return str(self.transports.sole(name))

    def _sole_registered(self, name: str) -> type[Transport]:
        cls = self._registered[name]
        installed = self.transports.by_name.get(name, ())
        with suppress(PluginError):
            if not installed or self._load_installed(name) is cls:  # it is the very one
                return cls
        raise conflict(name, [_in_code(cls), *map(str, installed)])

    def _load_installed(self, name: str) -> type[Transport]:
        if name not in self.transports.by_name:
            raise UnknownTransportError(self.transports.absent("transport", name, self.known))
        found = self.transports.sole(name)
        alone = new_manager()
        plugin = _imported(found, alone)
        cls = _transport_of(found, alone)
        self.hooks.add(plugin, f"transport {name}")
        return cls


def _imported(found: Found, trial: pluggy.PluginManager) -> object:
    """Import what an entry point names, and register it on ``trial``, where it is a plugin."""
    who = str(found)
    plugin: object = attempt(who, "its import", found.entry_point.load, hint=_remedy(found))
    problems = plugin_problems(plugin, trial)
    if problems:
        raise broken(who, problems)
    return plugin


def _transport_of(found: Found, alone: pluggy.PluginManager) -> type[Transport]:
    """The class that the only plugin of a manager registers under its entry point's name."""
    who, what = str(found), "its stagelink_register_transport"
    register = alone.hook.stagelink_register_transport
    results: list[Any] = attempt(who, what, register, hint=_remedy(found))
    nested = (one if isinstance(one, list | tuple) else [one] for one in results)
    classes = [cls for some in nested for cls in some]
    name = found.entry_point.name
    named = [cls for cls in classes if getattr(cls, "name", None) == name]
    problems = _selection_problems(name, classes, named)
    if problems:
        raise broken(who, problems)
    cls: type[Transport] = named[0]
    return cls


def _remedy(found: Found) -> str:
    return (
        f"; repair or uninstall {found.distribution!r}, or put {found.entry_point.name!r} into "
        f"the environment variable {DISABLE_VARIABLE}"
    )


def _selection_problems(name: str, classes: list[object], named: list[object]) -> list[str]:
    if not classes:
        return ["it registers no class; return one from stagelink_register_transport"]
    if len(named) > 1:
        return [f"it registers {len(named)} classes of the name {name!r}"]
    if named:
        return transport_problems(named[0])
    problems = [problem for cls in classes for problem in transport_problems(cls)]
    if problems:
        return problems
    names = quoted(sorted(str(getattr(cls, "name", "")) for cls in classes))
    return [
        f"its class is named {names}, its entry point {name!r}; the two must be equal, so change "
        "the one or the other"
    ]


def _in_code(cls: type[Transport]) -> str:
    return f"class {cls.__module__}.{cls.__qualname__}, registered in code"


def _usurper(found: Found) -> Broken:
    name = found.entry_point.name
    error = broken(
        str(found), [f"{name!r} is the name of core's own transport, which is used in its place"]
    )
    return Broken(name, (found,), error)
