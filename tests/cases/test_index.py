"""Where each public bug report that matters to us has its test.

The cases are numbered as in the project's collection of real-world cases; a test of a case carries
its number in its name: ``test_c001_…``.
"""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]

CPU_CASES = (
    *(1, 2, 3, 5, 6, 9, 10, 12, 14, 15, 17),
    *(20, 22, 23, 27, 28, 29, 30, 31, 34, 36, 37, 38, 39),
    *(41, 42, 45, 48, 49, 50, 53, 54, 56, 57, 58, 63, 64, 65, 66, 67, 68, 69),
    *(70, 71, 72, 73, 74, 78, 79, 80, 82, 85, 86, 87, 88, 89),
    *(90, 91, 92, 95, 96, 97, 102, 103, 105, 107, 109, 112, 115, 117, 120),
)
"""Every case that needs no GPU, or has a part that needs none."""

BY_OTHER_NAMES = {
    17: ("runner/test_equality.py", "test_lines"),
    102: ("", "with the GPU transports: helper threads set their device"),
}
"""Cases that a test covers under another name, or that wait for the part they are about."""


def _tests_by_case() -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for name in re.findall(r"^def (test_c\d{3}\w*)", file.read_text("utf-8"), re.MULTILINE):
            for case in re.findall(r"c(\d{3})(?=_)", name):
                found.setdefault(int(case), []).append(f"{file.relative_to(TESTS)}::{name}")
    return found


def test_every_case_has_a_test() -> None:
    assert sorted(set(CPU_CASES) - _tests_by_case().keys() - BY_OTHER_NAMES.keys()) == []


def test_no_test_has_a_number_that_is_no_case() -> None:
    assert sorted(_tests_by_case().keys() - set(CPU_CASES)) == []


def test_what_has_another_name_exists() -> None:
    for file, name in BY_OTHER_NAMES.values():
        if file:
            assert f"\ndef {name}(" in (TESTS / file).read_text("utf-8")
