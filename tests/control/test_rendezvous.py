"""Ranks find each other in a store: whatever store it is, and whatever ran on it before."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import threading
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from stagelink.control.launch import Launch, StoreAddress
from stagelink.control.opening import open_store
from stagelink.control.rendezvous import Rendezvous
from stagelink.control.store import StoreClient
from stagelink.deadline import Deadline
from stagelink.errors import ConnectError, PlanError, RankTakenError
from stagelink.testing import LeakCheck

if TYPE_CHECKING:
    from collections.abc import Iterator
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


class Rendezvouses:
    """Ranks of one store; all are given up at the end of the test."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._made: list[Rendezvous] = []

    def one(self, rank: int, count: int = 3, run: str = "run", **more: Any) -> Rendezvous:
        """A rank that has not entered."""
        client = StoreClient.of(self._store, Deadline(20))
        self._made.append(Rendezvous(client, run, rank, count, **more))
        return self._made[-1]

    def claimed(self, count: int = 3, run: str = "run", **more: Any) -> list[Rendezvous]:
        """All ranks, each with its place."""
        ranks = [self.one(rank, count, run, **more) for rank in range(count)]
        for rank in ranks:
            rank.claim(Deadline(20))
        return ranks

    def close(self) -> None:
        for rendezvous in self._made:
            rendezvous.leave(Deadline(5))


@pytest.fixture
def ranks(store: Store) -> Iterator[Rendezvouses]:
    made = Rendezvouses(store)
    yield made
    made.close()


def _failed(rendezvous: Rendezvous, text: str) -> None:
    """Leave a failure, and wait until it is there."""
    told = rendezvous.tell_failure(json.dumps({"rank": 1, "text": text}))
    assert told is not None
    assert told.wait(20)


def test_all_get_one_token_and_another_run_another(ranks: Rendezvouses) -> None:
    tokens = {rendezvous.generation for rendezvous in ranks.claimed()}
    assert len(tokens) == 1
    assert len(tokens.copy().pop()) == 32
    (other,) = ranks.claimed(1, "other run")
    assert other.generation not in tokens


def test_what_is_published_is_read_by_all(ranks: Rendezvouses) -> None:
    all_ = ranks.claimed()
    for rank, rendezvous in enumerate(all_):
        rendezvous.publish("unix", {"address": f"ü{rank}", "wire": 1})
    for rendezvous in all_:
        found = rendezvous.read("unix", [2, 0], Deadline(20))
        assert found == {r: {"address": f"ü{r}", "wire": 1} for r in (0, 2)}


def test_an_address_that_comes_late_is_waited_for(ranks: Rendezvouses) -> None:
    zero, one, _ = ranks.claimed()
    late = threading.Timer(0.05, one.publish, args=("tcp", {"port": 7}))
    late.start()
    assert zero.read("tcp", [1], Deadline(20)) == {1: {"port": 7}}
    late.join()


def test_ranks_that_do_not_publish_are_named(ranks: Rendezvouses) -> None:
    zero, one, _ = ranks.claimed()
    one.publish("unix", {})
    wanted = (
        r"rank 0: missing: 2 within 0\.1 s: rank 2 came \(.* process \d+\) and does not go on .*"
        r"no address \(unix\) from it"
    )
    with pytest.raises(ConnectError, match=wanted):
        zero.read("unix", [1, 2], Deadline(0.1))


def test_a_failure_of_another_ends_the_wait(ranks: Rendezvouses) -> None:
    zero, one, two = ranks.claimed()
    _failed(one, "rank 1's text")
    _failed(two, "a later one")
    assert two.failure(Deadline(20)) == {"rank": 1, "text": "rank 1's text"}
    began = time.monotonic()
    with pytest.raises(ConnectError, match="rank 0: rank 1 failed while connecting: rank 1's tex"):
        zero.read("unix", [1], Deadline(20))
    assert time.monotonic() - began < 15


def test_without_a_failure_there_is_none(ranks: Rendezvouses) -> None:
    assert [one.failure(Deadline(20)) for one in ranks.claimed()] == [None] * 3


