"""Ranks of several hosts, each with a network of its own, joined by cables that can be cut."""

from __future__ import annotations

import gc
import logging
import os
import re
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

import stagelink
import stagelink.interop.c10d
from stagelink.interop.pipedream.meeting import backend_for
from stagelink.transport.gloo_groups import VARIABLE
from stagelink.transport.host import server_id
from tests.runner.models import (
    build,
    largest_difference,
    line,
    make_batches,
    quick_sgd,
    tensors_of,
    train_alone,
    weights,
)
from tests.support.hosts import hosts
from tests.support.listeners import listeners
from tests.support.pipelines import Wire, check_same, document, joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.hosts import Host, Hosts
    from tests.support.pipelines import Document

GLOO, TCP = Wire("gloo"), Wire("tcp")
SIZES = [7, 5]
MICROBATCHES = 4


def _no_name_leads_here(two: Hosts) -> None:
    """As many systems have it: a host's own name is one of loopback's."""
    for number, other in ((0, 1), (1, 0)):
        two[number].set_names(
            "127.0.0.1 localhost",
            f"127.0.1.1 {two[number].name}",
            f"{two[other].address} {two[other].name}",
        )


# -- the hosts themselves


def _about(rank: int, world_size: int, store: str) -> tuple[str, ...]:
    del rank, world_size
    return server_id(), socket.gethostname(), socket.gethostbyname("host1"), store


def test_a_host_is_a_server_of_its_own(two_hosts: Hosts) -> None:
    with two_hosts.start(_about, [0, 1, 1]) as ranks:
        zero, one, other = ranks.results()
    assert zero[0] != one[0] == other[0]
    assert (zero[1], one[1]) == ("host0", "host1")
    assert zero[2] == one[2] == two_hosts[1].address
    assert zero[3].startswith(f"tcp://{two_hosts[0].address}:")


def _carrier(host: Host) -> bool:
    return "LOWER_UP" in host.run("ip", "link", "show", host.interface)


def test_a_cable_is_cut_and_mended(two_hosts: Hosts) -> None:
    assert _carrier(two_hosts[1])
    two_hosts.cut(1)
    assert (_carrier(two_hosts[0]), _carrier(two_hosts[1])) == (True, False)
    two_hosts.restore(1)
    assert (_carrier(two_hosts[0]), _carrier(two_hosts[1])) == (True, True)


# -- training


def _train(
    rank: int, world_size: int, store: str, plan: Document
) -> tuple[dict[str, torch.Tensor], dict[str, str], int]:
    with stagelink.connect(
        stagelink.Plan.from_dict(plan), rank=rank, world_size=world_size, store=store, run_id="run"
    ) as comm:
        stage = comm.stage.index
        module = build(line(len(comm.plan.stages)), stage)
        runner = stagelink.PipelineRunner(
            comm, module, loss=torch.nn.functional.cross_entropy, optimizer=quick_sgd(module)
        )
        runner.train(make_batches(SIZES) if stage == 0 else None)
        carried = {f"{link.source}→{link.target}": name for link, name in comm.transports.items()}
        return weights(module), carried, _shut()


def test_shared_memory_within_hosts_and_gloo_between(two_hosts: Hosts) -> None:
    """By rules that name no host; replicas on both, and host names that lead nowhere."""
    _no_name_leads_here(two_hosts)
    shapes = line(3)
    plan = document(GLOO, (1, 2, 1), tensors_of(shapes), microbatches=MICROBATCHES)
    plan["links"] = [{"same_server": True, "transport": "shm"}, {"transport": "gloo"}]
    with two_hosts.start(_train, [0, 0, 1, 1], plan) as ranks:
        found = ranks.results(50)
    alone = [build(shapes, stage) for stage in range(3)]
    train_alone(alone, make_batches(SIZES), MICROBATCHES)
    for stage, (trained, _, shut) in zip((0, 1, 1, 2), found, strict=True):
        assert largest_difference(trained, weights(alone[stage])) <= 1e-12
        assert shut == 2  # of two pairs, or of one and of the replicas
    near, far = {"0→1", "1→0", "2→3", "3→2"}, {"0→2", "2→0", "1→3", "3→1", "0→3", "3→0"}
    carried = {link: name for _, of_rank, _ in found for link, name in of_rank.items()}
    assert carried == dict.fromkeys(near, "shm") | dict.fromkeys(far, "gloo")


