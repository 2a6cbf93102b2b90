"""Which tensors a module takes and gives."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

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
LINE = Plan.from_dict(
    document(LOOPBACK, (1, 1, 1), [tensor("h", 0, 1), tensor("g", 1, 2), tensor("target", 0, 2)])
)
"""Each stage takes one tensor, and the last the target."""

REMEDY = (
    ". Name them alike, or say in the plan, in stage 's1', which parameter takes what: "
    'arguments = { NAME = "%s" }'
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


def given(found: Names, tensors: dict[str, Any]) -> dict[str, Any]:
    """What the parameters of a forward with names for all get, however they get it."""
    args, kwargs = found.arguments(tensors)
    named = [name for name in found._parameters.named if name not in kwargs]
    return {**dict(zip(named, args, strict=False)), **kwargs}


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
    assert given(found, batch) == {"image": ONE}
    assert found.of_batch({**batch, "scale": ONE}).keys() == {"image", "scale", "target", "mask"}


def test_double_star_takes_what_the_plan_does_not_send() -> None:
    found = names(0, lambda **tensors: None)
    batch = {"image": ONE, "extra": ONE, "target": TWO}
    assert found.of_batch(batch) == batch
    assert given(found, batch).keys() == {"image", "extra"}
    tensors = {"h": ONE, "mask": None}
    assert given(names(1, lambda **tensors: None), tensors) == tensors


def test_a_named_parameter_gets_what_is_also_sent() -> None:
    found = names(0, lambda target, **tensors: None)
    assert given(found, {"image": ONE, "target": TWO}) == {"image": ONE, "target": TWO}


def test_the_last_stage_keeps_the_target_for_the_loss() -> None:
    for forward in (lambda logits: None, lambda **tensors: None, lambda logits, target=0: None):
        assert given(names(2, forward), {"logits": ONE, "target": TWO}) == {"logits": ONE}


def test_a_batch_without_what_is_required_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        names(0, lambda image, weight: None).of_batch({"img": ONE, "weight": ONE})
    text = str(caught.value)
    assert "stage 's0': the batch has no 'image'; it has 'img', 'weight'" in text
    assert "forward(image, weight)" in text
    assert text.endswith(REMEDY.replace("s1", "s0") % "image")


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda hidden, mask: None, f"missing: 'hidden'; unexpected: 'h'{REMEDY % 'hidden'}"),
        (lambda h: None, "unexpected: 'mask'"),
        (lambda h, mask, more: None, f"missing: 'more'{REMEDY % 'more'}"),
        (
            lambda *all_: None,
            "unexpected: 'h', 'mask'. Several tensors need parameters with names",
        ),
    ],
)
def test_received_tensors_must_be_the_parameters(forward: Any, said: str) -> None:
    text = refused(1, forward)
    assert text.startswith("stage 's1': Module.forward(")
    assert text.endswith(f"receives, 'h', 'mask'; {said}")


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


# -- by position


def called(found: Names, **tensors: Any) -> tuple[list[Any], dict[str, Any]]:
    return found.arguments(tensors)


def test_the_call_is_by_position_as_far_as_it_can_be() -> None:
    for forward in (
        lambda h, mask: None,
        lambda h, /, mask: None,
        lambda h, mask, more=None: None,
        lambda h, mask, *rest, scale=1, **more: None,
    ):
        assert called(names(1, forward), mask=TWO, h=ONE) == ([ONE, TWO], {})
    assert called(names(1, lambda h, more=0, mask=0: None), mask=TWO, h=ONE) == (
        [ONE],
        {"mask": TWO},
    )
    assert called(names(1, lambda h, more=5, mask=0, /: None), mask=TWO, h=ONE) == (
        [ONE, 5, TWO],
        {},
    )
    assert called(names(1, lambda *, h, mask: None), mask=TWO, h=ONE) == (
        [],
        {"mask": TWO, "h": ONE},
    )


def test_the_only_tensor_is_the_only_argument() -> None:
    forwards: list[Callable[..., Any]] = [
        lambda other: None,
        lambda other, scale=1.0: None,
        lambda other, /, **more: None,
        lambda other, *rest: None,
        lambda *rest: None,
        lambda *rest, **more: None,
    ]
    for forward, (stage, name) in product(forwards, enumerate(("x", "h", "g"))):
        found = names(stage, forward, LINE)
        tensors = {name: ONE, "target": TWO} if stage != 1 else {name: ONE}
        if stage == 0:
            assert found.of_batch(tensors) == tensors
        assert called(found, **tensors) == ([ONE], {})


def test_the_only_tensor_goes_by_its_name_where_that_is_a_parameter() -> None:
    found = names(1, lambda other=0, *, h: None, LINE)
    assert called(found, h=ONE) == ([], {"h": ONE})
    assert "unexpected: 'h'" in refused(1, lambda other=0: None, LINE)
    assert "missing: 'other'" in refused(1, lambda *, other: None, LINE)
    assert "missing: 'one', 'other'; unexpected: 'h'" in refused(1, lambda one, other: 0, LINE)


def test_two_entries_of_a_batch_are_not_guessed_at() -> None:
    found = names(0, lambda other: None, LINE)
    with pytest.raises(UsageError, match="the batch has no 'other'; it has 'one', 'two'"):
        found.of_batch({"one": ONE, "two": ONE, "target": TWO})
    found = names(0, lambda *others: None, LINE)
    with pytest.raises(UsageError, match=r"has no '\*others'.*Several tensors need parameters"):
        found.of_batch({"one": ONE, "two": ONE, "target": TWO})


# -- by the plan's arguments


def renaming(plan: Plan, *of_stages: dict[str, str]) -> Plan:
    """The plan with arguments of its stages."""
    stages = tuple(
        dataclasses.replace(stage, arguments=arguments)
        for stage, arguments in zip(plan.stages, of_stages, strict=True)
    )
    return dataclasses.replace(plan, stages=stages)


def test_arguments_say_which_parameter_takes_a_tensor() -> None:
    plan = renaming(PLAN, {"image": "x"}, {"h": "mask", "mask": "h"}, {"logits": "input"})
    first = names(0, lambda x, image=0: None, plan)
    assert first.of_batch({"image": ONE, "target": TWO}).keys() == {"image", "target"}
    assert called(first, image=ONE, target=TWO) == ([ONE], {})
    assert called(names(1, lambda h, mask: None, plan), h=ONE, mask=TWO) == ([TWO, ONE], {})
    assert called(names(2, lambda *, input: None, plan), logits=ONE, target=TWO) == (
        [],
        {"input": ONE},
    )


def test_arguments_may_ask_for_what_the_stage_only_passes_on() -> None:
    plan = renaming(PLAN, {"mask": "also"}, {}, {})
    found = names(0, lambda x, **more: None, plan)
    assert called(found, x=ONE, mask=TWO, target=TWO) == ([ONE], {"also": TWO})
    found = names(0, lambda *args, **more: None, plan)
    assert called(found, x=ONE, mask=TWO, target=TWO) == ([ONE], {"also": TWO})


@pytest.mark.parametrize(
    ("stage", "arguments", "forward", "said"),
    [
        (
            1,
            {"h": "inptu"},
            lambda input, mask: None,
            "arguments.h in the plan: unknown parameter 'inptu' (did you mean 'input'?); "
            "Module.forward(input, mask) has 'input', 'mask'",
        ),
        (1, {"h": "x"}, lambda h, x, mask: None, "missing: 'h'"),
        (2, {"target": "x"}, lambda x: None, "goes to the loss, not to the module"),
    ],
)
def test_arguments_that_do_not_fit_the_module(
    stage: int, arguments: dict[str, str], forward: Any, said: str
) -> None:
    of_stages: list[dict[str, str]] = [{}, {}, {}]
    of_stages[stage] = arguments
    assert said in refused(stage, forward, renaming(PLAN, *of_stages))


def test_a_batch_that_does_not_fit_the_arguments() -> None:
    found = names(0, lambda x, scale=1: None, renaming(PLAN, {"image": "x"}, {}, {}))
    with pytest.raises(UsageError, match="the batch has no 'image'; it has 'x', 'target'"):
        found.of_batch({"x": ONE, "target": TWO})
    with pytest.raises(UsageError, match="'image', 'x' of the batch are all parameter 'x' of"):
        found.of_batch({"image": ONE, "x": ONE, "target": TWO})


# -- through wrappers


class Masked(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, x, 0)


class Around(torch.nn.Module):
    """A wrapper of one's own, with the module under any name."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class AroundMany(Around):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__(inner)
        self.module = inner
        self.other = torch.nn.Identity()


