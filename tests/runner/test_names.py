"""Which tensors a module takes and gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from stagelink import Plan, UsageError
from stagelink.runner.names import Names
from tests.support.pipelines import LOOPBACK, document, tensor

if TYPE_CHECKING:
    from collections.abc import Callable

PLAN = Plan.from_dict(
    document(
        LOOPBACK,
        (1, 1, 1),
        [
            tensor("h", 0, 1),
            tensor("mask", 0, 1, dtype="bool"),
            tensor("target", 0, 2),
            tensor("logits", 1, 2),
        ],
    )
)
ONE = torch.ones(2)
TWO = torch.zeros(2)


def module(forward: Callable[..., Any]) -> torch.nn.Module:
    """A module whose ``forward`` is the function."""
    made = torch.nn.Module()
    made.forward = forward
    return made


def names(stage: int, forward: Callable[..., Any], plan: Plan = PLAN) -> Names:
    return Names(module(forward), plan, plan.stages[stage])


def refused(stage: int, forward: Callable[..., Any], plan: Plan = PLAN) -> str:
    with pytest.raises(UsageError) as caught:
        names(stage, forward, plan)
    return str(caught.value)


# -- what goes in


def test_a_first_stage_takes_what_its_forward_names() -> None:
    found = names(0, lambda image, scale=None: None)
    batch = {"image": ONE, "target": TWO, "mask": ONE}
    assert found.first
    assert not found.last
    assert found.of_batch({**batch, "note": "left alone"}) == batch
    assert found.arguments(batch) == {"image": ONE}
    assert found.of_batch({**batch, "scale": ONE}).keys() == {"image", "scale", "target", "mask"}


def test_double_star_takes_what_the_plan_does_not_send() -> None:
    found = names(0, lambda **tensors: None)
    batch = {"image": ONE, "extra": ONE, "target": TWO}
    assert found.of_batch(batch) == batch
    assert found.arguments(batch).keys() == {"image", "extra"}
    assert names(1, lambda **tensors: None).arguments({"h": ONE, "mask": None}) == {
        "h": ONE,
        "mask": None,
    }


def test_a_named_parameter_gets_what_is_also_sent() -> None:
    found = names(0, lambda target, **tensors: None)
    assert found.arguments({"image": ONE, "target": TWO}) == {"image": ONE, "target": TWO}


def test_the_last_stage_keeps_the_target_for_the_loss() -> None:
    for forward in (lambda logits: None, lambda **tensors: None, lambda logits, target=0: None):
        assert names(2, forward).arguments({"logits": ONE, "target": TWO}) == {"logits": ONE}


def test_a_batch_without_what_is_required_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        names(0, lambda image, weight: None).of_batch({"img": ONE, "weight": ONE})
    text = str(caught.value)
    assert "stage 's0': the batch has no 'image'; it has 'img', 'weight'" in text
    assert "forward(image, weight)" in text


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda hidden, mask: None, "missing: 'hidden'; unexpected: 'h'"),
        (lambda h: None, "unexpected: 'mask'"),
        (lambda h, mask, more: None, "missing: 'more'"),
    ],
)
def test_received_tensors_must_be_the_parameters(forward: Any, said: str) -> None:
    text = refused(1, forward)
    assert text.startswith("stage 's1': Module.forward(")
    assert text.endswith(f"receives, 'h', 'mask'; {said}")


def test_parameters_must_have_names() -> None:
    assert "takes 'h' by position only, and is called by name" in refused(1, lambda h, /, mask: 0)


def test_the_last_stage_needs_a_target() -> None:
    plan = Plan.from_dict(document(LOOPBACK, (1, 1)))
    assert "needs a tensor named 'target' for the loss; it receives 'h'" in refused(
        1, lambda h: None, plan
    )


def test_a_module_cannot_ask_for_the_target() -> None:
    assert "goes to the loss, not to the module" in refused(2, lambda logits, target: None)


def test_only_the_last_stage_may_produce_nothing() -> None:
    tensors = [tensor("h", 0, 1, 2), tensor("target", 0, 2)]
    plan = Plan.from_dict(document(LOOPBACK, (1, 1, 1), tensors))
    assert "stage 's1' produces nothing" in refused(1, lambda h: None, plan)


def test_one_stage_is_first_and_last() -> None:
    plan = Plan.from_dict(document(LOOPBACK, (2,)) | {"tensors": [], "links": []})
    found = names(0, lambda image: None, plan)
    assert found.of_batch({"image": ONE, "target": TWO, "id": 3}).keys() == {"image", "target"}
    with pytest.raises(UsageError, match="the batch has no 'target'"):
        found.of_batch({"image": ONE})


# -- what comes out


def test_one_tensor_is_the_one_that_the_batch_does_not_bring() -> None:
    found = names(0, lambda image: None)
    tensors = {"image": ONE, "target": TWO, "mask": TWO}
    assert found.outputs(ONE, tensors) == {"h": ONE, "mask": TWO, "target": TWO}


def test_a_mapping_goes_before_the_batch_and_may_hold_none() -> None:
    found = names(0, lambda image: None)
    tensors = {"image": ONE, "target": TWO, "mask": TWO}
    result = {"h": None, "mask": ONE}
    assert found.outputs(result, tensors) == {"h": None, "mask": ONE, "target": TWO}


def test_a_module_may_replace_the_only_tensor() -> None:
    plan = Plan.from_dict(document(LOOPBACK, (1, 1), [tensor("target", 0, 1)]))
    assert names(0, lambda target: None, plan).outputs(ONE, {"target": TWO}) == {"target": ONE}


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (
            ONE,
            "its module must return a mapping for 'h', 'mask', which the batch does not bring; "
            "it returned a Tensor",
        ),
        (None, "it returned a NoneType"),
        ((ONE, TWO), "it returned a tuple"),
        ({"h": ONE}, "produces 'h', 'mask', 'target'; its module returned 'h'; missing: 'mask'"),
        ({"h": ONE, "mask": ONE, "hh": TWO}, "unexpected: 'hh'"),
    ],
)
def test_a_result_that_does_not_fit(result: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        names(0, lambda image: None).outputs(result, {"image": ONE, "target": TWO})
    assert str(caught.value).startswith("stage 's0'")
    assert said in str(caught.value)
