"""Costs of a link between two ranks of one machine, beside torch's own send and recv."""

from __future__ import annotations

from stagelink.bench.handled import pair_plan
from stagelink.bench.pipes import Record
from stagelink.bench.rounds import SIZES_BYTES, Measurement, measure

__all__ = ["SIZES_BYTES", "Measurement", "Record", "measure", "pair_plan"]
