"""Public names, messages and pages keep to the glossary's words; docstrings begin with what it is.

A docstring begins with a noun or a verb, not with a question word, a preposition or a pronoun.
"Whether" is left to what is true or false: functions that return a bool or a Verdict.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import stagelink

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
TERMS, _, NOT_USED = GLOSSARY.partition("## Words that are not used")

CORE = ROOT / "packages/core/src/stagelink"
SOURCES = sorted((ROOT / "packages").glob("*/src/**/*.py"))
SCRIPTS = sorted(
    file for folder in ("examples", "benchmarks") for file in (ROOT / folder).rglob("*.py")
)
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*/*/README.md"),
        *ROOT.glob("*/README.md"),
    }
    - {ROOT / "CHANGELOG.md", ROOT / "docs/glossary.md"}
)

QUESTIONS = "Who|Whom|Whose|What|Where|When|Why|Which|How|Whoever|Whatever"
OTHERS = "There|Nobody|Somebody|Something|It|So|As|By|Of|For|From|In|With|Once|Not"
BEGINNINGS = re.compile(rf"({QUESTIONS}|{OTHERS})\b")


def idioms() -> dict[str, re.Pattern[str]]:
    """The words that the glossary does not want, each with what finds it across lines."""
    rows = re.findall(r"^\| (`.*?) \|", NOT_USED, re.MULTILINE)
    return {
        words: re.compile(rf"\b{re.escape(words)}\b", re.IGNORECASE)
        for row in rows
        for words in re.findall(r"`([^`]+)`", row)
    }


def text_of(file: Path) -> str:
    """A file's text with its lines joined, as are strings that go on in the next line."""
    text = re.sub(r'"\s*\n\s*f?"|\n\s*#', "", file.read_text())
    return re.sub(r"\s+", " ", text)


class Documented(NamedTuple):
    place: str
    text: str
    says_whether: bool


def documented(file: Path) -> Iterator[Documented]:
    """The public names of a file that have a docstring, and the file itself."""
    place = str(file.relative_to(ROOT))
    tree = ast.parse(file.read_text())
    yield Documented(place, ast.get_docstring(tree) or "", False)
    yield from _within(tree, place)


def _within(parent: ast.Module | ast.ClassDef, place: str) -> Iterator[Documented]:
    for node in parent.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{place}:{node.name}"
        whether = isinstance(node, ast.FunctionDef) and (
            node.returns is not None and ast.unparse(node.returns) in {"bool", "Verdict"}
        )
        yield Documented(name, ast.get_docstring(node) or "", whether)
        if isinstance(node, ast.ClassDef):
            yield from _within(node, name)


def test_the_glossary_says_what_is_not_used() -> None:
    found = idioms()
    assert "how manyth" in found
    assert found["under way"].search("what is Under way")
    assert not found["under way"].search("thunder ways")


@pytest.mark.parametrize("kind", ["sources", "scripts", "pages"])
def test_nothing_is_said_in_words_of_our_own(kind: str) -> None:
    files = {"sources": SOURCES, "scripts": SCRIPTS, "pages": PAGES}[kind]
    assert files
    found = [
        f"{file.relative_to(ROOT)}: {words}"
        for file in files
        for words, pattern in idioms().items()
        if pattern.search(text_of(file))
    ]
    assert found == []


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    every = [one for file in [*SOURCES, *SCRIPTS] for one in documented(file)]
    wrong = [one.place for one in every if BEGINNINGS.match(one.text)]
    wrong += [
        one.place for one in every if one.text.startswith("Whether") and not one.says_whether
    ]
    assert wrong == []


def test_every_term_has_its_class() -> None:
    rows = re.findall(r"^\| (?!term|---)(.*) \|$", TERMS, re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    assert {len(row) for row in cells} == {4}
    for *_, here in cells:
        names = re.findall(r"`([\w.]+)`", here)
        assert names
        for name in names:
            assert exists(name), name


def exists(name: str) -> bool:
    """Whether a name below ``stagelink`` is a module, or something in one."""
    if hasattr(stagelink, name):
        return True
    module, _, attribute = f"stagelink.{name}".rpartition(".")
    try:
        importlib.import_module(f"stagelink.{name}")
    except ImportError:
        return hasattr(importlib.import_module(module), attribute)
    return True


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "docs/how-it-works.md", "docs/writing-a-transport.md"]
)
def test_the_glossary_is_linked(page: str) -> None:
    assert "glossary.md)" in (ROOT / page).read_text()
