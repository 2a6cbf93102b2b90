"""The sweep under PipeDream's names: wrong arguments are refused, and all goes its way after."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tests.interop.pipedream_driver import Job, Runtime, with_handler
from tests.sweep.values import Call, complaint, variants

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store

    from stagelink.testing import RankPool


def _always(value: Any) -> Any:
    return lambda: value


def _complaints(calls: Sequence[Call]) -> dict[str, str]:
    found = {
        words: complaint(partial(call.function, None, **given))
        for call in calls
        for words, given in variants(call)
    }
    return {words: text for words, text in found.items() if text is not None}


def _before(runtime: Runtime) -> list[Call]:
    """Calls of which every variant is refused before other ranks hear of it."""
    handler = runtime.handler
    arguments = {
        "receive_ranks": runtime.receive_ranks,
        "send_ranks": runtime.send_ranks,
        "tensor_tags": runtime.tags,
        "target_tensor_names": runtime.targets,
        "training_tensor_dtypes": None,  # so that what is fine elsewhere does not start anything
        "rank_in_stage": runtime.replica,
        "num_ranks_in_stage": 1,
        "ranks_in_previous_stage": runtime.previous,
        "ranks_in_next_stage": runtime.next,
    }
    return [
        Call(
            "initialize",
            lambda _, **given: handler.initialize(**given),
            {name: _always(value) for name, value in arguments.items()},
            fits={"an empty dict"},
        ),
        Call(
            "set_tensor_shapes",
            lambda _, **given: handler.set_tensor_shapes(**given),
            {"tensor_shapes": _always(None)},
        ),
        Call(
            "num_iterations_for_helper_threads",
            lambda _, **given: handler.num_iterations_for_helper_threads(**given),
            {"num_iterations": _always(1)},
        ),
        Call(
            "start_helper_threads",
            lambda _, **given: handler.start_helper_threads(**given),
            {"num_iterations": _always(-1), "forward_only": _always(False)},
        ),
    ]


def _during(runtime: Runtime) -> list[Call]:
    handler = runtime.handler
    sends = runtime.stage == 0
    return [
        Call(
            "send",
            lambda _, **given: handler.send(**given),
            {
                "tensor_name": _always("nothing"),
                "tensor": _always("no tensor"),
                "forward_minibatch_id": _always(0),
                "backward_minibatch_id": _always(0),
                "backward": _always(not sends),
            },
        ),
        Call(
            "recv",
            lambda _, **given: handler.recv(**given),
            {
                "tensor_name": _always("nothing"),
                "forward_minibatch_id": _always(0),
                "backward_minibatch_id": _always(0),
                "backward": _always(sends),
            },
        ),
        Call(
            "increment_messaging_index",
            lambda _, **given: handler.increment_messaging_index(**given),
            {"sending": _always(None)},
            fits={"true"},
        ),
    ]


def _swept(runtime: Runtime) -> dict[str, str]:
    found = _complaints(_before(runtime))
    runtime.initialize()
    runtime.start("train", 1)
    found |= _complaints(_during(runtime))
    runtime.run_forward()
    runtime.run_backward()
    runtime.handler.wait()
    gradient = runtime.weight.grad
    assert gradient is not None
    assert torch.isfinite(gradient)
    return found


def _uninitialized(rank: int, world_size: int, store: Store, job: Job) -> dict[str, str]:
    return with_handler(rank, world_size, store, job, _swept, initialize=False)


def test_pipedreams_calls(rank_pool: RankPool) -> None:
    for complaints in rank_pool.run(_uninitialized, 2, Job((1, 1), aux=True)):
        assert not complaints, complaints
