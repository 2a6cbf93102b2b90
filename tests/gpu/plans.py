"""A pair of stages on a machine, for the points that go by whole transports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.pipelines import Document, Wire, document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.gpu.machines import Machine

__all__ = ["LITTLE", "pair", "ways"]

LITTLE = 2 * 1024 * 1024
"""The least memory of a link over cupy: most messages go in pieces."""

_LIMITS = {"deadline_s": 15.0, "first_deadline_s": 15.0, "connect_deadline_s": 15.0}


def ways(machine: Machine, region_bytes: int = LITTLE) -> dict[str, dict[str, Any]]:
    """The ways in which cupy orders copies: what to call them, and their options."""
    return {
        f"{who}-ordered": {"region_bytes": region_bytes, "device_ordered": who == "device"}
        for who in machine.orders
    }


def pair(
    machine: Machine,
    transports: Sequence[str],
    options: dict[str, Any] | None = None,
    devices: tuple[str, str] | None = None,
    **tables: Any,
) -> Document:
    """A plan of two ranks.

    Args:
        machine: where both stages are, unless it is said otherwise.
        transports: names, the first that fits is taken.
        options: of the first.
        devices: of the stages.
        tables: as for `tests.support.pipelines.document`.
    """
    plan = document(Wire(transports[0], options=options or {}), limits=_LIMITS, **tables)
    plan["links"] = [{"transport": list(transports)}]
    for stage, device in zip(plan["stages"], devices or (machine.device,) * 2, strict=True):
        stage["device"] = device
    return plan
