"""Problems of a plugin, each with its remedy: of its hooks, of its transport, and what it raises.

Found when the plugin is loaded, in its author's terms, instead of as a strange error at the first
message: pluggy never calls a hook that is misspelt or unmarked, and says nothing. What a plugin's
code raises becomes a `PluginError` with cause, line where it broke, and remedy.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import pluggy
import pydantic
from pydantic import PydanticUserError, TypeAdapter

from stagelink.errors import PluginError
from stagelink.plan.dtypes import DTYPE_BY_NAME
from stagelink.text import quoted, unknown
from stagelink.transport import hooks
from stagelink.transport.contract import API_VERSION, Capabilities, Transport
from stagelink.transport.interrupts import raised_by_signal_handler

_MOST_CAUSES = 5
_CALLERS = (importlib.__file__, pluggy.__file__, pydantic.__file__, __file__)
_BETWEEN = (
    "<frozen ",  # the machinery of imports
    "<string>",  # what dataclasses make
    *(f"{Path(file).parent}{os.sep}" for file in _CALLERS),
)
"""Where files begin that call a plugin, or are called by one to import something."""


def attempt(
    who: str, what: str, function: Callable[..., Any], *given: object, hint: str = ""
) -> Any:
    """Call a function of a plugin, ``what`` of ``who`` in words; ``hint`` is a remedy.

    What it raises, or would end the process with, becomes a `PluginError`.
    """
    try:
        return function(*given)
    except (Exception, SystemExit) as error:
        if raised_by_signal_handler(error):
            raise
        raise broken(who, [raised(what, error) + hint]) from error


def broken(who: str, problems: Sequence[str]) -> PluginError:
    """Make the error for a plugin, in words, with problems of one text each."""
    if len(problems) == 1:
        return PluginError(f"{who} cannot be used: {problems[0]}")
    listed = "".join(f"\n  - {problem}" for problem in problems)
    return PluginError(f"{who} cannot be used:{listed}")


def raised(what: str, error: BaseException) -> str:
    """Word an exception of a plugin's, with its causes and the line where it broke."""
    causes = [f"{type(one).__name__}: {one}" for one in _causes(error)]
    return f"{what} raised {', because of '.join(causes)}{_place(error)}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that led to it, as far as a traceback would show them."""
    one: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if one is None:
            return
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _place(error: BaseException) -> str:
    """The line where it began, and the plugin's that led there; empty where none is known."""
    *_, first = _causes(error)
    lines = [*_lines(error), *([] if first is error else _lines(first))]
    if isinstance(first, SyntaxError) and first.filename is not None:
        lines.append(f"{first.filename}, line {first.lineno}")
    if not lines:
        return ""
    through = f", reached from {lines[0]}" if lines[0] != lines[-1] else ""
    return f" (in {lines[-1]}{through})"


