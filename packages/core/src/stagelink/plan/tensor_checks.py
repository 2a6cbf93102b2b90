"""Checks of tensors: their ends, what they promise, and the graph that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.plan.dtypes import DTYPE_BY_NAME
from stagelink.plan.graph import pieces, shortest_path
from stagelink.plan.problems import Problem
from stagelink.text import quoted, repeats, shown, unknown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stagelink.plan.document import Document, TensorTable

__all__ = ["arguments", "connections", "gradients", "tensor_ends", "tensor_names"]


def tensor_names(document: Document) -> Iterator[Problem]:
    """Tensor names that are taken."""
    names = [table.name for table in document.tensors]
    for index, first in repeats(names):
        text = f"{names[index]!r} is already the name of tensors[{first}]"
        yield Problem(("tensors", index, "name"), text)


def gradients(document: Document) -> Iterator[Problem]:
    """Gradients asked of dtypes that have none."""
    for index, table in enumerate(document.tensors):
        if table.grad and table.dtype and not DTYPE_BY_NAME[table.dtype].differentiable:
            text = f"true, but {table.dtype} has no gradients; leave grad out or set it to false"
            yield Problem(("tensors", index, "grad"), text)


def tensor_ends(document: Document) -> Iterator[Problem]:
    """Tensors that nobody takes, or whose stages do not exist or lie the wrong way."""
    stages = {table.name: index for index, table in enumerate(document.stages)}
    successors = _successors(document, stages)
    for index, table in enumerate(document.tensors):
        for key, text in _wrong_ends(table, stages):
            yield Problem(("tensors", index, *key), text)
        for place, target in enumerate(table.to):
            wrong = _wrong_way(table.from_, target, stages, successors)
            if wrong is not None:
                yield Problem(("tensors", index, "to", place), wrong)


def arguments(document: Document) -> Iterator[Problem]:
    """Parameters of modules that are none, that two tensors go to, or that none of these do."""
    renaming = [(i, stage) for i, stage in enumerate(document.stages) if stage.arguments]
    for index, stage in renaming:
        received = [table.name for table in document.tensors if stage.name in table.to]
        taken = {name: name for name in received if name not in stage.arguments}
        for name, parameter in stage.arguments.items():
            path = ("stages", index, "arguments", name)
            if received and name not in received:  # a first stage has a batch, unknown here
                owner = f"stage {stage.name!r}"
                yield Problem(path, unknown("received tensor", name, received, owner=owner))
            if not parameter.isidentifier():
                yield Problem(path, f"{shown(parameter)}: no parameter in Python can be named so")
            other = taken.setdefault(parameter, name)
            if other != name:
                yield Problem(path, f"parameter {parameter!r} already takes tensor {other!r}")


def connections(document: Document) -> Iterator[Problem]:
    """Stages without any tensor, and a pipeline that is really several."""
    names = [table.name for table in document.stages]
    stages = {name: index for index, name in enumerate(names)}
    ends = [(stages[table.from_], stages[to]) for table in document.tensors for to in table.to]
    alone = set(stages.values()).difference(*ends) if len(names) > 1 else set()
    for index in sorted(alone):
        text = f"stage {names[index]!r} is connected to nothing: no tensor leaves or reaches it"
        yield Problem(("stages", index), text)
    parts = pieces(ends)
    if len(parts) > 1:
        shown = " | ".join(quoted(names[index] for index in part) for part in parts)
        text = f"the stages fall into {len(parts)} pieces that exchange nothing: {shown}"
        yield Problem(("tensors",), f"{text}; a plan is one pipeline")


def _successors(document: Document, stages: Mapping[str, int]) -> dict[int, list[int]]:
    successors: dict[int, list[int]] = {}
    for table in document.tensors:
        if table.from_ in stages:
            targets = [stages[name] for name in table.to if name in stages]
            successors.setdefault(stages[table.from_], []).extend(targets)
    return successors


def _wrong_ends(
    table: TensorTable, stages: Mapping[str, int]
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if table.from_ not in stages:
        yield ("from",), unknown("stage", table.from_, stages)
    if not table.to:
        yield ("to",), f"[]: nobody takes tensor {table.name!r}; name a later stage"
    for place, first in repeats(table.to):
        yield ("to", place), f"{table.to[place]!r} is already to[{first}]"
    for place, name in enumerate(table.to):
        if name not in stages:
            yield ("to", place), unknown("stage", name, stages)


def _wrong_way(
    source: str,
    target: str,
    stages: Mapping[str, int],
    successors: Mapping[int, list[int]],
) -> str | None:
    if source not in stages or target not in stages or stages[target] > stages[source]:
        return None
    if target == source:
        return f"stage {source!r} cannot send to itself"
    way = shortest_path(successors, stages[target], stages[source])
    if way is None:
        return f"backward: {target!r} is listed before {source!r}; list stages in pipeline order"
    names = list(stages)
    cycle = quoted((names[index] for index in [stages[source], *way]), " → ")
    return f"a cycle: {cycle}; tensors go to later stages only"
