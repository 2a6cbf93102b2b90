"""Costs of a link between two ranks of one machine, beside torch's own send and recv."""

from __future__ import annotations

from stagelink.bench.handled import pair_plan
from stagelink.bench.ranks import SIZES_BYTES, Job, measure
from stagelink.bench.records import Record

__all__ = ["SIZES_BYTES", "Job", "Record", "measure", "pair_plan"]
