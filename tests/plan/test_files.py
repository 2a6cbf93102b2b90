"""Reading the file: every way it can fail names the file, and the line where there is one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from stagelink.errors import PlanError
from stagelink.plan import Plan

if TYPE_CHECKING:
    import os
    from pathlib import Path

TEXT = """\
[pipeline]
microbatches = 8
[[stages]]
name = "größe"
ranks = [0]
"""


def refusal(path: str | os.PathLike[str]) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    return str(caught.value)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_load(tmp_path: Path, mark: bytes) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_bytes(mark + TEXT.encode())
    plan = Plan.load(path)
    assert plan == Plan.load(str(path)) == Plan.from_toml(TEXT)
    assert plan.stages[0].name == "größe"


def test_load_with_other_microbatches(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(TEXT, encoding="utf-8")
    assert Plan.load(path, microbatches=3).microbatches == 3
    with pytest.raises(PlanError, match="microbatches: 0: must be an int of at least 1"):
        Plan.load(path, microbatches=0)


def test_problems_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(TEXT.replace("[0]", "[1]"), encoding="utf-8")
    assert refusal(path).startswith(f"{path}: stages: a gap")


def test_no_such_file(tmp_path: Path) -> None:
    path = tmp_path / "missing.toml"
    assert refusal(path) == f"{path}: the plan cannot be read: No such file or directory"


def test_a_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}: the plan cannot be read: Is a directory"


def test_a_path_that_cannot_be() -> None:
    assert refusal("a\0b.toml") == "a\0b.toml: the plan cannot be read: embedded null byte"


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_bytes(TEXT.encode("latin-1"))
    assert refusal(path) == f"{path}: line 4 is not UTF-8 text, as a plan must be"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[pipeline]\nname = digits\n", r".*\(at line 2, column \d+\)"),
        ("a = 1\na = 2\n", r".*\(at line 2, column \d+\)"),
        ("\na = [\n1,", r".*\(at line 3, the end of the document\)"),
        ("a = " + "[" * 100_000, "its lists or tables are nested too deep"),
    ],
    ids=["word", "twice", "end", "deep"],
)
def test_not_toml(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(text, encoding="utf-8")
    assert re.fullmatch(f"{re.escape(str(path))}: not TOML: {reason}", refusal(path))


def test_a_number_longer_than_python_reads() -> None:
    with pytest.raises(PlanError, match=r"^here: not TOML: Exceeds the limit"):
        Plan.from_toml(f"a = {'9' * 5000}", where="here")
