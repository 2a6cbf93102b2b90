"""A plan's file: read and parsed by its kind, with errors that name the place."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from stagelink.errors import PlanError
from stagelink.plan.pipedream import parse_pipedream

__all__ = ["is_json", "parse_toml", "read_mapping", "read_text"]


def read_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The plan's mapping: of a TOML file, or as a PipeDream configuration (``.json``) stands for.

    Raises:
        PlanError: the file cannot be read, or is not what its name says.
    """
    parse = parse_pipedream if is_json(path) else parse_toml
    return parse(read_text(path, "plan"), os.fspath(path))


def is_json(path: str | os.PathLike[str]) -> bool:
    """Whether a file is taken for a configuration of PipeDream's: by its name."""
    return Path(path).suffix.lower() == ".json"


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """The text of a file.

    Raises:
        PlanError: it cannot be read, or is no UTF-8 text.
    """
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"{path}: the {what} cannot be read: {reason}") from error
    try:
        # Editors on Windows like to begin a file with a byte order mark, which TOML does not know.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise PlanError(f"{path}: line {line} is not UTF-8 text, as a {what} must be") from error


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