def test_tcp_between_hosts_where_no_rule_says_otherwise(two_hosts: Hosts) -> None:
    """Over several streams, at the interface and in the range of ports that the plan names."""
    wire = Wire("tcp", options={"interface": "eth0", "ports": [20200, 20200], "streams": 2})
    shapes = line(2)
    plan = document(wire, (1, 1), tensors_of(shapes), microbatches=MICROBATCHES)
    plan["links"] = []
    with two_hosts.start(_train, [0, 1], plan) as ranks:
        found = ranks.results(50)
    alone = [build(shapes, stage) for stage in range(2)]
    train_alone(alone, make_batches(SIZES), MICROBATCHES)
    for stage, (trained, carried, shut) in enumerate(found):
        assert largest_difference(trained, weights(alone[stage])) <= 1e-12
        assert set(carried.values()) == {"tcp"}
        assert not shut


def _groups(rank: int, world_size: int, store: str) -> list[int]:
    """The kinds of group that torch makes of us: how many of gloo's ports are shut in each."""
    served, found = _served(rank, store), []
    for backend in ("cpu:stagelink", backend_for("gloo")):
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(str(backend), served),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=20),
        )
        _add_up_and_exchange(rank)
        found.append(_shut())
        dist.destroy_process_group()
        gc.collect()  # a cycle may keep the group for a while, and it listens meanwhile
    _leave(rank, served)
    return found


def _add_up_and_exchange(rank: int) -> None:
    total = torch.full((3,), float(rank + 1))
    dist.all_reduce(total)
    check_same(total, torch.full((3,), 3.0))
    received = torch.zeros(100_000)
    sent = dist.isend(torch.full((100_000,), float(rank)), 1 - rank)
    dist.recv(received, 1 - rank)
    assert sent is not None
    sent.wait()
    check_same(received, torch.full((100_000,), float(1 - rank)))
    dist.barrier()


def _served(rank: int, store: str) -> dist.Store:
    where = urlsplit(store)
    host, port = str(where.hostname), int(where.port or 0)
    return dist.TCPStore(host, port, None, rank == 0, wait_for_workers=False)


def _leave(rank: int, served: dist.Store) -> None:
    """Rank 0 hosts the store, so it outlasts the other's last question to it."""
    if rank == 0:
        served.wait(["left"])
    else:
        served.set("left", "")


def _shut() -> int:
    return sum(listener.shut for listener in listeners())


def test_groups_of_torch_between_hosts_whose_names_lead_nowhere(two_hosts: Hosts) -> None:
    """The store's host is given by its name, too: then it takes its only interface."""
    _no_name_leads_here(two_hosts)
    store = two_hosts.store().replace(two_hosts[0].address, two_hosts[0].name)
    with two_hosts.start(_groups, [0, 1], store=store) as ranks:
        # One for collectives; messages go by tcp, at whose ports nobody listens any more.
        assert ranks.results() == [[1, 1]] * 2


# -- addresses


@dataclass(frozen=True)
class Attempt:
    """One try to connect, with a pattern that each rank's error must match; none: it connects.

    Attributes:
        name: for the assertion, and the run's id.
        says: for each rank.
        control: the plan's table on each rank.
        gloo: the plan's table.
        tcp: the plan's table; not none: the link is by tcp.
        variable: `VARIABLE` on each rank, where it is set.
        logs: what rank 0 must log of its addresses.
    """

    name: str
    says: tuple[str, str] = ("$", "$")
    control: tuple[Document, Document] = ({}, {})
    gloo: Document = field(default_factory=dict)
    tcp: Document | None = None
    variable: tuple[str, str] = ("", "")
    logs: tuple[str, ...] = ()


