"""Every public call with every argument replaced by what does not belong there.

It ends with a library error or Python's own TypeError, soon; the peer is told or not concerned;
and nothing is lost: the call works afterwards as if the other had not been made.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import HashStore

import stagelink
from stagelink.testing import run_threads
from tests.support.pipelines import LOOPBACK, document, joined
from tests.sweep.values import Call, complaint, variants

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import Store

DOCUMENT = document(LOOPBACK, limits={"deadline_s": 5.0, "first_deadline_s": 5.0})
PLAN = stagelink.Plan.from_dict(DOCUMENT)
ALONE = stagelink.Plan.from_dict(
    {
        "pipeline": {"name": "alone", "microbatches": 2},
        "stages": [{"name": "all", "ranks": [0]}],
        "limits": {"connect_deadline_s": 1.0},
    }
)
TOML = """
[pipeline]
name = "alone"
microbatches = 2
[[stages]]
name = "all"
ranks = [0]
"""


def _tensor() -> torch.Tensor:
    return torch.arange(3.0)


def _always(value: Any) -> Any:
    return lambda: value


CALLED = {"a type", "a function"}
"""What is called is the caller's own, and what it raises as well."""


# -- calls that concern nobody else


def _connect(_: object, **arguments: Any) -> None:
    stagelink.connect(**arguments).close()


ALONE_CALLS = [
    Call(
        "Plan.from_toml",
        lambda _, **given: stagelink.Plan.from_toml(**given),
        {"text": _always(TOML), "where": _always("here")},
    ),
    Call(
        "Plan.from_dict",
        lambda _, **given: stagelink.Plan.from_dict(**given),
        {"mapping": _always(DOCUMENT), "where": _always("here")},
    ),
    Call("Plan.stage_of", lambda _, **given: PLAN.stage_of(**given), {"rank": _always(0)}),
    Call("Plan.replica_of", lambda _, **given: PLAN.replica_of(**given), {"rank": _always(0)}),
    Call("Plan.server_of", lambda _, **given: PLAN.server_of(**given), {"rank": _always(0)}),
    Call("Plan.inputs", lambda _, **given: PLAN.inputs(**given), {"stage_index": _always(0)}),
    Call("Plan.outputs", lambda _, **given: PLAN.outputs(**given), {"stage_index": _always(0)}),
    Call("Plan.tensor", lambda _, **given: PLAN.tensor(**given), {"name": _always("h")}),
    Call(
        "Plan.with_microbatches",
        lambda _, **given: PLAN.with_microbatches(**given),
        {"microbatches": _always(3)},
    ),
    Call(
        "Plan.check_launch",
        lambda _, **given: PLAN.check_launch(**given),
        {"rank": _always(0), "world_size": _always(2)},
    ),
    Call(
        "Action.parse",
        lambda _, **given: stagelink.Action.parse(**given),
        {"text": _always("F3"), "stage": _always(0)},
    ),
    Call(
        "verify",
        lambda _, **given: stagelink.verify(**given),
        {"plan": _always(PLAN), "microbatches": _always(3), "actions": _always(None)},
    ),
    Call(
        "connect",
        _connect,
        {
            "plan": _always(ALONE),
            "rank": _always(0),
            "world_size": _always(1),
            "store": HashStore,
            "run_id": _always("run"),
            "transports": tuple,
            "observers": tuple,
        },
    ),
    Call(
        "in_one_process",
        lambda _, **given: stagelink.in_one_process(**given),
        {"plan": _always(ALONE), "work": _always(lambda comm: comm.rank)},
        fits=CALLED,
    ),
]


@pytest.mark.parametrize("call", ALONE_CALLS, ids=str)
def test_calls_that_concern_one_rank(call: Call) -> None:
    call.function(None, **call.arguments())
    complaints = {}
    for words, arguments in variants(call):
        found = complaint(partial(call.function, None, **arguments))
        if found is not None:
            complaints[words] = found
    assert not complaints
    call.function(None, **call.arguments())


