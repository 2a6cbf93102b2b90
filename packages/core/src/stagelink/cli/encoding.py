"""Replacements for characters that a terminal, a pipe or a file does not have."""

from __future__ import annotations

import codecs
import io
import sys

__all__ = ["make_printable", "printable"]

_PLAIN = "stagelink.plain"
_LOOKALIKES = str.maketrans({"→": "->", "…": "...", "·": "*", "µ": "u"})


def _replace(error: UnicodeError) -> tuple[str, int]:
    """Error handler of encoders: a look-alike where there is one, else the character's number."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_LOOKALIKES)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error(_PLAIN, _replace)


def printable(text: str, encoding: str) -> str:
    """The text in characters that an encoding has."""
    return text.encode(encoding, _PLAIN).decode(encoding)


def make_printable() -> None:
    """Have stdout and stderr take every character, whatever their encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_PLAIN)
