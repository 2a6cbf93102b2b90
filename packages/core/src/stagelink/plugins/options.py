"""A transport's options: from the plan's ``[transports.NAME]`` table to its own dataclass."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from stagelink.errors import PlanError, PluginError
from stagelink.plugins.plugin_errors import raised
from stagelink.text import shown, unknown
from stagelink.transport.interrupts import raised_by_signal_handler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import JsonValue
    from pydantic_core import ErrorDetails

    from stagelink.transport.contract import Transport

__all__ = ["parse_options"]


def parse_options(cls: type[Transport], given: Mapping[str, JsonValue]) -> Any:
    """Make an instance of ``cls.Options``; unknown keys and wrong types are refused.

    Args:
        cls: a transport that was loaded.
        given: the table's keys and values; empty where the plan has no such table.

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
        text = raised(f"the class of its options, {cls.Options.__qualname__},", error)
        raise PluginError(f"transport {cls.name!r} cannot be used: {text}") from error


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