def test_plans_of_files(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(TOML)
    call = Call(
        "Plan.load",
        lambda _, **given: stagelink.Plan.load(**given),
        {"path": _always(file), "microbatches": _always(2)},
    )
    test_calls_that_concern_one_rank(call)


# -- calls of a session and of a handler, with a peer


def _wait(handle: Any, **given: Any) -> None:
    handle.wait(**given)


SOURCE_CALLS = [
    Call(
        "Session.send",
        lambda at, **given: at.session.send(**given),
        {
            "name": _always("h"),
            "tensor": _tensor,
            "microbatch": _always(0),
            "copy": _always(True),
            "deadline_s": _always(5.0),
        },
    ),
    Call(
        "Session.isend",
        lambda at, **given: at.session.isend(**given).wait(),
        {
            "name": _always("h"),
            "tensor": _tensor,
            "microbatch": _always(0),
            "copy": _always(True),
        },
    ),
    Call(
        "SendHandle.wait",
        lambda at, **given: _wait(at.session.isend("h", _tensor(), 0), **given),
        {"deadline_s": _always(5.0)},
    ),
    Call(
        "Session.recv_grad",
        lambda at, **given: at.session.recv_grad(**given),
        {"name": _always("h"), "microbatch": _always(0), "deadline_s": _always(5.0)},
    ),
    Call(
        "Session.irecv_grad",
        lambda at, **given: at.session.irecv_grad(**given),
        {"name": _always("h"), "microbatch": _always(0)},
    ),
    Call(
        "Session.has",
        lambda at, **given: at.session.has(**given),
        {"microbatch": _always(0)},
    ),
    Call(
        "Session.end",
        lambda at, **given: at.session.end(**given),
        {"microbatches": _always(1)},
    ),
    Call(
        "Handler.reduce",
        lambda at, **given: at.comm.reduce(**given),
        {"values": _always("no numbers"), "op": _always("sum"), "deadline_s": _always(5.0)},
        fits={"an empty string", "bytes", "an empty list", "an empty dict", "a tensor"},
    ),
    Call(
        "Handler.wait",
        lambda at, **given: at.comm.wait(**given),
        {"future": _always("no future"), "what": _always("it"), "deadline_s": _always(5.0)},
    ),
    Call(
        "Handler.soon",
        lambda at, **given: at.comm.soon(**given),
        {"action": _always(int)},
        fits=CALLED,
    ),
    Call(
        "Handler.gloo_address",
        lambda at, **given: at.comm.gloo_address(**given),
        {"elsewhere": _always(False)},
    ),
    Call(
        "Handler.on_failure",
        lambda at, **given: at.comm.on_failure(**given),
        {"callback": _always(print)},
    ),
    Call(
        "Handler.train",
        lambda at, **given: at.comm.train(**given),
        {"microbatches": _always(1), "items": _always(1), "actions": _always(None)},
    ),
    Call(
        "Handler.evaluate",
        lambda at, **given: at.comm.evaluate(**given),
        {"microbatches": _always(1), "items": _always(1)},
    ),
]

SINK_CALLS = [
    Call(
        "Session.recv",
        lambda at, **given: at.session.recv(**given),
        {"name": _always("h"), "microbatch": _always(0), "deadline_s": _always(5.0)},
    ),
    Call(
        "Session.irecv",
        lambda at, **given: at.session.irecv(**given),
        {"name": _always("h"), "microbatch": _always(0)},
    ),
    Call(
        "RecvHandle.wait",
        lambda at, **given: at.session.irecv("h", 0).wait(**given),
        {"deadline_s": _always(5.0)},
    ),
    Call(
        "Session.send_grad",
        lambda at, **given: at.session.send_grad(**given),
        {
            "name": _always("h"),
            "gradient": _tensor,
            "microbatch": _always(0),
            "copy": _always(True),
        },
    ),
    Call(
        "Session.isend_grad",
        lambda at, **given: at.session.isend_grad(**given),
        {
            "name": _always("h"),
            "gradient": _tensor,
            "microbatch": _always(0),
            "copy": _always(True),
        },
    ),
]


class At:
    """Where a call is made.

    Attributes:
        comm: the rank's handler.
        session: one with a single microbatch, of a tensor that requires a gradient.
    """

    def __init__(self, comm: stagelink.Handler, session: stagelink.Session) -> None:
        self.comm, self.session = comm, session


def _swept(rank: int, world_size: int, store: Store, call: Call, sweeping: int) -> dict[str, str]:
    """One session for each variant, in which the call is made before all goes its usual way."""
    complaints: dict[str, str] = {}
    with joined(rank, world_size, store, DOCUMENT) as comm:
        for words, arguments in [*variants(call), ("as it should be", call.arguments())]:
            with comm.train(1 if rank == 0 else None) as session:
                at = At(comm, session)
                found = None
                if rank == sweeping and words != "as it should be":
                    found = complaint(partial(call.function, at, **arguments))
                found = found or (str(comm.failure) if comm.failure else None)
                found = found or complaint(partial(_usual_way, at))
            if found:
                complaints[words] = found
                if comm.failure:
                    break
        comm.reduce([1.0])
    return complaints


def _usual_way(at: At) -> None:
    """What is left to do of a message and its gradient after whatever was done of it before.

    A message that was refused at its sender is over, and so is a gradient.
    """
    session = at.session
    if at.comm.rank == 0:
        with suppress(stagelink.UsageError):  # it was sent before
            session.send("h", _tensor().requires_grad_(), 0)
        session.recv_grad("h", 0)
        return
    try:
        x = session.recv("h", 0)
    except stagelink.UsageError:
        x = None
    session.send_grad("h", x, 0)


@pytest.mark.parametrize(
    ("call", "sweeping"),
    [(call, 0) for call in SOURCE_CALLS] + [(call, 1) for call in SINK_CALLS],
    ids=str,
)
def test_calls_with_a_peer(call: Call, sweeping: int) -> None:
    for complaints in run_threads(_swept, 2, call, sweeping, timeout_s=50.0):
        assert not complaints


def _ended(rank: int, world_size: int, store: Store) -> dict[str, str]:
    with joined(rank, world_size, store, DOCUMENT) as comm:
        calls = [
            Call("abort", lambda _, **given: comm.abort(**given), {"error": _always(None)}),
            Call(
                "replica_store",
                lambda _, **given: comm.replica_store(**given),
                {"drop": _always(None)},
                fits=CALLED,
            ),
            Call(
                "close",
                lambda _, **given: comm.close(**given),
                {"timeout_s": _always(5.0)},
                fits={"None", "a huge number", "a fraction"},
            ),
        ]
        found = {
            words: complaint(partial(call.function, None, **given))
            for call in calls
            for words, given in variants(call)
        }
        comm.reduce([1.0])  # it is open all the same
        return {words: text for words, text in found.items() if text is not None}


def test_calls_that_end_a_handler() -> None:
    for complaints in run_threads(_ended, 2):
        assert not complaints


# -- nothing is left out

COVERED = {call.name for call in (*ALONE_CALLS, *SOURCE_CALLS, *SINK_CALLS)} | {"Plan.load"}
ELSEWHERE = {
    "Action": "a plain value; lists of them are verified: tests/schedule/test_checks.py",
    "Handler.abort": "test_calls_that_end_a_handler",
    "Handler.close": "test_calls_that_end_a_handler",
    "Handler.replica_store": "test_calls_that_end_a_handler",
    "PipelineRunner": "tests/runner/test_arguments.py",
    "PipelineRunner.train": "tests/runner/test_arguments.py",
    "PipelineRunner.evaluate": "tests/runner/test_arguments.py",
    "PipelineRunner.stream": "tests/runner/test_arguments.py",
    "PipelineRunner.load_state_dict": "tests/runner/test_arguments.py",
}


VALUES = (Exception, tuple, Enum)


def _public() -> set[str]:
    """Callables with arguments that ``stagelink`` offers, but for values and what it makes."""
    made = {"Handler", "Session", "SendHandle", "RecvHandle", "Verification", "Plan"}
    found = set()
    for name in stagelink.__all__:
        thing = getattr(stagelink, name)
        if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, VALUES)):
            continue
        if name not in made:
            found.add(name)
        if inspect.isclass(thing):
            methods = inspect.getmembers(thing, callable)
            found |= {f"{name}.{method}" for method, _ in methods if not method.startswith("_")}
    return {name for name in found if _takes_arguments(name)}


def _takes_arguments(name: str) -> bool:
    owner, _, method = name.partition(".")
    thing = getattr(stagelink, owner)
    called = getattr(thing, method) if method else thing
    return bool(set(inspect.signature(called).parameters) - {"self", "args", "kwargs"})


def test_every_public_call_is_swept() -> None:
    assert _public() - COVERED - set(ELSEWHERE) == set()
    assert _public() >= COVERED
