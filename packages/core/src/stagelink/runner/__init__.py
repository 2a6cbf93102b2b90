"""Runs a module by the plan's schedule: microbatches, gradients, replicas, epochs."""

from __future__ import annotations

from stagelink.runner.pipeline import PipelineRunner
from stagelink.runner.stream import Output
from stagelink.runner.summary import Shares, Summary

__all__ = ["Output", "PipelineRunner", "Shares", "Summary"]
