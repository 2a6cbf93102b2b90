"""Every check across tables, in order, each run only where what it builds on is sound."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stagelink.plan.dead_rules import dead_rules
from stagelink.plan.rule_checks import rule_names, rule_numbers, rule_transports, unused_options
from stagelink.plan.stage_checks import (
    microbatches,
    observers,
    ranks,
    servers,
    stage_names,
    warm_ups,
)
from stagelink.plan.tensor_checks import (
    arguments,
    connections,
    gradients,
    tensor_ends,
    tensor_names,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from stagelink.plan.document import Document
    from stagelink.plan.problems import Problem

__all__ = ["cross_problems"]


class _Check(NamedTuple):
    """A check, the word for what it vouches for, and what must be sound before.

    Without the latter one slip would be told many times over: a misspelt stage name is also a
    tensor without an end, a graph in pieces and a rule that never matches.
    """

    run: Callable[[Document], Iterator[Problem]]
    vouches_for: str
    needs: frozenset[str]


def _check(run: Callable[[Document], Iterator[Problem]], vouches_for: str, needs: str) -> _Check:
    return _Check(run, vouches_for, frozenset(needs.split()))


_CHECKS = (
    _check(observers, "observers", "pipeline"),
    _check(stage_names, "stage-names", "stages"),
    _check(microbatches, "microbatches", "pipeline stages"),
    _check(warm_ups, "warm-ups", "pipeline stages"),
    _check(ranks, "ranks", "stages"),
    _check(servers, "servers", "pipeline ranks"),
    _check(tensor_names, "tensor-names", "tensors"),
    _check(gradients, "gradients", "tensors"),
    _check(tensor_ends, "tensor-ends", "tensors stage-names"),
    _check(arguments, "arguments", "stages tensor-names tensor-ends"),
    _check(rule_names, "rule-names", "links tensors stages"),
    _check(rule_numbers, "rule-numbers", "links pipeline ranks"),
    _check(rule_transports, "rule-transports", "links"),
    _check(unused_options, "options", "links transports rule-transports"),
    _check(connections, "connections", "tensor-ends"),
    _check(dead_rules, "rules", "rule-names rule-numbers servers tensor-ends tensor-names"),
)


def cross_problems(document: Document, unsound: Iterable[str]) -> Iterator[Problem]:
    """What is wrong between the tables and values of a document.

    Args:
        document: the document; its unsound tables hold stand-ins.
        unsound: the top-level keys whose tables are wrong in themselves.
    """
    broken = set(unsound)
    for check in _CHECKS:
        if not broken.isdisjoint(check.needs):
            broken.add(check.vouches_for)
            continue
        for problem in check.run(document):
            broken.add(check.vouches_for)
            yield problem
