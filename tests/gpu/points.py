"""All points of the check on a GPU, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ABOUT", "POINTS", "TIME_S", "Point"]

TIME_S = 298.0
"""For all of them together; their own limits add up to no more."""

_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(frozen=True)
class Point:
    """Something to be tried, by a function that takes the machine and gives an answer.

    Attributes:
        function: its module and name.
        limit_s: how long it may take, the start of its processes included.
        what: it shows.
        environment: variables for its processes.
        ranks: whether it starts ranks.
    """

    function: str
    limit_s: float
    what: str
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: bool = True


def _point(place: str, limit_s: float, what: str, **environment: str) -> Point:
    return Point(f"tests.gpu.points_{place}", limit_s, what, environment)


ABOUT = Point("tests.gpu.about:about", 25, "whether there is a GPU, and all versions", ranks=False)

POINTS = {
    "memory": _point("memory:memory", 12, "handles, opened once, twice, and in one's own process"),
    "events": _point("events:events", 14, "what a wait is for when records come before and after"),
    "tensors": _point("tensors:tensors", 28, "every kind of tensor, large ones, streams"),
    "pipeline": _point("pipeline:pipeline", 20, "1F1B in two processes against one process"),
    "lost-peer": _point("lost:lost_peer", 22, "a peer is killed in the middle of a message"),
    "speed": _point("speed:speed", 28, "throughput and latency beside a plain copy"),
    "dead-exporter": _point("dead:dead_exporter", 22, "CUDA when the exporter is killed"),
    "dead-importer": _point("dead:dead_importer", 22, "CUDA when the importer is killed"),
    "free-first": _point("memory:free_first", 12, "memory is freed that is open elsewhere"),
    "expandable": _point(
        "tensors:expandable",
        14,
        "torch allocates in expandable segments",
        **{_ALLOCATOR: "expandable_segments:True"},
    ),
    "malloc-async": _point(
        "tensors:malloc_async",
        14,
        "torch allocates by cudaMallocAsync",
        **{_ALLOCATOR: "backend:cudaMallocAsync"},
    ),
    "gloo": _point("tensors:gloo", 14, "CUDA tensors over gloo"),
    "mixed": _point("tensors:mixed", 12, "a stage on the GPU, the next on the CPU"),
    "nccl-alone": _point("nccl:nccl_alone", 24, "NCCL with one rank: streams, polling, abort"),
    "nccl-pair": _point("nccl:nccl_pair", 13, "NCCL with two ranks on one GPU"),
}