def test_a_rank_that_is_taken(ranks: Rendezvouses) -> None:
    ranks.claimed()
    for rank in (0, 1):
        wanted = rf"rank {rank} of run 'run' is taken by .* process \d+;"
        with pytest.raises(RankTakenError, match=wanted):
            ranks.one(rank).claim(Deadline(20))


def test_all_wait_until_all_are_here(ranks: Rendezvouses) -> None:
    zero, one, two = (ranks.one(rank) for rank in range(3))
    zero.claim(Deadline(20))
    one.claim(Deadline(20))
    late = threading.Timer(0.05, two.enter, args=(Deadline(20),))
    late.start()
    second = threading.Thread(target=one.gather, args=(Deadline(20),))
    second.start()
    zero.gather(Deadline(20))
    second.join()
    late.join()
    assert zero.generation == one.generation == two.generation


@pytest.mark.parametrize(
    ("here", "missing"),
    [([0, 1], "2"), ([0], "1, 2"), ([1, 2], "0"), ([1], "0, 2")],
)
def test_missing_ranks_are_named(ranks: Rendezvouses, here: list[int], missing: str) -> None:
    texts: list[str] = []

    def enter(rank: int) -> None:
        with pytest.raises(ConnectError) as caught:
            ranks.one(rank).enter(Deadline(0.3))
        texts.append(str(caught.value))

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in here]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == len(here)
    for text in texts:
        assert f"missing: {missing}, not here within 0.3 s. Was each of them started" in text


def test_generations_do_not_meet_each_others_keys(ranks: Rendezvouses) -> None:
    seen = set()
    for _ in range(3):
        all_ = ranks.claimed()
        (generation,) = {rendezvous.generation for rendezvous in all_}
        seen.add(generation)
        assert all_[0].failure(Deadline(20)) is None
        with pytest.raises(ConnectError, match="missing: 1 within"):
            all_[0].read("unix", [1], Deadline(0.02))
        all_[1].publish("unix", {})
        _failed(all_[2], "of this generation")
        for rendezvous in all_:
            rendezvous.leave(Deadline(20))
    assert len(seen) == 3


def test_a_rank_that_left_is_not_followed_into_the_generation_that_it_left(
    ranks: Rendezvouses,
) -> None:
    """As where the others come again before rank 0 does."""
    zero, one, _ = ranks.claimed()
    one.leave(Deadline(20))
    again = ranks.one(1)
    with pytest.raises(ConnectError, match="rank 1: missing: 0, not here"):
        again.claim(Deadline(0.1))
    zero.leave(Deadline(20))
    lead = ranks.one(0)
    lead.claim(Deadline(20))
    again.claim(Deadline(20))
    assert again.generation == lead.generation != zero.generation


def _die(rank: int, path: str) -> None:
    """Take a place and be gone, in a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            Rendezvous(StoreClient.of(FileStore(path, 3), Deadline(20)), "run", rank, 3).claim(
                Deadline(20)
            )
        finally:
            os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize("dead", [[0], [0, 1], [0, 2], [0, 1, 2]])
def test_places_of_the_dead_are_free(tmp_path: Path, dead: list[int]) -> None:
    """A run that was killed is started again on its store; who had not come first, comes first."""
    path = str(tmp_path / "store")
    for rank in dead:
        _die(rank, path)
    ranks = Rendezvouses(FileStore(path, 3))
    again = [ranks.one(rank) for rank in range(3)]
    threads = [threading.Thread(target=again[rank].enter, args=(Deadline(20),)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    again[0].enter(Deadline(20))
    for thread in threads:
        thread.join()
    assert len({rank.generation for rank in again}) == 1
    ranks.close()


def test_a_launcher_that_ended_all_vouches_for_their_death(
    ranks: Rendezvouses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for ranks of another host, whose processes cannot be looked up here."""
    ranks.claimed()
    monkeypatch.setattr("stagelink.control.generations.process_id", lambda: "another host/1")
    again = ranks.claimed(restarts=True)
    assert len({rank.generation for rank in again}) == 1
    with pytest.raises(RankTakenError, match="rank 0 of run 'run' is taken by"):
        ranks.one(0, restarts=True).claim(Deadline(20))  # by this very process