def _lines(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    return [
        f"{frame.filename}, line {frame.lineno}"
        for frame in frames
        if not frame.filename.startswith(_BETWEEN)
    ]


def new_manager() -> pluggy.PluginManager:
    """Make a manager that knows this project's hooks, and no plugin."""
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    return manager


_PREFIX = f"{hooks.PROJECT}_"
_HOOKS = [name for name in vars(hooks) if new_manager().parse_hookspec_opts(hooks, name)]


def plugin_problems(plugin: object, trial: pluggy.PluginManager | None = None) -> list[str]:
    """Find what keeps a plugin from taking part: a misspelt, unmarked or foreign hook, or none.

    It is tried on ``trial``, a manager without plugins, and stays there where it has no problem; a
    handler's own is none, since one that is refused would leave its trace.
    """
    if inspect.isclass(plugin):
        return [
            f"it is the class {plugin.__qualname__!r}; an entry point names the module, and the "
            "module's stagelink_register_transport() returns the class; as an observer in code "
            "give an instance"
        ]
    manager = trial or new_manager()
    problems = [_hook_problem(manager, plugin, name) for name in dir(plugin)]
    return [problem for problem in problems if problem] or _trial_problems(manager, plugin)


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
    home = plugin.__name__ if inspect.ismodule(plugin) else type(plugin).__module__
    if not inspect.isfunction(function) or function.__module__ != home:
        return None
    if name not in _HOOKS:
        return f"{name!r} looks like a hook, but {_no_such_hook(name)}"
    marks = sorted(mark.removesuffix("_impl") for mark in vars(function) if mark.endswith("_impl"))
    foreign = f" but that of {quoted(marks)}" if marks else ""
    return (
        f"{name!r} has no mark of stagelink's{foreign}; "
        "put @hookimpl from stagelink.transport.hooks on it"
    )


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


_METHODS = (
    "__init__",
    "can_connect",
    "close",
    "describe",
    "open_receiver",
    "open_sender",
    "probe",
)


def transport_problems(candidate: object) -> list[str]:
    """Find what keeps ``candidate``, as a hook returned it, from being a transport class.

    Checks what can be seen without making an instance: that it is a concrete subclass of
    `Transport`, written for this version of the contract, with a name, capabilities and options of
    the right form and methods that take the contract's arguments by position.
    """
    if isinstance(candidate, Transport):
        name = type(candidate).__qualname__
        return [f"{candidate!r} is an instance; return the class {name!r} itself"]
    if not isinstance(candidate, type):
        return [f"{candidate!r} is not a class; return a subclass of stagelink's Transport"]
    if not issubclass(candidate, Transport):
        return [f"class {candidate.__qualname__!r} is not a subclass of stagelink's Transport"]
    # Of another major version nothing else can be judged.
    return _version_problems(candidate) or [
        *_form_problems(candidate),
        *(text for name in _METHODS if (text := _method_problem(candidate, name))),
        *_capability_problems(candidate),
        *_option_problems(candidate),
    ]


def _version_problems(cls: type[Transport]) -> list[str]:
    ours = _dotted(API_VERSION)
    version = getattr(cls, "api_version", None)
    if version is None:
        return [
            f"class {cls.__qualname__!r} states no api_version, and this stagelink has {ours}; "
            f"write the version it was made for, as `api_version = {API_VERSION}`"
        ]
    if not _is_version(version):
        return [
            f"its api_version {version!r} is not (major, minor), and this stagelink has {ours}; "
            f"write it as `api_version = {API_VERSION}`"
        ]
    if version[0] != API_VERSION[0] or version[1] > API_VERSION[1]:
        older = version[0] < API_VERSION[0]
        return [
            f"it was made for api_version {_dotted(version)}, and this stagelink has {ours} and "
            f"takes {API_VERSION[0]}.0 to {ours}; install a newer "
            f"{'release of the plugin' if older else 'stagelink'}, or a plugin that fits"
            f"{_FROM_1 if version[0] == 1 else ''}"
        ]
    return []


_FROM_1 = (
    ". Its author: `begin` is given `done` and returns whether it took the message, Pending and "
    "`finish` are gone (a wire that can only wait: stagelink.transport.blocking.Finisher); see "
    "'From contract 1 to 2' in docs/writing-a-transport.md"
)


def _is_version(version: object) -> bool:
    return (
        isinstance(version, tuple)
        and len(version) == len(API_VERSION)
        and all(type(part) is int for part in version)
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _form_problems(cls: type[Transport]) -> Iterator[str]:
    who, name = f"class {cls.__qualname__!r}", getattr(cls, "name", None)
    if not isinstance(name, str) or not name:
        yield f"{who} has no name; set the class attribute `name` to its word"
    missing: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
    if missing:
        yield f"{who} lacks {quoted(sorted(missing))}"


def _method_problem(cls: type[Transport], name: str) -> str | None:
    if not callable(getattr(cls, name)):
        return f"{name!r} of class {cls.__qualname__!r} is not a method"
    wanted = [*inspect.signature(getattr(Transport, name)).parameters]
    arguments = [word for word in wanted if word != "self"]
    bound = isinstance(inspect.getattr_static(cls, name), (classmethod, staticmethod))
    # Core calls probe on the class: a plain function would take the options for self.
    given = arguments if bound or name == "probe" else ["self", *arguments]
    try:
        signature = inspect.signature(getattr(cls, name))
    except ValueError:  # made in C: it cannot be looked into
        return None
    try:
        signature.bind(*given)
    except TypeError:
        return (
            f"{name}{signature} of class {cls.__qualname__!r} cannot be called as "
            f"{name}({', '.join(arguments)})"
        )
    return None


def _capability_problems(cls: type[Transport]) -> list[str]:
    capabilities = getattr(cls, "capabilities", None)
    if not isinstance(capabilities, Capabilities):
        return [f"class {cls.__qualname__!r} has no `capabilities`, an instance of Capabilities"]
    problems = [
        f"its capabilities: {unknown('dtype', dtype, DTYPE_BY_NAME, owner='stagelink')}"
        for dtype in sorted(capabilities.dtypes or ())
        if dtype not in DTYPE_BY_NAME
    ]
    if capabilities.in_flight < 1:
        problems.append(f"its capabilities say in_flight {capabilities.in_flight}; 1 is the least")
    if capabilities.same_process and capabilities.distinct_processes:
        problems.append("its capabilities ask for one process and for two")
    return problems


def _option_problems(cls: type[Transport]) -> list[str]:
    options = cls.Options
    if not (inspect.isclass(options) and is_dataclass(options)):
        return [f"Options of class {cls.__qualname__!r} is no dataclass"]
    bare = [
        field.name
        for field in fields(options)
        if field.default is MISSING and field.default_factory is MISSING
    ]
    if bare:
        return [f"its options {quoted(bare)} have no default"]
    try:
        TypeAdapter(options).rebuild(raise_errors=True)
    except (PydanticUserError, NameError) as error:
        return [f"the types of its Options cannot be read: {error}"]
    return []
