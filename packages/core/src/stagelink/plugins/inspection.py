"""What is wrong with a plugin's hooks, found before the plugin takes part.

pluggy never calls a hook that is misspelt or unmarked, and says nothing. A plugin is tried on a
manager of its own, so that one that is refused leaves no trace on the handler's.
"""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any

import pluggy

from stagelink.text import quoted
from stagelink.transport import hooks

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["new_manager", "plugin_problems", "registered_by"]

_PREFIX = f"{hooks.PROJECT}_"
_REGISTER = "stagelink_register_transport"


def new_manager() -> pluggy.PluginManager:
    """A manager that knows this project's hooks, and no plugin."""
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    return manager


def _hook_names() -> tuple[str, ...]:
    manager = new_manager()
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
    manager = new_manager()
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
    manager = new_manager()
    manager.register(plugin)
    results: list[Any] = manager.hook.stagelink_register_transport()
    return [item for result in results for item in _flat(result)]


def _flat(result: object) -> Sequence[object]:
    return result if isinstance(result, list | tuple) else [result]
