"""The time slots of a session as text: a row per rank, in several parts where it is too wide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stagelink.plan import Plan
    from stagelink.schedule import Grid

__all__ = ["grid_texts", "grid_values"]

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
