"""What all ranks must agree on, as a flat mapping of texts to hash, send and compare."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from stagelink.plan.rules import named_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stagelink.plan.model import Stage, Tensor
    from stagelink.plan.plan import Plan

__all__ = ["differences", "digest_of", "facts_of"]

_NOT_GIVEN = "not given"


def facts_of(plan: Plan) -> dict[str, str]:
    """The facts of a plan: "OWNER WORD" to a value's text, the last word free of spaces.

    What each rank may choose for itself is left out: limits, interface, ports, spin, observers,
    and the number of microbatches, which a session agrees on.
    """
    return {f"{owner} {word}": _text(value) for owner, word, value in _facts(plan)}


def digest_of(facts: Mapping[str, str]) -> str:
    """Hex SHA-256 of facts, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(facts.items())).encode()).hexdigest()


def differences(mine: Mapping[str, str], theirs: Mapping[str, str], peer: str) -> list[str]:
    """Where two ranks' facts differ, one line each, sorted.

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


def _facts(plan: Plan) -> Iterator[tuple[str, str, object]]:
    yield "pipeline", "schedule", plan.schedule
    yield "pipeline", "routing", plan.routing
    yield "pipeline", "window", plan.window
    yield "pipeline", "servers", plan.servers
    yield "control", "inline_bytes", plan.control.inline_bytes
    names = [stage.name for stage in plan.stages]
    for stage in plan.stages:
        for word, value in _stage_facts(stage):
            yield f"stage {stage.name!r}", word, value
    for tensor in plan.tensors:
        for word, value in _tensor_facts(tensor, names):
            yield f"tensor {tensor.name!r}", word, value
    for rule in plan.rules:
        yield f"link rule {rule.index}", "keys", named_keys(rule, names)
        yield f"link rule {rule.index}", "transport", rule.transports
    for name, options in plan.transports.items():
        yield f"transport {name!r}", "options", options


def _stage_facts(stage: Stage) -> Iterator[tuple[str, object]]:
    yield "place", stage.index
    yield "ranks", stage.ranks
    yield "device", stage.device
    yield "warm_up", stage.warm_up
    yield "arguments", dict(stage.arguments) or None


def _tensor_facts(tensor: Tensor, names: list[str]) -> Iterator[tuple[str, object]]:
    yield "from", names[tensor.source]
    yield "to", [names[target] for target in tensor.targets]
    yield "dtype", tensor.dtype
    yield "shape", tensor.shape
    yield "grad", tensor.grad


def _text(value: object) -> str:
    return _NOT_GIVEN if value is None else json.dumps(value, sort_keys=True)


def _owners(facts: Mapping[str, str]) -> set[str]:
    return {_owner(key) for key in facts}


def _owner(key: str) -> str:
    return key.rpartition(" ")[0]
