"""What the README shows is true."""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

import stagelink
from tests.support.docs import blocks, broken_links

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_plan_is_read_and_verified() -> None:
    (text,) = blocks(README, "toml")
    plan = stagelink.Plan.from_dict(tomllib.loads(text))
    assert stagelink.verify(plan).problem is None


@pytest.mark.parametrize("replicas", [(1,), (3,), (1, 1), (1, 2, 1)], ids=str)
def test_the_rules_of_the_plan_fit_every_shape(replicas: tuple[int, ...]) -> None:
    (text,) = blocks(README, "toml")
    shown = tomllib.loads(text)
    ranks = iter(range(sum(replicas)))
    names = [f"stage{index}" for index in range(len(replicas))]
    stages = [
        {"name": name, "ranks": [next(ranks) for _ in range(count)]}
        for name, count in zip(names, replicas, strict=True)
    ]
    tensors = [{"name": f"to_{to}", "from": from_, "to": to} for from_, to in pairwise(names)]
    plan = stagelink.Plan.from_dict({**shown, "stages": stages, "tensors": tensors})
    assert plan.rules[0].transports == ("shm", "gloo")
    assert stagelink.verify(plan).problem is None


def test_the_code_is_python_and_its_names_exist() -> None:
    shown = blocks(README, "python")
    assert shown
    for text in shown:
        compile(text, "README.md", "exec")
        for name in re.findall(r"stagelink\.(\w+)", text):
            assert hasattr(stagelink, name)


def test_every_package_and_its_folder_is_listed() -> None:
    for folder in (ROOT / "packages").iterdir():
        assert f"(packages/{folder.name})" in README


def test_links_lead_somewhere() -> None:
    assert broken_links(ROOT / "README.md") == []
    for page in (ROOT / "docs").glob("*.md"):
        assert broken_links(page) == [], page
