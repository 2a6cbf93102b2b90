"""Metrics say what was sent, received and waited for; handlers and ranks share a registry."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prometheus_client
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

import stagelink
from stagelink.testing import RankFailedError, run_fresh
from stagelink_prometheus import Metrics
from tests.observers.watching import NARROW, connect, exchange, overfill, run
from tests.support.pipelines import (
    INLINE,
    LOOPBACK,
    SHM,
    Document,
    Wire,
    document,
    line,
)

if TYPE_CHECKING:
    import threading

    from torch.distributed import Store

README = Path(__file__).parents[2] / "packages" / "observer-prometheus" / "README.md"


def values(registry: CollectorRegistry, name: str, *by: str, **where: object) -> dict[Any, float]:
    """A metric's samples with these labels, summed by others."""
    wanted = {key: str(value) for key, value in where.items()}
    found: dict[Any, float] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name == f"stagelink_{name}" and wanted.items() <= sample.labels.items():
                key = tuple(sample.labels[label] for label in by)
                found[key] = found.get(key, 0.0) + sample.value
    return found


def total(registry: CollectorRegistry, name: str, **where: object) -> float:
    return values(registry, name, **where).get((), 0.0)


def _train(comm: stagelink.Handler, microbatches: int, size: int) -> Any:
    """A batch through a line of stages, and what the handler itself has counted of it."""
    here, last = comm.stage.index, len(comm.plan.stages) - 1
    with comm.train(microbatches) as session:
        for action in session.actions:
            m = action.microbatch
            if action.kind is stagelink.Kind.FORWARD:
                if here > 0:
                    session.recv(f"h{here - 1}", m)
                if here < last:
                    session.send(f"h{here}", torch.ones(size, requires_grad=True), m)
            else:
                if here < last:
                    session.recv_grad(f"h{here}", m)
                if here > 0:
                    session.send_grad(f"h{here - 1}", torch.ones(size), m)
    comm.reduce([0.0])
    return dict(comm.counters)


@pytest.mark.parametrize("wire", [LOOPBACK, INLINE[0]], ids=str)
def test_they_equal_what_was_sent(wire: Wire) -> None:
    registry = CollectorRegistry()
    plan = document(wire, (2, 1, 1), line(3))
    counted = run(plan, _train, 5, 10, observers=[Metrics(registry)])
    by_edge = values(registry, "sent_messages_total", "edge", "direction")
    assert by_edge == {
        (edge, direction): 5.0 for edge in ("h0", "h1") for direction in ("forward", "backward")
    }
    for what, name in (("messages", "messages"), ("payload_bytes", "bytes")):
        labels = ("rank", "peer", "transport")
        sent = values(registry, f"sent_{name}_total", *labels)
        received = values(registry, f"received_{name}_total", *labels)
        for rank, counters in enumerate(counted):
            for link, totals in counters.items():
                ends = str(link.source), str(link.target)
                key = ends if rank == link.source else ends[::-1]
                side = sent if rank == link.source else received
                assert side.pop((*key, "loopback")) == getattr(totals, what) > 0
        assert sent == received == {}
    assert total(registry, "sent_bytes_total", edge="h1", direction="forward") == 5 * 40


def _counted(comm: stagelink.Handler, full: threading.Event) -> Any:
    overfill(comm, full)
    return next(counters for link, counters in comm.counters.items() if link.source == 0)


def test_waits_are_counted_by_what_was_waited_for(full: threading.Event) -> None:
    registry = CollectorRegistry()
    sender, receiver = run(NARROW, _counted, full, observers=[Metrics(registry)])

    def waited(name: str, rank: int, wait: str) -> float:
        return total(registry, f"wait_seconds_{name}", rank=rank, peer=1 - rank, waited_for=wait)

    assert waited("count", 0, "window") == 1
    assert waited("count", 1, "peer") == waited("count", 1, "wire") == 2
    assert waited("sum", 0, "window") == pytest.approx(sender.window_wait_s)
    assert waited("sum", 1, "peer") == pytest.approx(receiver.peer_wait_s)
    assert waited("sum", 1, "wire") == pytest.approx(receiver.wire_wait_s)
    assert total(registry, "wait_seconds_bucket", le="+Inf", waited_for="window") == 1
    assert total(registry, "wait_seconds_bucket", le="1e-05", waited_for="window") == 0


def _open_links(comm: stagelink.Handler, registry: CollectorRegistry) -> dict[Any, float]:
    comm.reduce([0.0])
    found = values(registry, "open_links", "source", "target", "transport")
    comm.reduce([0.0])
    return found


def test_open_links_are_counted_while_they_are_open() -> None:
    registry = CollectorRegistry()
    both_ends = {("0", "1", "loopback"): 2.0, ("1", "0", "loopback"): 2.0}
    for found in run(document(LOOPBACK), _open_links, registry, observers=[Metrics(registry)]):
        assert found == both_ends
    assert total(registry, "open_links") == 0


def _fails(comm: stagelink.Handler) -> None:
    comm.reduce([0.0])
    if comm.rank == 0:
        raise ZeroDivisionError("of the user")
    comm.reduce([0.0])


def test_open_links_are_none_after_a_failure() -> None:
    registry = CollectorRegistry()
    with pytest.raises(RankFailedError, match="of the user"):
        run(document(LOOPBACK), _fails, observers=[Metrics(registry)])
    assert values(registry, "open_links", "source") == {("0",): 0.0, ("1",): 0.0}


def test_handlers_one_after_another_count_on() -> None:
    registry = CollectorRegistry()
    run(document(LOOPBACK), exchange, 2, observers=[Metrics(registry)])
    series = {sample.name for family in registry.collect() for sample in family.samples}
    first = generate_latest(registry).count(b"\n")
    run(document(LOOPBACK), exchange, 7, observers=[Metrics(registry)])
    assert total(registry, "sent_messages_total", direction="forward") == 9
    assert series == {s.name for family in registry.collect() for s in family.samples}
    assert generate_latest(registry).count(b"\n") == first  # no label grows with the run


def test_registries_are_apart() -> None:
    one, other = CollectorRegistry(), CollectorRegistry()
    Metrics(other)
    run(document(LOOPBACK), exchange, 2, observers=[Metrics(one)])
    assert total(one, "received_messages_total") == 4
    assert total(other, "received_messages_total") == 0


def _by_plan(rank: int, world_size: int, store: Store, plan: Document) -> dict[str, float]:
    """Two handlers in a row, and what is in the default registry then."""
    del world_size
    for run_id in ("first", "second"):
        with connect(plan, rank, store, run_id=run_id) as comm:
            exchange(comm, 3, size=5000)
    names = ("sent_messages_total", "received_messages_total", "sent_bytes_total", "open_links")
    return {name: total(prometheus_client.REGISTRY, name) for name in names}


def test_a_plan_switches_them_on_in_the_default_registry() -> None:
    plan = document(SHM, observers=["prometheus"])
    with run_fresh(_by_plan, 2, plan) as ranks:
        for counted in ranks.results():
            assert counted == {
                "sent_messages_total": 6,
                "received_messages_total": 6,
                "sent_bytes_total": 6 * 20_000,
                "open_links": 0,
            }


def test_the_readme_lists_every_metric() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \|", README.read_text(), re.MULTILINE)
    made = {(family.name, family.type) for family in registry.collect()}
    assert {(name.removesuffix("_total"), kind) for name, kind in listed} == made
