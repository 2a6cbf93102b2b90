"""Tools for tests of pipelines and transports: ranks to run on, leaks to find, faults to cause."""

from __future__ import annotations

from stagelink.testing.jobs import Outcome, RankFailedError, report
from stagelink.testing.leaks import LeakCheck, no_leaks
from stagelink.testing.ranks import RankPool, RankProcesses, run_fresh, run_threads
from stagelink.testing.worker import start_rank_server

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
