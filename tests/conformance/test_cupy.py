"""transport-cupy passes the conformance tests, on a double of CUDA's runtime."""

from __future__ import annotations

from typing import Any, ClassVar

from stagelink.testing.conformance import TransportConformance
from tests.cupy.on_double import CupyOnDouble

LITTLE = 2 * 1024 * 1024


class TestHostOrdered(TransportConformance):
    transport = CupyOnDouble


class TestDeviceOrdered(TransportConformance):
    """And most messages go in pieces, and wait for slots."""

    transport = CupyOnDouble
    options: ClassVar[dict[str, Any]] = {"region_bytes": LITTLE, "device_ordered": True}
