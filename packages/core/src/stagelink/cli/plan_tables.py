"""A plan, its verification and its time slots as text for a person, and the slots as JSON.

Like links of many ranks share a row; a grid that is too wide is cut in parts.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from stagelink.cli.assumed import Assumed, AssumedLink
from stagelink.cli.output import new_table
from stagelink.plan import Plan, Stage
from stagelink.schedule import Action, Grid, Verification, verify
from stagelink.text import ranges
from stagelink.transport.contract import Footprint, Link

_MOST_LISTED = 6
_MOST_OF_A_REASON = 100


def plan_tables(
    plan: Plan,
    result: Verification,
    assumed: Assumed,
    problem: str | None,
    actions: Mapping[int, Sequence[Action]] | None,
) -> Iterator[Text | Table]:
    """Texts and tables to print, from top to bottom; at the end whether the plan can run."""
    facts = f"schedule {plan.schedule}, {plan.microbatches} microbatches, {plan.world_size} ranks"
    yield Text.assemble((plan.name, "bold"), f": {facts}")
    yield _stages(plan, result)
    for stage in plan.stages:
        if stage.arguments:
            given = ", ".join(f"{name} as {to}" for name, to in stage.arguments.items())
            yield Text(f"{stage.name}: its module is given {given}")
    yield _links(plan, assumed.links)
    if assumed.memory:
        yield Text(_shared_memory(assumed.memory))
    if plan.window is not None:
        own = verify(dataclasses.replace(plan, window=None), result.microbatches, actions)
        changes = "; ".join(_differences(plan, result, own))
        yield Text(f"window = {plan.window} by hand: {changes}")
    for note in assumed.notes:
        yield Text(f"note: {note}")
    yield from _conclusion(plan, result, problem)


def _stages(plan: Plan, result: Verification) -> Table:
    table = new_table("Stages", "stage", "ranks", "device", "warm-up", "each receives at most")
    for stage, warm_up in zip(plan.stages, result.warm_up, strict=True):
        ahead = str(warm_up) if plan.has_warm_up else "-"
        memory = _memory(stage, result)
        table.add_row(stage.name, ranges(sorted(stage.ranks)), stage.device, ahead, memory)
    if None in result.receive_bytes.values():
        table.caption = "unknown: not every tensor has a dtype and a shape in the plan"
    return table


def _memory(stage: Stage, result: Verification) -> str:
    """What each rank of the stage may have to hold; replicas differ where shares are uneven."""
    holders: defaultdict[int | None, list[int]] = defaultdict(list)
    for rank in sorted(stage.ranks):
        holders[result.receive_bytes[rank]].append(rank)
    if len(holders) == 1:
        return _bytes(*holders)
    return "\n".join(f"{_bytes(size)} ({ranges(ranks)})" for size, ranks in holders.items())


def _bytes(size: int | None) -> str:
    return "unknown" if size is None else decimal(size)


def _links(plan: Plan, links: Sequence[AssumedLink]) -> Table:
    table = new_table("Links", "from → to", "ranks", "tensors", "transport", "window", "why")
    where = "on one server" if plan.servers is None else "on the servers of the plan"
    table.caption = (
        f"assumed: every rank is a process of its own {where}, on a machine like this one; "
        "when the ranks connect, each speaks for itself"
    )
    for alike in _alike(plan, links):
        first = alike[0]
        source, target = plan.stage_of(first.source), plan.stage_of(first.target)
        table.add_row(
            f"{source.name} → {target.name}",
            _ranks(alike),
            ", ".join(first.tensors),
            first.transport or Text("none", "bold red"),
            str(first.window),
            _why(first),
        )
    return table


def _shared_memory(memory: Mapping[Link, Footprint]) -> str:
    each = [footprint.size_bytes for footprint in memory.values()]
    slots = [footprint.slots for footprint in memory.values()]
    names = ", ".join(sorted({link.transport for link in memory}))
    return (
        f"shared memory for {names}, as needed: at most {max(slots)} slots and "
        f"{decimal(max(each))} for a direction of a link, {decimal(sum(each))} for all"
    )


def _alike(plan: Plan, links: Sequence[AssumedLink]) -> list[list[AssumedLink]]:
    rows: defaultdict[Hashable, list[AssumedLink]] = defaultdict(list)
    for link in links:
        stages = plan.stage_of(link.source).index, plan.stage_of(link.target).index
        # A reason names the rank that it was found on; those that differ in nothing else are one.
        words = _why(link) if link.transport else link.reasons[0]
        why = re.sub(r"\brank \d+", "rank", words)
        rows[stages, link.tensors, link.window, link.transport, why].append(link)
    return list(rows.values())


def _ranks(links: Sequence[AssumedLink]) -> str:
    if len(links) <= _MOST_LISTED:
        return ", ".join(f"{link.source}→{link.target}" for link in links)
    sources = ranges(sorted({link.source for link in links}))
    targets = ranges(sorted({link.target for link in links}))
    return f"{sources} → {targets} ({len(links)} links)"


def _why(link: AssumedLink) -> str:
    choice = link.choice
    if isinstance(choice, str):
        return "see below"
    rule = [] if choice.rule is None else [f"links[{choice.rule}]"]
    decided_by = ", ".join([*rule, *(["auto"] if choice.auto else [])])
    refusals = [f"not {name}: {_short(reason)}" for name, reason in choice.passed_over]
    lower = [f"ranked lower: {', '.join(choice.outranked)}"] if choice.outranked else []
    return "\n".join([decided_by, *lower, *refusals])


def _short(reason: str) -> str:
    """Its beginning; `stagelink doctor` and the JSON have all of it."""
    return reason if len(reason) <= _MOST_OF_A_REASON else f"{reason[:_MOST_OF_A_REASON]}…"


def _conclusion(plan: Plan, result: Verification, problem: str | None) -> Iterator[Text]:
    if result.ok:
        found = f"{result.microbatches} microbatches run through, no deadlock"
        if plan.asynchronous:
            found = (
                f"no deadlock, however many microbatches there are; a walk of "
                f"{result.microbatches} agrees"
            )
        yield Text.assemble(("Verified: ", "bold green"), f"{found}.")
    if problem is not None:
        yield Text.assemble(("Refused: ", "bold red"), problem)


def _differences(plan: Plan, result: Verification, own: Verification) -> Iterator[str]:
    """What a window set by hand changes from the schedule's own, in words."""
    others = sorted(set(own.windows))
    yield f"the schedule's own windows are {', '.join(map(str, others)) or 'none'}"
    if result.ok and own.ok:
        changed = result.rounds != own.rounds
        without = f"instead of {own.rounds}" if changed else "as without"
        yield f"all {result.microbatches} microbatches take {result.rounds} rounds, {without}"
    for rank in range(plan.world_size):
        here, there = result.receive_bytes[rank], own.receive_bytes[rank]
        if here is not None and there is not None and here != there:
            yield f"rank {rank} may have to hold {decimal(here)} instead of {decimal(there)}"


