"""Checks across a plan's tables, each run only where what it builds on is sound."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from stagelink.plan.dead_rules import dead_rules
from stagelink.plan.document import Document, TensorTable
from stagelink.plan.dtypes import DTYPE_BY_NAME
from stagelink.plan.model import AUTO, WITH_WARM_UP, most_microbatches, too_many_microbatches
from stagelink.plan.problems import Problem
from stagelink.text import did_you_mean, quoted, ranges, repeats, shown, unknown


def _names(key: str, document: Document) -> Iterator[Problem]:
    """Names of stages, or of tensors, that are taken."""
    names = [table.name for table in getattr(document, key)]
    for index, first in repeats(names):
        text = f"{names[index]!r} is already the name of {key}[{first}]"
        yield Problem((key, index, "name"), text)


def _microbatches(document: Document) -> Iterator[Problem]:
    """More microbatches than a session may have."""
    text = too_many_microbatches(document.pipeline.microbatches, len(document.stages))
    if text is not None:
        yield Problem(("pipeline", "microbatches"), text)


def _warm_ups(document: Document) -> Iterator[Problem]:
    """Warm-up set by hand where the schedule has none, or larger than any session."""
    schedule, most = document.pipeline.schedule, most_microbatches(len(document.stages))
    for index, table in enumerate(document.stages):
        if table.warm_up is not None and (table.warm_up + 1) * len(table.ranks) > most:
            text = f"{table.warm_up}: no session has so many microbatches; at most {most} in all"
            yield Problem(("stages", index, "warm_up"), text)
        if table.warm_up is not None and schedule not in WITH_WARM_UP:
            text = f"{table.warm_up}: the schedule {schedule!r} has no warm-up to set; remove it"
            yield Problem(("stages", index, "warm_up"), text)


def _ranks(document: Document) -> Iterator[Problem]:
    """Ranks that hold two places, and gaps in their numbers."""
    holders: dict[int, str] = {}
    for index, table in enumerate(document.stages):
        for replica, rank in enumerate(table.ranks):
            if rank in holders:
                text = f"rank {rank} is already {holders[rank]}; a rank holds one stage"
                yield Problem(("stages", index, "ranks", replica), text)
            holders.setdefault(rank, f"replica {replica} of stage {table.name!r}")
    yield from _gap(sorted(holders))


def _servers(document: Document) -> Iterator[Problem]:
    """Servers whose lists of ranks do not name each rank once."""
    if document.pipeline.servers is None:
        return
    missing = {rank for table in document.stages for rank in table.ranks}
    last = len(missing) - 1
    for server, members in enumerate(document.pipeline.servers):
        for place, rank in enumerate(members):
            if rank not in missing:
                what = "is on two servers or twice on one" if rank <= last else "holds no stage"
                text = f"rank {rank} {what}; each of the ranks 0 to {last} belongs to one server"
                yield Problem(("pipeline", "servers", server, place), text)
            missing.discard(rank)
    if missing:
        text = f"no server has rank {ranges(sorted(missing))}; list every rank, or no servers"
        yield Problem(("pipeline", "servers"), text)


def _observers(document: Document) -> Iterator[Problem]:
    """Observers that are named twice."""
    names = document.pipeline.observers
    for place, first in repeats(names):
        text = f"{names[place]!r} is already observers[{first}]"
        yield Problem(("pipeline", "observers", place), text)


def _gap(held: list[int]) -> Iterator[Problem]:
    count = len(held)
    beyond = [rank for rank in held if rank >= count]
    if beyond:
        missing = ranges(sorted(set(range(count)).difference(held)))
        text = f"a gap: {count} ranks are numbered 0 to {count - 1}; missing: {missing}"
        yield Problem(("stages",), f"{text}; too high: {ranges(beyond)}")


def _gradients(document: Document) -> Iterator[Problem]:
    """Gradients asked of dtypes that have none."""
    for index, table in enumerate(document.tensors):
        if table.grad and table.dtype and not DTYPE_BY_NAME[table.dtype].differentiable:
            text = f"true, but {table.dtype} has no gradients; leave grad out or set it to false"
            yield Problem(("tensors", index, "grad"), text)


def _tensor_ends(document: Document) -> Iterator[Problem]:
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


def _arguments(document: Document) -> Iterator[Problem]:
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


def _connections(document: Document) -> Iterator[Problem]:
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
    source: str, target: str, stages: Mapping[str, int], successors: Mapping[int, list[int]]
) -> str | None:
    if source not in stages or target not in stages or stages[target] > stages[source]:
        return None
    if target == source:
        return f"stage {source!r} cannot send to itself"
    path = shortest_path(successors, stages[target], stages[source])
    if path is None:
        return f"backward: {target!r} is listed before {source!r}; list stages in pipeline order"
    names = list(stages)
    cycle = quoted((names[index] for index in [stages[source], *path]), " → ")
    return f"a cycle: {cycle}; tensors go to later stages only"


def shortest_path(
    successors: Mapping[int, Iterable[int]], start: int, goal: int
) -> list[int] | None:
    """The nodes of a shortest path from start to goal, both included; None where there is none."""
    came_from = {start: start}
    waiting = deque([start])
    while waiting and goal not in came_from:
        node = waiting.popleft()
        for successor in successors.get(node, ()):
            if successor not in came_from:
                came_from[successor] = node
                waiting.append(successor)
    if goal not in came_from:
        return None
    path = [goal]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return path[::-1]


def pieces(ends: Iterable[tuple[int, int]]) -> Sequence[list[int]]:
    """The connected pieces of an undirected graph, each sorted, by their smallest node."""
    piece_of: dict[int, set[int]] = {}
    for pair in ends:
        smaller, larger = sorted((piece_of.get(node, {node}) for node in pair), key=len)
        if smaller is not larger:
            larger |= smaller
            piece_of |= dict.fromkeys([*smaller, *pair], larger)
    return [sorted(piece) for node, piece in sorted(piece_of.items()) if node == min(piece)]


def _rule_names(document: Document) -> Iterator[Problem]:
    """Stages and tensors that rules name and the plan does not have."""
    stages = {table.name for table in document.stages}
    known = {"stage": stages, "tensor": {table.name for table in document.tensors}}
    for index, rule in enumerate(document.links):
        for key, names in rule.keys().items():
            kind = "stage" if key in {"from", "to"} else key
            for place, name in enumerate(names if kind in known else ()):
                if name not in known[kind]:
                    text = unknown(kind, name, sorted(known[kind]))
                    yield Problem(("links", index, key, place), text)


def _rule_numbers(document: Document) -> Iterator[Problem]:
    """Ranks and servers that rules name and the plan does not have."""
    ranks = sum(len(table.ranks) for table in document.stages)
    counts = {"rank": ranks, "server": len(document.pipeline.servers or ())}
    for index, rule in enumerate(document.links):
        for key, numbers in rule.keys().items():
            kind = key.removeprefix("from_").removeprefix("to_")
            for place, number in enumerate(numbers if kind in counts else ()):
                if number >= counts[kind]:
                    text = f"there is no {kind} {number}; the {kind}s are 0 to {counts[kind] - 1}"
                    if not counts[kind]:
                        none = "the plan lists no servers; give pipeline.servers"
                        text = f"{kind} {number}, but {none}"
                    yield Problem(("links", index, key, place), text)


def _rule_transports(document: Document) -> Iterator[Problem]:
    """Preference lists that say a thing twice, or "auto" beside names."""
    for index, rule in enumerate(document.links):
        names = rule.transport
        for place, first in repeats(names):
            text = f"{names[place]!r} is already transport[{first}]"
            yield Problem(("links", index, "transport", place), text)
        if "auto" in names and tuple(names) != AUTO:
            text = f"{names!r} mixes 'auto' with names; give 'auto' alone, or names alone"
            yield Problem(("links", index, "transport"), text)


def _unused_options(document: Document) -> Iterator[Problem]:
    """Options of transports that no link can take."""
    named = {name for rule in document.links for name in rule.transport}
    chosen_freely = "auto" in named or all(rule.keys() for rule in document.links)
    for name in document.transports:
        if name == "auto":
            text = "'auto' is a choice among transports and has no options"
            yield Problem(("transports", name), text)
        elif name not in named and not chosen_freely:
            text = f"never used: the rules name only {quoted(sorted(named))}, for every link"
            yield Problem(("transports", name), f"{text}{did_you_mean(name, named)}")


_CHECKS: Mapping[str, tuple[Callable[[Document], Iterator[Problem]], str]] = {
    "observers": (_observers, "pipeline"),
    "stage-names": (partial(_names, "stages"), "stages"),
    "microbatches": (_microbatches, "pipeline stages"),
    "warm-ups": (_warm_ups, "pipeline stages"),
    "ranks": (_ranks, "stages"),
    "servers": (_servers, "pipeline ranks"),
    "tensor-names": (partial(_names, "tensors"), "tensors"),
    "gradients": (_gradients, "tensors"),
    "tensor-ends": (_tensor_ends, "tensors stage-names"),
    "arguments": (_arguments, "stages tensor-names tensor-ends"),
    "rule-names": (_rule_names, "links tensors stages"),
    "rule-numbers": (_rule_numbers, "links pipeline ranks"),
    "rule-transports": (_rule_transports, "links"),
    "options": (_unused_options, "links transports rule-transports"),
    "connections": (_connections, "tensor-ends"),
    "rules": (dead_rules, "rule-names rule-numbers servers tensor-ends tensor-names"),
}
"""By what a check vouches for: the check, and what must be sound before.

Without the latter one slip would be told many times over: a misspelt stage name is also a tensor
without an end, a graph in pieces and a rule that never matches.
"""


def cross_problems(document: Document, unsound: Iterable[str]) -> Iterator[Problem]:
    """Find what is wrong between the tables and values of a document.

    The tables of ``unsound`` keys are wrong in themselves; the document has stand-ins for them.
    """
    broken = set(unsound)
    for vouches_for, (check, needs) in _CHECKS.items():
        if not broken.isdisjoint(needs.split()):
            broken.add(vouches_for)
            continue
        for problem in check(document):
            broken.add(vouches_for)
            yield problem
