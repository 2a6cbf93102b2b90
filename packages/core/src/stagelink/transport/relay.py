"""The loaded plugins of one handler: what is wrong with a plugin, and one typed call per hook.

Nothing else in the project touches pluggy's untyped relay. A plugin is tried on a manager of its
own first, so that one that is refused leaves no trace on the handler's.
"""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any

import pluggy

from stagelink.errors import PluginError
from stagelink.plan.problems import quoted
from stagelink.transport import hooks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stagelink.transport.contract import Link
    from stagelink.transport.events import Event, LinkCounters

__all__ = ["Relay", "plugin_problems", "registered_by"]

_PREFIX = f"{hooks.PROJECT}_"
_REGISTER = "stagelink_register_transport"


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    return manager


def _hook_names() -> tuple[str, ...]:
    manager = _new_manager()
    return tuple(name for name in vars(hooks) if manager.parse_hookspec_opts(hooks, name))


_HOOKS = _hook_names()


def plugin_problems(plugin: object) -> list[str]:
    """What keeps ``plugin`` from taking part: a misspelt, unmarked or foreign hook, or none.

    Args:
        plugin: a module, or an object with hook implementations as methods.

    Returns:
        One text per problem, each with its remedy; empty where there is none.
    """
    if inspect.isclass(plugin):
        return [f"it is the class {plugin.__qualname__!r}; {_instead_of_class()}"]
    manager = _new_manager()
    problems = [_hook_problem(manager, plugin, name) for name in dir(plugin)]
    found = [problem for problem in problems if problem]
    return found or _trial_problems(manager, plugin)


def _instead_of_class() -> str:
    return (
        f"an entry point names the module, and the module's {_REGISTER}() returns the class; "
        "as an observer in code give an instance"
    )


def _hook_problem(manager: pluggy.PluginManager, plugin: object, name: str) -> str | None:
    options = manager.parse_hookimpl_opts(plugin, name)
    if options is None:
        return _unmarked_problem(plugin, name)
    hook = options.get("specname") or name
    if hook in _HOOKS or options.get("optionalhook"):
        return None
    return f"{name!r} is marked as a hook implementation, but {_no_such_hook(hook)}"


def _unmarked_problem(plugin: object, name: str) -> str | None:
    if not name.startswith(_PREFIX):
        return None
    function = inspect.getattr_static(plugin, name, None)
    if not _defined_by(plugin, function):
        return None
    if name not in _HOOKS:
        return f"{name!r} looks like a hook, but {_no_such_hook(name)}"
    marks = sorted(mark.removesuffix("_impl") for mark in vars(function) if mark.endswith("_impl"))
    foreign = f" but that of {quoted(marks)}" if marks else ""
    return (
        f"{name!r} has no mark of stagelink's{foreign}; "
        "put @hookimpl from stagelink.transport.hooks on it"
    )


def _defined_by(plugin: object, function: object) -> bool:
    home = plugin.__name__ if inspect.ismodule(plugin) else type(plugin).__module__
    return inspect.isfunction(function) and function.__module__ == home


def _no_such_hook(name: str) -> str:
    # The prefix that all have would make any two of them alike.
    by_stem = {hook.removeprefix(_PREFIX): hook for hook in _HOOKS}
    near = difflib.get_close_matches(name.removeprefix(_PREFIX), by_stem, n=2)
    hint = f" (did you mean {quoted((by_stem[stem] for stem in near), ' or ')}?)" if near else ""
    return f"stagelink has no hook of that name{hint}; it has {quoted(_HOOKS)}"


def _trial_problems(manager: pluggy.PluginManager, plugin: object) -> list[str]:
    try:
        manager.register(plugin)
    except pluggy.PluginValidationError as error:
        return [" ".join(str(error).split())]
    if not manager.get_hookcallers(plugin):
        return [
            "it has no hook implementation; define one of "
            f"{quoted(_HOOKS)}, marked @hookimpl from stagelink.transport.hooks"
        ]
    return []


def registered_by(plugin: object) -> list[object]:
    """What the plugin's `stagelink_register_transport` returned, as one flat list.

    Args:
        plugin: one without `plugin_problems`.

    Raises:
        Exception: whatever the plugin's function raised.
    """
    manager = _new_manager()
    manager.register(plugin)
    results: list[Any] = manager.hook.stagelink_register_transport()
    return [item for result in results for item in _flat(result)]


def _flat(result: object) -> Sequence[object]:
    return result if isinstance(result, list | tuple) else [result]


class Relay:
    """The hooks of one handler's plugins."""

    def __init__(self) -> None:
        self._manager = _new_manager()

    def add(self, plugin: object, name: str) -> None:
        """Let a plugin without `plugin_problems` take part from now on; added again, it stays."""
        if not self._manager.is_registered(plugin):
            self._manager.register(plugin, name)

    @property
    def wants_events(self) -> bool:
        """Whether anybody implements `stagelink_event`; if nobody does, make no event."""
        return bool(self._manager.hook.stagelink_event.get_hookimpls())

    def select_transport(self, link: Link, candidates: Sequence[str]) -> str | None:
        """Ask the plugins to choose among the candidates; None where none has an opinion.

        Raises:
            PluginError: a plugin raised, or answered with something that is no candidate.
        """
        hook = "stagelink_select_transport"
        answer: str | None = self._call(hook, link=link, candidates=candidates)
        if answer is None or answer in candidates:
            return answer
        raise PluginError(
            f"{hook} of {self._implementers(hook)} answered {answer!r} for "
            f"{link.source}→{link.target}; the candidates are {quoted(candidates)}"
        )

    def link_opened(self, link: Link) -> None:
        """Tell the observers.

        Raises:
            PluginError: one of them raised.
        """
        self._call("stagelink_link_opened", link=link)

    def link_closed(self, link: Link, counters: LinkCounters) -> None:
        """Tell the observers.

        Raises:
            PluginError: one of them raised.
        """
        self._call("stagelink_link_closed", link=link, counters=counters)

    def event(self, event: Event) -> None:
        """Tell the observers.

        Raises:
            PluginError: one of them raised.
        """
        self._call("stagelink_event", event=event)

    def _call(self, hook: str, **arguments: object) -> Any:
        try:
            return getattr(self._manager.hook, hook)(**arguments)
        except Exception as error:
            raise PluginError(
                f"{hook} of {self._implementers(hook)} raised {type(error).__name__}: {error}"
            ) from error

    def _implementers(self, hook: str) -> str:
        implementations = getattr(self._manager.hook, hook).get_hookimpls()
        return " or ".join(sorted(repr(one.plugin_name) for one in implementations))