_MOST_SLOTS = 400
_IDLE = "."
_LEGEND = (
    "Time slots, if every action took one and messages none (F and B with a number: forward and "
    "backward of that microbatch"
)


def grid_texts(plan: Plan, grid: Grid, width: int) -> Iterator[Text]:
    """The grid in parts of some width; of many slots the first and the last."""
    cells = _cells(grid)
    names = [f"{plan.stage_of(rank).name} {rank}" for rank in range(plan.world_size)]
    label = max(len(name) for name in [*names, "slot"])
    each = 1 + max(len(str(grid.slots)), *(len(cell) for row in cells for cell in row.values()), 1)
    shown = list(range(grid.slots))
    if grid.slots > _MOST_SLOTS:
        shown = shown[: _MOST_SLOTS // 2] + shown[-_MOST_SLOTS // 2 :]
    mark = "; ! waits in the cycle, ? for one that does" if grid.waits else ""
    yield Text(f"{_LEGEND}{mark})")
    per_part = max(1, (width - label) // each)
    for first in range(0, len(shown), per_part):
        part = shown[first : first + per_part]
        text = Text(f"{'slot':<{label}}" + "".join(f"{slot:>{each}}" for slot in part), "bold")
        for name, row in zip(names, cells, strict=True):
            text.append(f"\n{name:<{label}}", "not bold")
            for slot in part:
                cell = row.get(slot, _IDLE)
                text.append(f"{cell:>{each}}", "red" if cell[-1] in "!?" else "not bold")
        yield text
    if grid.slots > len(shown):
        yield Text(f"{grid.slots - len(shown)} slots in the middle are left out; --json has them")


def grid_values(grid: Grid) -> dict[str, Any]:
    """The grid as JSON has it: by rank its actions by slot, null where it is idle."""
    return {
        "slots": [
            [str(row[slot]) if slot in row else None for slot in range(grid.slots)]
            for row in grid.rows
        ],
        "waits": {rank: str(action) for rank, action in grid.waits.items()},
        "deadlock": sorted(grid.cycle),
    }


def _cells(grid: Grid) -> list[dict[int, str]]:
    cells = [{slot: str(action) for slot, action in row.items()} for row in grid.rows]
    for rank, action in grid.waits.items():
        cells[rank][max(cells[rank], default=-1) + 1] = (
            f"{action}{'!' if rank in grid.cycle else '?'}"
        )
    return cells
