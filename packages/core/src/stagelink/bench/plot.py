"""Records as a picture: time one way, and speed of a stream, over the payload's size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from matplotlib.figure import Figure

from stagelink.bench.pipes import Record

_PANELS = (
    ("one_way", "median_us", "one way, µs"),
    ("stream", "gib_per_s", "stream, GiB/s"),
    ("duplex", "gib_per_s", "both ways, GiB/s"),
)


def draw(records: Sequence[Record], path: str) -> None:
    """Draw a panel for each kind that was measured, in the form that the file's name says."""
    measured = {record.kind for record in records}
    panels = [panel for panel in _PANELS if panel[0] in measured]
    figure = Figure(figsize=(5 * len(panels), 5), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (kind, field, label) in zip(all_axes, panels, strict=True):
        lines = defaultdict[str, list[tuple[int, float]]](list)
        for record in records:
            if record.kind == kind:
                point = record.payload_bytes, getattr(record, field)
                lines[f"{record.transport} {record.layer}"].append(point)
        for name, points in lines.items():
            dashed = name.endswith(" raw")
            axes.plot(*zip(*sorted(points), strict=True), "--" if dashed else "o-", label=name)
        axes.set(xscale="log", yscale="log", xlabel="payload, bytes", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)
