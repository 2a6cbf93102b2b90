"""Helpers of the benchmarks: medians, and a record of where they were run."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RESULTS = Path(__file__).parent / "results"


def median(values: Sequence[float]) -> float:
    """The median; the machine's noise makes means worthless."""
    return statistics.median(values)


def timed(step: Callable[[], None]) -> float:
    """Seconds of a step, all ranks starting it together; the slowest one's."""
    dist.barrier()
    began = time.perf_counter()
    step()
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def machine() -> dict[str, Any]:
    """Describe what a figure depends on besides the code."""
    return {
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def record(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table, and keep them in ``results/NAME.json``."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine(), "rows": list(rows)}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    columns = list(rows[0])
    cells = [[_shown(row[column]) for column in columns] for row in rows]
    widths = [max(map(len, [column, *one])) for column, *one in zip(columns, *cells, strict=True)]
    for line in [columns, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
