"""Facts that all ranks must agree on: a flat mapping of texts to hash, send and compare."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["differences", "digest_of", "fact"]

_NOT_GIVEN = "not given"


def fact(value: object) -> str:
    """A value's text, equal on ranks that agree."""
    return _NOT_GIVEN if value is None else json.dumps(value, sort_keys=True)


def digest_of(facts: Mapping[str, str]) -> str:
    """Hex SHA-256 of facts, in any order."""
    return hashlib.sha256(json.dumps(sorted(facts.items())).encode()).hexdigest()


def differences(mine: Mapping[str, str], theirs: Mapping[str, str], peer: str) -> list[str]:
    """Differences of two ranks' facts, one line each, sorted.

    Args:
        mine: this rank's facts.
        theirs: the peer's.
        peer: a word for the peer, as in ``"rank 1"``.
    """
    differing = (key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
    absent = {owner: f"on {peer}" for owner in _owners(mine) - _owners(theirs)}
    absent |= dict.fromkeys(_owners(theirs) - _owners(mine), "here")
    lines = set()
    for key in differing:
        owner = _owner(key)
        if owner in absent:
            lines.add(f"{owner}: absent {absent[owner]}")
        else:
            here, there = mine.get(key, _NOT_GIVEN), theirs.get(key, _NOT_GIVEN)
            lines.add(f"{key}: {here} here, {there} on {peer}")
    return sorted(lines)


def _owners(facts: Mapping[str, str]) -> set[str]:
    return {_owner(key) for key in facts}


def _owner(key: str) -> str:
    return key.rpartition(" ")[0]