def logged(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


def assigned(change: Callable[[Any], Any]) -> torch.nn.Module:
    made = Masked()
    made.forward = change(made.forward)  # type: ignore[method-assign]
    return made


def compiled_in_place(module: torch.nn.Module) -> torch.nn.Module:
    module.compile(backend="eager")
    return module


EXAMPLE = (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))
WRAPPED: dict[str, Callable[[], Any]] = {
    "compile": lambda: torch.compile(Masked(), backend="eager"),
    "compile twice": lambda: torch.compile(
        Around(cast("torch.nn.Module", torch.compile(Masked(), backend="eager"))), backend="eager"
    ),
    "compiled forward": lambda: assigned(partial(torch.compile, backend="eager")),
    "compiled in place": lambda: compiled_in_place(Masked()),
    "wraps": lambda: assigned(logged),
    "partial": lambda: assigned(functools.partial),
    "data parallel": lambda: torch.nn.DataParallel(Masked()),
    "averaged": lambda: AveragedModel(Masked()),
    "checkpoint": lambda: checkpoint_wrapper(Masked()),
    "one's own": lambda: Around(Masked()),
    "one's own with others": lambda: AroundMany(Masked()),
    "graph": lambda: torch.fx.symbolic_trace(Masked()),
    "export": lambda: torch.export.export(Masked(), EXAMPLE).module(),
    "script": lambda: torch.jit.script(Masked()),
    "trace": lambda: torch.jit.trace(Masked(), EXAMPLE),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapper_takes_what_its_module_takes(make: Callable[[], Any]) -> None:
    """A mask that goes to the module and is passed on as well; ``extra`` it would not know."""
    made = make()
    found = Names(made, PLAN, PLAN.stages[0])
    batch = {"x": EXAMPLE[0], "mask": ~EXAMPLE[1], "target": TWO, "extra": ONE}
    assert found.of_batch(batch).keys() == {"x", "mask", "target"}
    args, kwargs = found.arguments(batch)
    assert kwargs == {}
    assert [id(one) for one in args] == [id(batch["x"]), id(batch["mask"])]
    if type(made) is not torch.nn.DataParallel:
        assert torch.equal(made(*args), torch.zeros(2, 3))
    assert found.outputs(ONE, batch) == {"h": ONE, "mask": batch["mask"], "target": TWO}


def test_an_error_names_wrapper_and_module() -> None:
    made = torch.compile(Masked(), backend="eager")
    with pytest.raises(UsageError) as caught:
        Names(made, PLAN, PLAN.stages[1])  # type: ignore[arg-type]
    assert "Masked.forward(x: 'torch.Tensor', mask: 'torch.Tensor')" in str(caught.value)
    assert "(in OptimizedModule) is called by name" in str(caught.value)


@pytest.mark.parametrize(
    "inner", [torch.nn.ModuleList([Masked()]), torch.nn.ModuleDict({"a": Masked()})]
)
def test_a_container_is_no_wrapped_module(inner: torch.nn.Module) -> None:
    found = Names(Around(inner), PLAN, PLAN.stages[1])
    assert found.arguments({"h": ONE, "mask": TWO}) == ([], {"h": ONE, "mask": TWO})


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
