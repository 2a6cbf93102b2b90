"""What stands in a page of documentation."""

from __future__ import annotations

import re

__all__ = ["blocks"]


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
