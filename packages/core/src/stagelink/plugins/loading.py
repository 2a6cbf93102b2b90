"""From an entry point to a plugin, and to the transport class that it registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from stagelink.errors import PluginError
from stagelink.plugins.discovery import DISABLE_VARIABLE
from stagelink.plugins.inspection import plugin_problems, registered_by
from stagelink.plugins.plugin_errors import raised
from stagelink.plugins.validation import transport_problems
from stagelink.text import quoted
from stagelink.transport.interrupts import raised_by_signal_handler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stagelink.plugins.discovery import Found
    from stagelink.transport.contract import Transport

__all__ = ["broken", "import_plugin", "transport_of"]


def broken(who: str, problems: Sequence[str]) -> PluginError:
    """The error for a plugin with problems."""
    if len(problems) == 1:
        return PluginError(f"{who} cannot be used: {problems[0]}")
    listed = "".join(f"\n  - {problem}" for problem in problems)
    return PluginError(f"{who} cannot be used:{listed}")


def import_plugin(found: Found) -> object:
    """Import what an entry point names and see that it is a plugin.

    Raises:
        PluginError: the import fails, or the hooks in it are wrong or none.
    """
    try:
        plugin = found.entry_point.load()
    except (Exception, SystemExit) as error:  # a module that ends the process is broken, too
        if raised_by_signal_handler(error):
            raise
        raise _raised("its import", found, error) from error
    problems = plugin_problems(plugin)
    if problems:
        raise broken(str(found), problems)
    return plugin


def transport_of(found: Found, plugin: object) -> type[Transport]:
    """The transport class that a plugin registers under its entry point's name.

    Raises:
        PluginError: the registration raises, or what it returns is no transport of that name.
    """
    try:
        classes = registered_by(plugin)
    except (Exception, SystemExit) as error:
        if raised_by_signal_handler(error):
            raise
        raise _raised("its stagelink_register_transport", found, error) from error
    name = found.entry_point.name
    named = [cls for cls in classes if getattr(cls, "name", None) == name]
    problems = _selection_problems(name, classes, named)
    if problems:
        raise broken(str(found), problems)
    return cast("type[Transport]", named[0])


def _raised(what: str, found: Found, error: BaseException) -> PluginError:
    return broken(
        str(found),
        [
            f"{raised(what, error)}; repair or uninstall "
            f"{found.distribution!r}, or put {found.entry_point.name!r} into the environment "
            f"variable {DISABLE_VARIABLE}"
        ],
    )


def _selection_problems(name: str, classes: list[object], named: list[object]) -> list[str]:
    if not classes:
        return ["it registers no class; return one from stagelink_register_transport"]
    if len(named) > 1:
        return [f"it registers {len(named)} classes of the name {name!r}"]
    if named:
        return transport_problems(named[0])
    problems = [problem for cls in classes for problem in transport_problems(cls)]
    return problems or [_other_names(name, classes)]


def _other_names(name: str, classes: list[object]) -> str:
    names = quoted(sorted(str(getattr(cls, "name", "")) for cls in classes))
    return (
        f"its class is named {names}, its entry point {name!r}; "
        "the two must be equal, so change the one or the other"
    )
