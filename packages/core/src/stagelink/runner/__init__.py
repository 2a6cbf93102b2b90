"""Runs a module by the plan's schedule: microbatches, gradients, replicas, epochs."""

from __future__ import annotations

from stagelink.runner.losses import BackwardDone, LossSum
from stagelink.runner.pipeline import PipelineRunner
from stagelink.runner.stream import Output
from stagelink.runner.summary import Shares, Summary

__all__ = ["BackwardDone", "LossSum", "Output", "PipelineRunner", "Shares", "Summary"]
