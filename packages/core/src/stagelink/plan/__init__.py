"""Plans: what runs where and what travels between, read from TOML and validated."""

from __future__ import annotations

from stagelink.plan.document import Control, Limits
from stagelink.plan.dtypes import DTYPE_BY_CODE, DTYPE_BY_NAME, DTYPES, MAX_DIMS, DType
from stagelink.plan.model import (
    AUTO,
    Edge,
    LinkRule,
    Stage,
    Tensor,
    link_facts,
    named_keys,
    rule_for,
)
from stagelink.plan.plan import Plan, differences

__all__ = [
    "AUTO",
    "DTYPES",
    "DTYPE_BY_CODE",
    "DTYPE_BY_NAME",
    "MAX_DIMS",
    "Control",
    "DType",
    "Edge",
    "Limits",
    "LinkRule",
    "Plan",
    "Stage",
    "Tensor",
    "differences",
    "link_facts",
    "named_keys",
    "rule_for",
]
