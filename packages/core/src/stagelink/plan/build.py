"""Construction of a plan from a sound document: names become indices, tensors become edges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import gcd

from stagelink.errors import PlanError
from stagelink.plan.document import Document, LinkTable, TensorTable
from stagelink.plan.dtypes import DTYPE_BY_NAME
from stagelink.plan.model import Edge, LinkRule, Stage, Tensor


def stages_of(document: Document) -> tuple[Stage, ...]:
    """The stages, in the order of the file, which is the pipeline's."""
    turns: list[tuple[int, ...] | None] = [None] * len(document.stages)
    if document.pipeline.routing == "diagonal":
        turns = [*diagonal([len(table.ranks) for table in document.stages])]
    return tuple(
        Stage(
            index,
            table.name,
            tuple(table.ranks),
            table.device,
            table.warm_up,
            turns[index],
            table.arguments,
        )
        for index, table in enumerate(document.stages)
    )


def tensors_of(document: Document) -> tuple[Tensor, ...]:
    """The tensors, sorted by name, so that their order in the file means nothing anywhere."""
    stages = _stage_indices(document)
    tables = sorted(document.tensors, key=lambda table: table.name)
    return tuple(_tensor(table, stages) for table in tables)


def edges_of(tensors: Iterable[Tensor]) -> tuple[Edge, ...]:
    """One edge for each tensor and consumer, numbered in that order."""
    ends = [(tensor, target) for tensor in tensors for target in tensor.targets]
    return tuple(Edge(index, tensor, target) for index, (tensor, target) in enumerate(ends))


def rules_of(document: Document) -> tuple[LinkRule, ...]:
    """The link rules, in the order of the file."""
    stages = _stage_indices(document)
    return tuple(_rule(index, table, stages) for index, table in enumerate(document.links))


def servers_of(document: Document) -> tuple[tuple[int, ...], ...] | None:
    """The ranks of each server, where the plan lists them."""
    servers = document.pipeline.servers
    return None if servers is None else tuple(tuple(ranks) for ranks in servers)


def _stage_indices(document: Document) -> dict[str, int]:
    return {table.name: index for index, table in enumerate(document.stages)}


def _tensor(table: TensorTable, stages: Mapping[str, int]) -> Tensor:
    grad = table.grad
    if grad is None:
        grad = table.dtype is None or DTYPE_BY_NAME[table.dtype].differentiable
    return Tensor(
        name=table.name,
        source=stages[table.from_],
        targets=tuple(stages[name] for name in table.to),
        dtype=table.dtype,
        shape=None if table.shape is None else tuple(table.shape),
        grad=grad,
    )


def _rule(index: int, table: LinkTable, stages: Mapping[str, int]) -> LinkRule:
    keys = {
        key: tuple(stages[name] for name in values) if key in {"from", "to"} else tuple(values)
        for key, values in table.keys().items()
    }
    return LinkRule(index, tuple(table.transport), keys)


_LONGEST = 4000
"""Twice as many, and the warm-up, are walked to verify a plan."""


def diagonal(replicas: Sequence[int]) -> list[tuple[int, ...]]:
    """Replica of microbatch 0, 1, …, up to where it repeats, for each stage of a line.

    This is PipeDream's own routing. The first stage goes round its replicas. From a stage to the
    next, replica ``r`` sends its own ``f``-th microbatch to replica ``(f + r) mod C`` of ``C``; so
    each next replica takes them by ``f`` and then by ``r``, which is the order of their global
    numbers. Every replica of the one talks to every replica of the other, where round robin needs
    the least common multiple of pairs.
    """
    tables = [tuple(range(replicas[0]))]
    for count, next_count in pairwise(replicas):
        before = tables[-1]
        # In one period of the table before, each replica has an equal share.
        share = len(before) // count
        if len(before) * (next_count // gcd(share, next_count)) > _LONGEST:
            shape = "-".join(map(str, replicas))
            raise PlanError(
                f"pipeline.routing: the diagonal of {shape} replicas repeats only after more than "
                f"{_LONGEST} microbatches, too many to verify; use 'round_robin'"
            )
        tables.append(_next(before * (next_count // gcd(share, next_count)), count, next_count))
    return tables


def _next(before: Sequence[int], count: int, next_count: int) -> tuple[int, ...]:
    had = [0] * count
    table = []
    for replica in before:
        table.append((had[replica] + replica) % next_count)
        had[replica] += 1
    return tuple(table)
