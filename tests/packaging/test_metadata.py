"""The packages are released together: one version, one Python, and each requires its own core."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECTS: dict[str, dict[str, Any]] = {
    file.parent.name: tomllib.loads(file.read_text())["project"]
    for file in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
CORE = PROJECTS["core"]
PLUGINS = {folder: PROJECTS[folder] for folder in PROJECTS if folder != "core"}


def test_there_are_plugins_of_both_kinds_to_check() -> None:
    assert {folder.partition("-")[0] for folder in PLUGINS} == {"transport", "observer"}


@pytest.mark.parametrize("folder", PROJECTS)
def test_all_have_the_same_version_and_python(folder: str) -> None:
    project = PROJECTS[folder]
    assert project["version"] == CORE["version"]
    assert project["requires-python"] == CORE["requires-python"]


@pytest.mark.parametrize("folder", PLUGINS)
def test_a_plugin_requires_exactly_its_own_core(folder: str) -> None:
    assert f"stagelink=={CORE['version']}" in PLUGINS[folder]["dependencies"]


@pytest.mark.parametrize("folder", PLUGINS)
def test_core_offers_the_plugin_as_an_extra(folder: str) -> None:
    word = folder.partition("-")[2]
    extra = CORE["optional-dependencies"][word]
    assert extra == [f"{PLUGINS[folder]['name']}=={CORE['version']}"]


@pytest.mark.parametrize("folder", PLUGINS)
def test_the_entry_points_name_is_the_extras_name(folder: str) -> None:
    kind, _, word = folder.partition("-")
    points = PLUGINS[folder]["entry-points"][f"stagelink.{kind}s"]
    assert list(points) == [word]


@pytest.mark.parametrize("folder", PROJECTS)
def test_what_is_installed_is_what_is_here(folder: str) -> None:
    assert metadata.version(PROJECTS[folder]["name"]) == PROJECTS[folder]["version"]


@pytest.mark.parametrize("folder", PROJECTS)
def test_types_and_license_are_there(folder: str) -> None:
    package = ROOT / "packages" / folder
    assert [file.name for file in package.glob("src/*/py.typed")] == ["py.typed"]
    assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_core_imports_without_what_an_extra_brings() -> None:
    """Each module but the one that draws: its callers load it when a drawing is asked for."""
    program = """
import importlib, pkgutil, re, sys
def dist(requirement): return re.match("[a-z0-9-]+", requirement)[0].replace("-", "_")
for requirement in sys.argv[1:]: sys.modules[dist(requirement)] = None
import stagelink
for module in pkgutil.walk_packages(stagelink.__path__, "stagelink."):
    if module.name not in {"stagelink.__main__", "stagelink.bench.plot"}:
        importlib.import_module(module.name)
"""
    offered = itertools.chain.from_iterable(CORE["optional-dependencies"].values())
    # pytest runs the kit, and the module that does so says in one line that it is absent.
    extras = [requirement for requirement in offered if not requirement.startswith("pytest>=")]
    subprocess.run([sys.executable, "-c", program, *extras], check=True)
