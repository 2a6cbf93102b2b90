"""Options of a c10d group: the tables of a plan that speak of links, and one of its own.

The ranks of the group are its stages, each named after its rank, with an edge between any two.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from stagelink.errors import PlanError
from stagelink.plan import Plan
from stagelink.plan.document import Limits, LinkTable
from stagelink.plan.files import read_mapping
from stagelink.text import did_you_mean, shown, unknown

CONFIG_VARIABLE = "STAGELINK_C10D_CONFIG"
"""Environment variable with the path of the tables' file; without it the choice is ``auto``."""

EAGER_BYTES = 64 * 1024 * 1024
"""What a peer may send of messages that nobody has asked for, unless an option says otherwise."""

INLINE_BYTES = 64 * 1024
"""What travels in the header's frame here, unless ``control.inline_bytes`` says otherwise.

A message is copied into the tensor of its receive in any case: up to this size the socket's two
copies cost less than what it takes to pass a piece of memory and to get it back.
"""

_MEANING = {
    "c10d": ("eager_bytes",),
    "links": ("transport", "from_rank", "to_rank", "same_server", "device"),
    "transports": (),
    "control": (),
    "limits": ("connect_deadline_s", "close_deadline_s", "pool_bytes"),
}
"""Tables that may be given, and their keys that have a meaning here; none named: all."""

_MOST_BYTES = 2**62
_TABLES: Mapping[str, type[BaseModel]] = {"links": LinkTable, "limits": Limits}


@dataclass(frozen=True)
class C10dOptions:
    """Options for ``init_process_group(…, pg_options=…)``, the same on every rank.

    Attributes:
        tables: ``links``, ``transports``, ``control`` and ``limits``, as in a plan's file; rules
            may go by ``from_rank``, ``to_rank``, ``same_server`` and ``device``. And ``c10d``,
            with ``eager_bytes``.

    Raises:
        PlanError: these are no tables.
    """

    tables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given: object = self.tables
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise PlanError(
                f"c10d options: {type(given).__name__}: tables by their names are asked for, of "
                f"{', '.join(_MEANING)}"
            )

    @classmethod
    def load(cls, path: str | Path) -> C10dOptions:
        """Read the tables from a TOML file; `PlanError` where it cannot be read."""
        try:
            return cls(read_mapping(path))
        except PlanError as error:
            raise PlanError(f"c10d options: {error}") from error

    @classmethod
    def from_environment(cls) -> C10dOptions:
        """Those that `CONFIG_VARIABLE` names, read as by `load`; or none."""
        path = os.environ.get(CONFIG_VARIABLE)
        return cls.load(path) if path else cls()

    @property
    def connect_deadline_s(self) -> float | None:
        """Seconds to wait for the other ranks; None: the group's time-out."""
        found: float | None = self.tables.get("limits", {}).get("connect_deadline_s")
        return found

    @property
    def eager_bytes(self) -> int:
        """Bytes that a peer may send before this rank asks, see `mailbox`; else `PlanError`."""
        table: object = self.tables.get("c10d", {})
        if not isinstance(table, Mapping):
            raise PlanError(f"c10d options: c10d: {shown(table)}: must be a table")
        for key in table:
            if key not in _MEANING["c10d"]:
                text = unknown("key", key, _MEANING["c10d"], owner="[c10d]")
                raise PlanError(f"c10d options: c10d: {text}")
        given: object = table.get("eager_bytes", EAGER_BYTES)
        if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given <= _MOST_BYTES:
            raise PlanError(
                f"c10d options: c10d.eager_bytes: {shown(given)}: must be a whole number from 0 "
                f"to {_MOST_BYTES}"
            )
        return given

    def plan(self, ranks: Sequence[int], device: str) -> Plan:
        """A plan of which the group's ranks are the stages, with an edge between any two.

        Args:
            ranks: what the group's ranks are called, by their places in the group.
            device: kind of device of the tensors.

        Raises:
            PlanError: a table is none of those, or wrong.
        """
        problems = list(self._meaningless())
        if problems:
            raise PlanError("\n".join(f"c10d options: {problem}" for problem in problems))
        names = [f"rank {rank}" for rank in ranks]
        stages = [
            {"name": name, "ranks": [place], "device": device} for place, name in enumerate(names)
        ]
        tensors = [
            {"name": name, "from": name, "to": names[place + 1 :]}
            for place, name in enumerate(names[:-1])
        ]
        pipeline = {"name": f"c10d-{device}", "schedule": "1f1b", "microbatches": 1}
        tables = {"pipeline": pipeline, "stages": stages, "tensors": tensors, **self.tables}
        tables.pop("c10d", None)
        control = tables.get("control", {})
        if isinstance(control, Mapping):
            tables["control"] = {"inline_bytes": INLINE_BYTES, **control}
        try:
            return Plan.from_dict(tables)
        except PlanError as error:
            raise PlanError(str(error).replace("plan: ", "c10d options: ")) from error

    def _meaningless(self) -> Iterator[str]:
        for name in sorted(set(self.tables) - set(_MEANING)):
            hint = did_you_mean(name, _MEANING)
            yield f"{name}: only the tables {', '.join(_MEANING)} have a meaning here{hint}"
        for name, model in _TABLES.items():
            known = {field.alias or key for key, field in model.model_fields.items()}
            for table in _rows(self.tables.get(name)):
                for key in sorted(known.difference(_MEANING[name]).intersection(table)):
                    yield (
                        f"{name}.{key} has no meaning here; those that have are "
                        f"{', '.join(_MEANING[name])}"
                    )


def _rows(value: object) -> list[Mapping[str, Any]]:
    """A table, or those of a list; what is neither is the plan's to refuse."""
    return [
        row for row in (value if isinstance(value, list) else [value]) if isinstance(row, dict)
    ]
