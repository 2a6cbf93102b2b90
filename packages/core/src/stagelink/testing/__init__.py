"""Tools for tests of pipelines and transports: ranks to run on, leaks to find, faults to cause."""

from __future__ import annotations

from stagelink.ranks.job import report
from stagelink.ranks.outcome import Outcome, RankFailedError
from stagelink.ranks.processes import RankPool, RankProcesses, run_fresh
from stagelink.ranks.threads import run_threads
from stagelink.ranks.worker import start_rank_server
from stagelink.testing.leaks import LeakCheck, no_leaks

__all__ = [
    "LeakCheck",
    "Outcome",
    "RankFailedError",
    "RankPool",
    "RankProcesses",
    "no_leaks",
    "report",
    "run_fresh",
    "run_threads",
    "start_rank_server",
]
