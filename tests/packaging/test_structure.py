"""The house's own rules: layers that are all named, modules and classes of a size to read."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import stagelink
import stagelink.runner

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "packages").glob("*/src/**/*.py"))
LINTER: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
    "importlinter"
]
CONTRACTS: dict[str, dict[str, Any]] = {one["name"]: one for one in LINTER["contracts"]}
LAYERS = [
    set(layer.split(" | ")) for layer in CONTRACTS["Core is built in layers"]["layers"][::-1]
]

MOST_LINES = 400
MOST_METHODS = 25
TESTS = {"TransportConformance"}
"""Classes of tests, which have as many methods as there are tests."""


def methods(node: ast.ClassDef) -> int:
    return sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)


def test_modules_are_of_a_size_to_read() -> None:
    lines = {file: len(file.read_text().splitlines()) for file in SOURCES}
    long = {file for file in SOURCES if lines[file] > MOST_LINES}
    assert not long


def test_classes_are_of_a_size_to_read() -> None:
    trees = [ast.parse(file.read_text()) for file in SOURCES]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    wide = {one.name for one in classes if methods(one) > MOST_METHODS}
    assert wide == TESTS


def test_how_it_works_has_every_layer_in_its_order() -> None:
    page = (ROOT / "docs/how-it-works.md").read_text()
    section = page.partition("## The layers\n")[2].partition("\n## ")[0]
    rows = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`.*?) \|", section, re.M)]
    assert [*map(set, rows), {"__main__"}] == LAYERS


def test_plugins_are_kept_out_of_every_layer_but_two() -> None:
    rule = CONTRACTS["Plugins know core's transport contract and its errors, nothing else"]
    rooms = {f"stagelink.{room}" for layer in LAYERS for room in layer}
    assert set(rule["forbidden_modules"]) == rooms - {"stagelink.transport", "stagelink.errors"}
    assert set(rule["source_modules"]) == set(LINTER["root_packages"]) - {"stagelink"}


def test_cycles_are_looked_for_everywhere() -> None:
    rule = CONTRACTS["No import cycle, imports for type checkers included"]
    assert rule["ancestors"] == LINTER["root_packages"]
    assert not LINTER["exclude_type_checking_imports"]


def test_modules_that_how_it_works_names_exist() -> None:
    page = (ROOT / "docs/how-it-works.md").read_text()
    rooms = "|".join(sorted(room for layer in LAYERS for room in layer))
    names = re.findall(rf"`((?:{rooms})\.\w+)[`.]", page)
    assert names
    core = ROOT / "packages/core/src/stagelink"
    paths = {name: core / name.replace(".", "/") for name in names}
    found = {
        name for name, path in paths.items() if path.is_dir() or path.with_suffix(".py").is_file()
    }
    assert set(names) == found


def test_a_public_name_is_one_class() -> None:
    """What users and plugins import is called like nothing else in core."""
    core = ROOT / "packages/core/src/stagelink"
    trees = {file: ast.parse(file.read_text()) for file in SOURCES if core in file.parents}
    public = {
        node.name
        for file, tree in trees.items()
        if file.parent == core / "transport" or file == core / "errors.py"
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    public |= {*stagelink.__all__, *stagelink.runner.__all__}
    classes = Counter(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    )
    assert public & {"Handler", "Transport"} == {"Handler", "Transport"}
    assert not {name for name in public if classes[name] > 1}
