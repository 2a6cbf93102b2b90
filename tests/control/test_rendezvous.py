"""Ranks find each other in a store: whatever store it is, and whatever ran on it before."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from stagelink.control.rendezvous import Launch, Rendezvous, open_store
from stagelink.errors import ConnectError, PlanError, RankTakenError
from stagelink.transport.contract import Deadline

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import Store


@pytest.fixture(scope="module")
def tcp_store() -> Store:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path, tcp_store: Store) -> Store:
    match request.param:
        case "hash":
            return HashStore()
        case "file":
            return FileStore(str(tmp_path / "store"), 3)
        case _:
            return PrefixStore(request.node.name, tcp_store)


def _all(store: Store, count: int = 3, run: str = "run") -> list[Rendezvous]:
    return [Rendezvous(store, run, rank, count) for rank in range(count)]


def test_all_get_one_token_and_another_run_another(store: Store) -> None:
    tokens = {rendezvous.token() for rendezvous in _all(store)}
    assert len(tokens) == 1
    assert len(tokens.pop()) == 32
    (other,) = _all(store, 1, "other run")
    assert other.token() not in tokens


def test_what_is_published_is_read_by_all(store: Store) -> None:
    ranks = _all(store)
    for rank, rendezvous in enumerate(ranks):
        rendezvous.publish("unix", {"address": f"ü{rank}", "wire": 1})
    for rendezvous in ranks:
        found = rendezvous.read("unix", [2, 0], Deadline(20))
        assert found == {r: {"address": f"ü{r}", "wire": 1} for r in (0, 2)}


def test_an_address_that_comes_late_is_waited_for(store: Store) -> None:
    zero, one, _ = _all(store)
    late = threading.Timer(0.05, one.client().publish, args=("tcp", {"port": 7}))
    late.start()
    assert zero.read("tcp", [1], Deadline(20)) == {1: {"port": 7}}
    late.join()


def test_missing_ranks_are_named(store: Store) -> None:
    zero, one, _ = _all(store)
    one.publish("unix", {})
    wanted = r"rank 0: no answer from rank 2, 3 within 0\.1 s; are all ranks started"
    with pytest.raises(ConnectError, match=wanted):
        zero.read("unix", [1, 2, 3], Deadline(0.1))


def test_a_failure_of_another_ends_the_wait(store: Store) -> None:
    zero, one, two = _all(store)
    one.tell_failure("rank 1's text")
    two.tell_failure("a later one")
    assert two.failure() == "rank 1's text"
    began = time.monotonic()
    with pytest.raises(ConnectError, match="another rank failed while connecting: rank 1's text"):
        zero.read("unix", [1], Deadline(20))
    assert time.monotonic() - began < 15


def test_without_a_failure_there_is_none(store: Store) -> None:
    assert [rendezvous.failure() for rendezvous in _all(store)] == [None] * 3


def test_a_rank_that_is_taken(store: Store) -> None:
    _all(store)
    with pytest.raises(RankTakenError, match=r"rank 1 of run 'run' is taken by .* process \d+;"):
        Rendezvous(store, "run", 1, 3)


def test_generations_do_not_meet_each_others_keys(store: Store) -> None:
    for generation in range(3):
        ranks = _all(store)
        assert [rendezvous.generation for rendezvous in ranks] == [generation] * 3
        assert ranks[0].failure() is None
        with pytest.raises(ConnectError, match="no answer from rank 1"):
            ranks[0].read("unix", [1], Deadline(0.02))
        ranks[1].publish("unix", {})
        ranks[2].tell_failure("of this generation")
        for rendezvous in ranks:
            rendezvous.leave()


def test_the_host_waits_for_the_others_to_leave(store: Store) -> None:
    zero, one, two = _all(store)
    one.leave()
    began = time.monotonic()
    zero.wait_left(Deadline(0.1))
    assert time.monotonic() - began >= 0.1
    two.leave()
    began = time.monotonic()
    zero.wait_left(Deadline(20))
    assert time.monotonic() - began < 15


def test_a_client_of_its_own_sees_the_same_keys(store: Store) -> None:
    zero, one, _ = _all(store)
    one.publish("unix", {"address": "a"})
    assert zero.client().read("unix", [1], Deadline(20)) == {1: {"address": "a"}}


def test_the_store_of_a_pair_is_one_for_both_and_of_this_generation(store: Store) -> None:
    zero, one, _ = _all(store)
    zero.pair_store("0-1/gloo").set("key", "value")
    assert one.pair_store("0-1/gloo").get("key") == b"value"
    assert not one.pair_store("0-1/other").check(["key"])
    for rendezvous in (zero, one):
        rendezvous.leave()
    again = Rendezvous(store, "run", 0, 3)
    assert not again.pair_store("0-1/gloo").check(["key"])


# -- where the store is --------------------------------------------------------------------------


def test_arguments_win_over_the_environment() -> None:
    launched = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "host",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "3",
    }
    assert Launch.resolve(None, None, None, None, launched) == Launch(
        1, 2, "job.3", "tcp://host:29500"
    )
    assert Launch.resolve(0, 5, "file:///f", "mine", launched) == Launch(0, 5, "mine", "file:///f")
    agent = {**launched, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert Launch.resolve(None, None, None, None, agent).store == "agent://host:29500"


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, "no rank: pass rank=…, or start the ranks with 'stagelink run' or torchrun"),
        ({"RANK": "0"}, "no world_size: pass world_size=…"),
        ({"RANK": "x"}, "RANK='x' in the environment is no whole number"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "no store: pass store="),
    ],
)
def test_what_is_nowhere_is_asked_for(environ: dict[str, str], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Launch.resolve(None, None, None, None, environ)


@pytest.mark.parametrize("where", ["", "host:1", "http://host:1", "tcp://host", "file://"])
def test_an_address_of_no_known_form(where: str) -> None:
    with pytest.raises(PlanError, match=r"known forms: tcp://host:port, file:///path"):
        open_store(where, 0, 2, Deadline(1))


def test_a_file_store(tmp_path: Path) -> None:
    stores = [open_store(f"file://{tmp_path}/store", rank, 2, Deadline(5)) for rank in (0, 1)]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


def test_rank_0_hosts_a_tcp_store() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    where = f"tcp://127.0.0.1:{port}"
    stores = [open_store(where, rank, 2, Deadline(20)) for rank in (0, 1)]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


def test_nobody_answers() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(ConnectError, match=rf"no answer from the store at 127.0.0.1:{port} wit"):
        open_store(f"tcp://127.0.0.1:{port}", 1, 2, Deadline(0.5))
    for thread in threading.enumerate():
        if thread.name == "stagelink-store":  # torch is a little slower to give up
            thread.join(20)


def test_the_port_is_in_use() -> None:
    with closing(socket.create_server(("0.0.0.0", 0))) as holder:
        port = holder.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(ConnectError, match=rf"cannot host the store at 127.0.0.1:{port} .*an"):
            open_store(f"tcp://127.0.0.1:{port}", 0, 2, Deadline(20))
        assert time.monotonic() - began < 15


def test_an_endless_deadline_is_fine() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    store = open_store(f"tcp://127.0.0.1:{port}", 0, 1, Deadline(float("inf")))
    store.set("key", "value")