def _try(
    rank: int, world_size: int, store: str, attempts: Sequence[Attempt]
) -> list[tuple[str, list[str]]]:
    """The error of each attempt, or none, and what was logged of addresses."""
    logged: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stagelink").setLevel(logging.INFO)
    logging.getLogger("stagelink").addHandler(handler)
    served, found = _served(rank, store), []
    for attempt in attempts:
        logged.clear()
        found.append((_outcome(rank, world_size, served, attempt), list(logged)))
        # Nobody begins with the next one before everybody has ended with this one.
        served.set(f"{attempt.name} {rank}", "")
        served.wait([f"{attempt.name} {other}" for other in range(world_size)])
    _leave(rank, served)
    return found


def _outcome(rank: int, world_size: int, store: dist.Store, attempt: Attempt) -> str:
    wire, options = (GLOO, attempt.gloo) if attempt.tcp is None else (TCP, attempt.tcp)
    plan = document(wire, control=attempt.control[rank])
    plan["transports"] = {wire.transport: options}
    os.environ[VARIABLE] = attempt.variable[rank]
    try:
        with joined(rank, world_size, dist.PrefixStore(attempt.name, store), plan) as comm:
            _one(comm)
    except stagelink.StagelinkError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _one(comm: stagelink.Handler) -> None:
    value = torch.arange(9.0)
    with comm.evaluate(1) as session:
        if comm.rank == 0:
            session.send("h", value, 0)
        else:
            check_same(session.recv("h", 0), value)


def _check(two: Hosts, attempts: Sequence[Attempt], store: str | None = None) -> None:
    with two.start(_try, [0, 1], attempts, store=store) as ranks:
        outcomes = ranks.results(50)
    for attempt, *ends in zip(attempts, *outcomes, strict=True):
        for rank, (error, _) in enumerate(ends):
            assert re.match(attempt.says[rank], error, re.DOTALL), (attempt.name, rank, error)
        logged = "\n".join(ends[0][1])
        for line_ in attempt.logs:
            assert line_ in logged, (attempt.name, logged)


_GLOO = r"\[transports\.gloo\] interface"
_TCP = "[transports.tcp] interface"
_CONTROL = r"\[control\] interface"
_CAN = (
    r"this host can use 'eth0' \(10\.77\.0\.\d\), 'eth1' \(10\.8\d\.0\.1\), "
    r"'eth2' \(fd77::\d\), 'lo' \(127\.0\.0\.1\): name one of these, or leave"
)
_NONE = f"there is no such network interface; {_CAN}"
_DOWN = f"this network interface is down; {_CAN}"
_BARE = f"this network interface has no IPv4 or global IPv6 address; {_CAN}"


def _refused(rank: int, why: str) -> tuple[str, str]:
    """No link by gloo, as either rank finds or hears, and on which rank it is wrong."""
    return _both(rf"(NoTransport|Aborted)Error: .*'gloo': rank {rank} cannot use it: {why}")


def _both(text: str) -> tuple[str, str]:
    return text, text


def _gloo(interface: str, why: str) -> Attempt:
    says = _refused(0, rf"{_GLOO} = '{interface}': {why} {_GLOO} out")
    return Attempt(f"gloo at {interface}", says, gloo={"interface": interface})


def _control(interface: str, why: str) -> Attempt:
    """The interface is wrong on rank 1 only, which the other hears of."""
    wrong = rf"rank 1: {_CONTROL} = '{interface}': {why} {_CONTROL} out"
    says = (f"ConnectError: .*{wrong}", f"ConnectError: {wrong}")
    return Attempt(f"control at {interface}", says, control=({}, {"interface": interface}))


