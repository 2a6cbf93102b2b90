"""A plan's text: read from a file and parsed, with errors that name the place."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagelink.errors import PlanError

if TYPE_CHECKING:
    import os

__all__ = ["parse_toml", "read_text"]


def read_text(path: str | os.PathLike[str]) -> str:
    """The file's text.

    Raises:
        PlanError: it is JSON, cannot be read, or is not UTF-8.
    """
    if Path(path).suffix.lower() == ".json":
        raise PlanError(f"{path}: this version reads TOML plans, no JSON (PipeDream's)")
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"{path}: the plan cannot be read: {reason}") from error
    try:
        # Editors on Windows like to begin a file with a byte order mark, which TOML does not know.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise PlanError(f"{path}: line {line} is not UTF-8 text, as TOML must be") from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The mapping that a TOML text stands for.

    Args:
        text: the text.
        where: the file, or another word for where it came from; errors begin with it.

    Raises:
        PlanError: with line and column.
    """
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where}: not TOML: {_reason(error, text)}") from error


def _reason(error: Exception, text: str) -> str:
    if isinstance(error, RecursionError):
        return "its lists or tables are nested too deep"
    lines = text.count("\n") + 1
    return str(error).replace("at end of document", f"at line {lines}, the end of the document")