def test_the_host_waits_for_the_others_to_leave(ranks: Rendezvouses) -> None:
    zero, one, two = ranks.claimed()
    one.leave(Deadline(20))
    left = threading.Event()

    def leave() -> None:
        zero.leave(Deadline(20), hosts_store=True)
        left.set()

    thread = threading.Thread(target=leave)
    thread.start()
    assert not left.wait(0.1)
    two.leave(Deadline(20))
    assert left.wait(20)
    thread.join()
    zero, one, two = ranks.claimed()
    began = time.monotonic()
    zero.leave(Deadline(0.1), hosts_store=True)
    assert 0.1 <= time.monotonic() - began < 15


def test_the_store_of_a_pair_is_one_for_both_and_of_this_generation(ranks: Rendezvouses) -> None:
    zero, one, _ = ranks.claimed()
    zero.pair_store("0-1/gloo").set("key", "value")
    assert one.pair_store("0-1/gloo").get("key") == b"value"
    assert not one.pair_store("0-1/other").check(["key"])
    for rendezvous in (zero, one):
        rendezvous.leave(Deadline(20))
    again = ranks.one(0)
    again.claim(Deadline(20))
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
    given = "MASTER_ADDR='host' and MASTER_PORT='29500'"
    where = StoreAddress("tcp", "host", 29500, given=given)
    assert Launch.resolve(None, None, None, None, launched) == Launch(1, 2, "job", where, True)
    file = StoreAddress("file", path="/f", given="store='file:///f'")
    assert Launch.resolve(0, 5, "file:///f", "mine", launched) == Launch(0, 5, "mine", file, True)
    agent = {**launched, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    where = StoreAddress("agent", "host", 29500, given=given)
    assert Launch.resolve(None, None, None, None, agent).store == where
    store = HashStore()
    assert Launch.resolve(0, 5, store, "mine", {}) == Launch(0, 5, "mine", store, False)


@pytest.mark.parametrize("text", ["::1", "[::1]"])
def test_an_ipv6_address_in_the_environment(text: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": text, "MASTER_PORT": "29500"}
    found = Launch.resolve(None, None, None, None, environ).store
    assert isinstance(found, StoreAddress)
    assert (found.host, found.port, str(found)) == ("::1", 29500, "tcp://[::1]:29500")


ADDRESSED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, "no rank: pass rank=…, or start the ranks with 'stagelink run' or torchrun"),
        ({"RANK": "0"}, "no world_size: pass world_size=…"),
        ({**ADDRESSED, "RANK": "x"}, "RANK='x' in the environment is no whole number"),
        ({**ADDRESSED, "RANK": ""}, "RANK='' in the environment is no whole number"),
        ({**ADDRESSED, "RANK": "1_0"}, "RANK='1_0' in the environment is no whole number"),
        ({**ADDRESSED, "RANK": "٣"}, "RANK='٣' in the environment is no whole number"),
        ({**ADDRESSED, "WORLD_SIZE": "2.0"}, "WORLD_SIZE='2.0' in the environment is no whole"),
        ({**ADDRESSED, "WORLD_SIZE": "9" * 5000}, "in the environment is no whole number"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "no store: pass store="),
        ({**ADDRESSED, "MASTER_ADDR": ""}, "MASTER_ADDR='': that is no host name and no IP addr"),
        ({**ADDRESSED, "MASTER_ADDR": "a b"}, "MASTER_ADDR='a b': that is no host name"),
        ({**ADDRESSED, "MASTER_ADDR": "tcp://h"}, "MASTER_ADDR='tcp://h': that is no host name"),
        ({**ADDRESSED, "MASTER_ADDR": "h:1"}, "MASTER_ADDR='h:1': .*without a port"),
        ({**ADDRESSED, "MASTER_PORT": "abc"}, "MASTER_PORT='abc': the port is not a whole number"),
        ({**ADDRESSED, "MASTER_PORT": ""}, "MASTER_PORT='': the port is not a whole number"),
        ({**ADDRESSED, "MASTER_PORT": "1.5"}, "MASTER_PORT='1.5': the port is not a whole number"),
        ({**ADDRESSED, "MASTER_PORT": "99999"}, "MASTER_PORT='99999': a port is from 1 to 65535"),
        ({**ADDRESSED, "MASTER_PORT": "-1"}, "MASTER_PORT='-1': a port is from 1 to 65535"),
        ({**ADDRESSED, "MASTER_PORT": "0"}, "MASTER_PORT='0': a port is from 1 to 65535"),
        ({**ADDRESSED, "MASTER_PORT": "9" * 5000}, "a port is from 1 to 65535"),
    ],
)
def test_what_is_nowhere_or_wrong_in_the_environment_is_told(
    environ: dict[str, str], text: str
) -> None:
    with pytest.raises(PlanError, match=text):
        Launch.resolve(None, None, None, None, environ)


