"""The words of an error: values cut short, names listed, the closest one named."""

from __future__ import annotations

import pytest

from stagelink.text import did_you_mean, quoted, ranges, repeats, shown, unknown


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([3, 4], "3-4"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_many_ranges_are_cut() -> None:
    assert ranges(range(0, 48, 2)).endswith(", 44, 46")
    assert ranges(range(0, 50, 2)).endswith(", 44, 46, …")


def test_many_names_are_cut_and_counted() -> None:
    names = [f"s{index}" for index in range(30)]
    assert quoted(names[:2]) == "'s0', 's1'"
    assert quoted(names[:2], " → ") == "'s0' → 's1'"
    assert quoted(names[:24]).endswith(", 's22', 's23'")
    assert quoted(names).endswith(", 's22', 's23', … (30 in all)")


def test_long_values_are_cut() -> None:
    assert shown("ab") == "'ab'"
    assert len(shown("x" * 1000)) <= 60
    assert len(shown(list(range(1000)))) <= 60
    assert shown(10**5000) == "<int>"


def test_repeats() -> None:
    assert list(repeats("abcabb")) == [(3, 0), (4, 1), (5, 1)]
    assert list(repeats([])) == []


def test_the_closest_name() -> None:
    assert did_you_mean("GLOO", ["gloo", "shm"]) == " (did you mean 'gloo'?)"
    assert did_you_mean("xyz", ["gloo", "shm"]) == ""
    assert did_you_mean("xyz", []) == ""


def test_an_unknown_name() -> None:
    assert unknown("stage", "x", []) == "unknown stage 'x'; the plan has none"
    assert unknown("stage", "ab", ["abc", "z"], owner="this version") == (
        "unknown stage 'ab' (did you mean 'abc'?); this version has 'abc', 'z'"
    )
