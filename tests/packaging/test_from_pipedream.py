"""The page for PipeDream's users: its plans run, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from stagelink.plan import Plan
from stagelink.schedule import verify
from tests.support.docs import blocks

PAGE = (Path(__file__).parents[2] / "docs" / "from-pipedream.md").read_text()
PLANS = re.findall(r"^#(\d+), .*?\n\n```json\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)


def test_it_has_the_plans_of_all_five_reports() -> None:
    assert [number for number, _ in PLANS] == ["34", "39", "43", "56", "59"]


@pytest.mark.parametrize(("number", "text"), PLANS)
def test_its_plans_run(number: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / f"{number}.json"
    path.write_text(text)
    plan = Plan.load(path)
    assert verify(plan).ok
    assert verify(plan, 10_009 if number == "43" else 50).ok


def test_the_depth_map_of_39_is_refused(tmp_path: Path) -> None:
    text = dict(PLANS)["39"].rstrip().removesuffix("}")
    path = tmp_path / "conf.json"
    path.write_text(text + ', "stage_to_depth_map": {"0": 1, "1": 1, "2": 0}}')
    problem = verify(Plan.load(path)).problem
    assert problem is not None
    assert "in a cycle" in problem


def test_every_function_of_the_handler_has_a_row() -> None:
    names = """
    __init__ is_gpu_to_gpu_comm register_tensor initialize setup_queues set_tensor_shapes
    set_counter wait num_iterations_for_helper_threads start_helper_threads start_helper_thread
    create_process_groups setup_messaging_schedule get_messaging_index increment_messaging_index
    recv_helper_thread_args send_helper_thread_args recv send recv_helper_thread
    send_helper_thread _recv _send
    """
    first_column = " ".join(line.split("|")[1] for line in PAGE.splitlines() if line[:1] == "|")
    for name in names.split():
        assert re.search(rf"`{re.escape(name)}[`(]", first_column), name


def test_every_report_has_a_row() -> None:
    table = PAGE.split("## What was reported")[1]
    cells = " ".join(line.split("|")[1] for line in table.splitlines() if line[:1] == "|")
    found = {int(number) for number in re.findall(r"\d+", cells)}
    wanted = {6, 29, 30, 31, 32, 34, 36, 37, 39, 43, 50, 52, 56, 57, 59, 60, 62, 78}
    assert found == wanted


class _Stashing:
    """What PipeDream's optimizer does to weights: in place, with older values put back."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.modules = [module]
        self._base = torch.optim.SGD(module.parameters(), lr=0.5)

    def set_params(self, state_dicts: list[dict[str, torch.Tensor]], version: int) -> None:
        del version
        self.modules[0].load_state_dict(state_dicts[0])

    def step(self, closure: object = None) -> None:
        del closure
        self._base.step()


def _two_in_flight(optimizer: _Stashing) -> torch.Tensor:
    """The first weight's gradient for a forward that began before the last step."""
    module = optimizer.modules[0]
    x = torch.ones(1, 2)
    early, late = (module(x).square().sum() for _ in range(2))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    early.backward()
    optimizer.step()
    module.zero_grad()
    optimizer.set_params([before], 0)
    late.backward()
    gradient = next(module.parameters()).grad
    assert gradient is not None
    return gradient


def test_its_class_makes_the_optimizer_run_on_this_torch() -> None:
    (text,) = (block for block in blocks(PAGE, "python") if "same_versions" in block)
    scope: dict[str, type] = {}
    exec(text, scope)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2))
    expected = torch.autograd.grad(
        module(torch.ones(1, 2)).square().sum(), next(module.parameters())
    )[0]
    state = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _two_in_flight(_Stashing(module))
    module.load_state_dict(state)
    module.zero_grad()
    keeping = type("Keeping", (scope["KeepsVersions"], _Stashing), {})
    assert torch.equal(_two_in_flight(keeping(module)), expected)
