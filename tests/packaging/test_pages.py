"""The pages' paragraphs are filled: no line is wider than the rest, none ends far too early."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
ROOMS = ("*.md", "docs/**/*.md", "packages/*/*.md", "examples/*/*.md", "benchmarks/*.md")
PAGES = [page for pattern in ROOMS for page in sorted(ROOT.glob(pattern))]
WIDTH = 100
SHORT = 64
"""A line that the next word would not make longer than this ends too early."""

_ITEM = re.compile(r"\s*([-*]|\d+\.) ")
_NO_PROSE = ("|", "#", "<", "![", "[!")


def _paragraphs(page: Path) -> Iterator[list[tuple[int, str]]]:
    """Each paragraph and each item of a list, by its numbered lines; no code, tables, headings."""
    paragraph: list[tuple[int, str]] = []
    in_code = False
    for number, line in enumerate([*page.read_text().splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        in_code ^= fence
        prose = not (fence or in_code) and line.strip() and not line.lstrip().startswith(_NO_PROSE)
        if paragraph and (not prose or _ITEM.match(line)):
            yield paragraph
            paragraph = []
        if prose:
            paragraph.append((number, line))


def _faults(page: Path) -> Iterator[str]:
    for paragraph in _paragraphs(page):
        for (number, line), following in zip(
            paragraph, [*(line for _, line in paragraph[1:]), None], strict=True
        ):
            if len(line) > WIDTH and " " in line.strip():
                yield f"{page.name}:{number}: {len(line)} characters, more than {WIDTH}"
            if following is not None and len(f"{line} {following.split()[0]}") < SHORT:
                yield f"{page.name}:{number}: ends early: {line!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_paragraphs_are_filled(page: Path) -> None:
    assert list(_faults(page)) == []
