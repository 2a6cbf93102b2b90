"""The page for PipeDream's users: its plans run, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stagelink.plan import Plan
from stagelink.schedule import verify

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
    assert "in a circle" in problem


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