ATTEMPTS = [
    Attempt(
        "nothing named",
        logs=(
            "rank 0: listens for ranks of other servers at 10.77.0.1, port ",
            "(the route to the store's host '10.77.0.1')",
            "rank 0: gloo with rank 1 at 10.77.0.1 (as the control connection's)",
        ),
    ),
    _gloo("eth7", _NONE),
    _gloo("eth3", _DOWN),
    _gloo("eth4", _BARE),
    _control("eth7", _NONE),
    _control("eth3", _DOWN),
    _control("eth4", _BARE),
    Attempt(
        "gloo at lo",
        _both(rf".*other's host cannot reach rank 0 at 127\.0\.0\.1 \({_GLOO} = 'lo'\); name"),
        gloo={"interface": "lo"},
    ),
    Attempt(
        "control at lo",
        _both(rf"ConnectError: .*ranks of other hosts cannot reach .* \({_CONTROL} = 'lo'\)"),
        control=({"interface": "lo"},) * 2,
    ),
    Attempt(
        "gloo where no way leads",
        _both(
            rf".*rank \d at 10\.8\d\.0\.1 \({_GLOO} = 'eth1'\) has no way to rank \d at "
            r"10\.8\d\.0\.1: Network is unreachable"
        ),
        gloo={"interface": "eth1"},
    ),
    Attempt(
        "control where no way leads",
        _both(r".*rank 0: rank 1 does not answer at \('10\.89\.0\.1', \d+\): .*; \[control\] int"),
        control=({}, {"interface": "eth1"}),
    ),
    Attempt(
        "the variable on one rank",
        _refused(1, f"{VARIABLE} = 'eth7': {_NONE}"),
        variable=("", "eth7"),
    ),
    Attempt(
        "the variable",
        variable=("eth2", "eth2"),
        logs=(f"gloo with rank 1 at fd77::1 ({VARIABLE} = 'eth2')",),
    ),
    Attempt(
        "IPv6 for all",
        control=({"interface": "eth2"},) * 2,
        logs=("servers at fd77::1, port ", "gloo with rank 1 at fd77::1 (as the control"),
    ),
    Attempt(
        "a range of ports",
        control=({"ports": [20000, 20001]},) * 2,
        logs=("servers at 10.77.0.1, port 20000 (",),
    ),
    Attempt(
        "tcp with nothing named",
        tcp={},
        logs=("rank 0: tcp with rank 1 at 10.77.0.1 (as the control connection's)",),
    ),
    Attempt(
        "tcp by IPv6",
        tcp={"interface": "eth2", "streams": 2},
        logs=(f"rank 0: tcp with rank 1 at fd77::1 ({_TCP} = 'eth2')",),
    ),
    Attempt(
        "tcp at lo",
        _both(r".*other's host cannot reach rank 0 at 127\.0\.0\.1 .*: then it is the control"),
        tcp={"interface": "lo"},
    ),
    Attempt(
        "tcp where no way leads",
        _both(
            r".*rank 0 at 10\.88\.0\.1 .* cannot reach rank 1 at 10\.89\.0\.1, port \d+: "
            r"Network is unreachable; \[transports\.tcp\] interface names another"
        ),
        tcp={"interface": "eth1"},
    ),
]


def test_addresses() -> None:
    """What leads nowhere is refused on the rank that has it; all else connects.

    Each host has an ``eth1`` that leads nowhere, whose address its own name has; an ``eth2`` with
    an IPv6 address only; an ``eth3`` that is down, and an ``eth4`` without an address.
    """
    with hosts(2) as two:
        for number in (0, 1):
            two.lay(number, "eth1", f"10.{88 + number}.0.1/24")
            two.lay(number, "eth2", f"fd77::{number + 1}/64")
            two.lay(number, "eth3", f"10.90.0.{number + 1}/24")
            two.lay(number, "eth4")
            two[number].run("ip", "link", "set", "eth3", "down")
            two[number].set_names(f"10.{88 + number}.0.1 {two[number].name}")
        _check(two, ATTEMPTS)
        store = two.store()
        by_ipv6 = store.replace(two[0].address, "[fd77::1]")
        _check(two, [Attempt("by IPv6", logs=("servers at fd77::1, port ",))], by_ipv6)
        two[0].set_names("127.0.0.1 localhost", f"127.0.1.1 {two[0].name}")
        two[1].set_names(f"{two[0].address} {two[0].name}", f"127.0.1.1 {two[1].name}")
        nothing_tells = (
            r"ConnectError: rank 0: this host has several addresses.*: 'eth0' \(10.*'eth2' \(fd77",
            ".*rank 0: this host has several addresses",
        )
        by_name = store.replace(two[0].address, two[0].name)
        _check(two, [Attempt("by its name", nothing_tells)], by_name)