def test_all_that_is_wrong_in_the_environment_is_told_at_once() -> None:
    environ = {"RANK": "a", "WORLD_SIZE": "b", "MASTER_ADDR": "h", "MASTER_PORT": "c"}
    with pytest.raises(PlanError, match=r"(?s)RANK='a'.*\n.*WORLD_SIZE='b'.*\n.*MASTER_PORT='c'"):
        Launch.resolve(None, None, None, None, environ)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("", "store='' is no address; known forms: tcp://host:port, tcp://.*, file:///path"),
        ("host:1", "store='host:1' is no address; known forms"),
        ("http://host:1", "is no address; known forms"),
        ("tcp://", "is no address; known forms"),
        ("tcp://:1", "is no address; known forms"),
        ("tcp://[]:1", "is no address; known forms"),
        ("tcp://::1:29500", "is no address; known forms"),
        ("tcp://host:1/path", "is no address; known forms"),
        ("tcp://user@host:1", "is no address; known forms"),
        ("tcp://host", "store='tcp://host' has no port"),
        ("tcp://[::1]", "has no port"),
        ("tcp://host:", "the port is not a whole number"),
        ("tcp://host:abc", "store='tcp://host:abc': the port is not a whole number"),
        ("tcp://host:-1", "a port is from 1 to 65535"),
        ("tcp://host:0", "a port is from 1 to 65535"),
        ("tcp://host:99999", "store='tcp://host:99999': a port is from 1 to 65535"),
        ("tcp://a b:1", "is no host name|that is no host name"),
        ("file://", "has no absolute path"),
        ("file://relative/store", "store='file://relative/store' has no absolute path"),
        ("file:relative", "has no absolute path"),
        ("file:///a\0b", "has no absolute path"),
        (7, "store=7 is neither a c10d store nor the address of one"),
        (b"tcp://h:1", "is neither a c10d store nor the address of one"),
    ],
)
def test_an_address_of_no_known_form(where: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Launch.resolve(0, 2, where, "run", {})


@pytest.mark.parametrize(
    ("where", "kind", "host", "port", "path"),
    [
        ("tcp://host:29500", "tcp", "host", 29500, ""),
        ("tcp://Host-1.example:29500/", "tcp", "Host-1.example", 29500, ""),
        ("tcp://[::1]:29500", "tcp", "::1", 29500, ""),
        ("tcp://[fe80::1%eth0]:1", "tcp", "fe80::1%eth0", 1, ""),
        ("file:///a/b", "file", "", 0, "/a/b"),
        ("file:/a/b", "file", "", 0, "/a/b"),
        ("file://localhost/a", "file", "", 0, "/a"),
        ("file:///a #?%20", "file", "", 0, "/a #?%20"),
    ],
)
def test_an_address(where: str, kind: str, host: str, port: int, path: str) -> None:
    found = StoreAddress.parse(where)
    assert (found.kind, found.host, found.port, found.path) == (kind, host, port, path)


def _address(text: str) -> StoreAddress:
    return StoreAddress.parse(text)


def _free_port(host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.create_server((host, 0), family=family)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def _opened(*texts: str, count: int = 2) -> Iterator[list[StoreClient]]:
    clients = [
        open_store(_address(text), rank, count, Deadline(20)) for rank, text in enumerate(texts)
    ]
    yield clients
    for client in reversed(clients):
        client.close(20)


def _shared(clients: list[StoreClient]) -> bytes:
    clients[0].call(lambda store: store.set("key", "value"), Deadline(20))
    return clients[1].call(lambda store: store.get("key"), Deadline(20))


def test_a_file_store(tmp_path: Path) -> None:
    with _opened(*[f"file://{tmp_path}/a #?%20"] * 2) as clients:
        assert _shared(clients) == b"value"
        assert (tmp_path / "a #?%20").exists()


@pytest.fixture(scope="module", autouse=True)
def _servers_pipe() -> None:
    """Have libuv make the pipe that it keeps from a process's first server to its end."""
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_rank_0_hosts_a_tcp_store(host: str) -> None:
    if host == "[::1]" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this machine has no IPv6")
    port = _free_port(host.strip("[]"))
    leaks = LeakCheck("descriptors")
    with _opened(*[f"tcp://{host}:{port}"] * 2) as clients:
        assert _shared(clients) == b"value"
    # Torch's server ends when it has looked up the names of those who came to it, which may take
    # a name server's time-out.
    gc.collect()
    leaks.verify(settle_s=45.0)


def _refused(text: str, rank: int, seconds: float = 0.3) -> str:
    began = time.monotonic()
    with pytest.raises(ConnectError) as caught:
        open_store(_address(text), rank, 2, Deadline(seconds))
    assert time.monotonic() - began < seconds + 10
    return str(caught.value)


def test_nobody_answers() -> None:
    where = f"127.0.0.1:{_free_port()}"
    text = _refused(f"tcp://{where}", 1)
    assert text.startswith(f"no answer from the store at {where} within 0.3 s: connection refused")
    assert f"store='tcp://{where}'" in text
    assert "missing: 0, which hosts the store" in text


def test_who_listens_there_is_no_store() -> None:
    """It takes the connection and says nothing, for which torch waits for good."""
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        text = _refused(f"tcp://127.0.0.1:{other.getsockname()[1]}", 1)
    assert "does not answer as a store within 0.3 s" in text
    assert "store='tcp://" in text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_nobody_knows(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    text = _refused("tcp://no-such-host.invalid:29500", rank)
    assert "cannot resolve host 'no-such-host.invalid' within 0.3 s" in text
    assert "store='tcp://no-such-host.invalid:29500'" in text
    assert caplog.text.count("cannot resolve host 'no-such-host.invalid' yet") == 1


@pytest.mark.parametrize("name", ["a" * 64, "a..b"])
def test_a_name_that_can_be_none(name: str) -> None:
    assert f"cannot resolve host {name!r}" in _refused(f"tcp://{name}:29500", 1, 0.05)


def test_the_port_is_in_use() -> None:
    with closing(socket.create_server(("0.0.0.0", 0))) as holder:
        port = holder.getsockname()[1]
        text = _refused(f"tcp://127.0.0.1:{port}", 0, 20.0)
    assert text.startswith(f"rank 0 cannot host the store at 127.0.0.1:{port} (")
    assert "address already in use" in text
    assert "another job may hold the port" in text


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("no-such-folder/store", "there is no folder '.*/no-such-folder' on this host"),
        ("file/store", "there is no folder '.*/file' on this host"),
        ("folder", "the file cannot be opened: Is a directory"),
        ("file", "the file exists and is no store's"),
        ("short", "the file exists and is no store's"),
        ("pipe", "that is no file that a store can be in|the file cannot be opened"),
        ("n" * 300, "the file cannot be opened: File name too long"),
    ],
)
def test_a_file_that_cannot_hold_a_store(tmp_path: Path, path: str, text: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("a text of a user's own, long enough")
    (tmp_path / "short").write_text("short")
    os.mkfifo(tmp_path / "pipe")
    found = _refused(f"file://{tmp_path}/{path}", 0)
    assert re.search(text, found)
    assert f"store='file://{tmp_path}/{path}'" in found
    assert (tmp_path / "file").read_text() == "a text of a user's own, long enough"


def test_a_file_that_may_not_be_written() -> None:
    """Not even by root."""
    assert "store='file:///proc/stagelink': the file cannot be opened" in _refused(
        "file:///proc/stagelink", 0
    )


def test_an_endless_deadline_is_fine() -> None:
    where = _address(f"tcp://127.0.0.1:{_free_port()}")
    client = open_store(where, 0, 1, Deadline(float("inf")))
    client.call(lambda store: store.set("key", "value"), Deadline(float("inf")))
    client.close(20)
