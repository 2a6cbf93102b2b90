"""What a link costs between two ranks of one machine, beside torch's own send and recv."""

from __future__ import annotations

from stagelink.bench.handled import pair_plan
from stagelink.bench.ranks import Job, measure
from stagelink.bench.records import Record

__all__ = ["Job", "Record", "measure", "pair_plan"]
