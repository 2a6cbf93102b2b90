"""The conformance tests find planted faults, each by the test that is named after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
PLANTED = "tests/conformance/planted.py"

FOUND_BY = {
    "DropsOne": ("test_nothing_is_lost[100]", "lost: messages [3] of 30 never arrived"),
    "SwapsTwo": ("test_order_is_kept[100]", "out of order: what came was [0, 1, 2, 4, 3, 5"),
    "ReusesABuffer": (
        "test_what_was_received_is_never_overwritten[300000]",
        "message 0 was overwritten while the user held it",
    ),
    "IgnoresTheDeadline": (
        "test_a_receive_keeps_its_deadline",
        "the finish of a receive ignores its deadline",
    ),
    "SwallowsADeath": (
        "test_a_peer_that_breaks_off_is_no_end_of_a_message",
        "a receive returns as if the message had arrived, although the other end has broken off",
    ),
    "ChangesTheDtype": ("test_values", "a receive changes the dtype: it gives torch.float32"),
    "LosesAHandle": (
        "test_every_handle_of_a_send_is_done[100]",
        "the handle of the send of message 5 is lost",
    ),
    "BlocksInClose": ("test_close_keeps_its_deadline", "Sender.close still blocks 3 s after"),
    "LeaksAThread": ("test_close_leaves_nothing", "  thread 'leaked'"),
    "Truncates": ("test_sizes[buffered]", "from byte 65536 to byte 65536"),
    "DeathIsAnEnd": (
        "test_a_peer_that_dies_is_no_end_of_a_message",
        "a receive returns as if the message had arrived, although the other end has died",
    ),
    "LeavesAFile": (
        "test_close_leaves_nothing",
        "left behind in the folder for temporary files: ['litter",
    ),
    "BeginsOnOneThread": (
        "test_sends_outlive_their_session[100]",
        "RuntimeError: another thread",
    ),
    "StallsAtTheSixth": (
        "test_close_takes_in_what_is_queued",
        "closing with 6 messages queued: ",
    ),
    "HalfDuplex": ("test_both_ends_close_at_once", "closing with 6 messages queued: "),
    "WaitsForNobody": (
        "test_close_waits_for_a_late_sender",
        "closing with 6 messages queued: TransportError: ",
    ),
    "IgnoresAbort": (
        "test_abort_ends_a_receive",
        "the finish of a receive still blocks 3 s after",
    ),
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What each test said that was run against the fault it is to find, by class and name."""
    report = tmp_path_factory.mktemp("planted") / "report.xml"
    tests = [f"{PLANTED}::Test{fault}::{test}" for fault, (test, _) in FOUND_BY.items()]
    options = ["-q", "-p", "no:cacheprovider", "--durations=0", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    run = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert report.exists(), run.stdout + run.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failure = case.find("failure")
        text = "" if failure is None else f"{failure.get('message')}\n{failure.text}"
        found[f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"] = text
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", FOUND_BY)
def test_a_planted_fault_is_found_by_name(failures: Mapping[str, str], fault: str) -> None:
    test, text = FOUND_BY[fault]
    assert text in failures[f"Test{fault}::{test}"]
