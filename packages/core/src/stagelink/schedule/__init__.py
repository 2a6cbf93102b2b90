"""Schedules: each rank's actions in order, and the proof that they run; pure functions."""

from __future__ import annotations

from stagelink.schedule.actions import (
    UNTIL_END,
    Action,
    Kind,
    Mode,
    actions_for,
    actions_of,
    parse_actions,
)
from stagelink.schedule.routing import (
    microbatches_of,
    most_of_one,
    pairs,
    peers,
    period,
    rank_for,
    replica_for,
)
from stagelink.schedule.verify import Grid, Verification, check_microbatches, grid, require, verify
from stagelink.schedule.versions import rounds_per_update, version_for
from stagelink.schedule.walk import Walked, walk
from stagelink.schedule.warmup import (
    choose_warm_up,
    default_warm_up,
    free_warm_up,
    least_warm_up,
    safe_warm_up,
)
from stagelink.schedule.windows import message_bytes

__all__ = [
    "UNTIL_END",
    "Action",
    "Grid",
    "Kind",
    "Mode",
    "Verification",
    "Walked",
    "actions_for",
    "actions_of",
    "check_microbatches",
    "choose_warm_up",
    "default_warm_up",
    "free_warm_up",
    "grid",
    "least_warm_up",
    "message_bytes",
    "microbatches_of",
    "most_of_one",
    "pairs",
    "parse_actions",
    "peers",
    "period",
    "rank_for",
    "replica_for",
    "require",
    "rounds_per_update",
    "safe_warm_up",
    "verify",
    "version_for",
    "walk",
]
