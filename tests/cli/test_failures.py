"""Of several failed ranks, the one that the others failed because of is told."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from stagelink.cli.failures import first_failure

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Fail = Callable[..., ProcessFailure]


@pytest.fixture
def fail(tmp_path: Path) -> Fail:
    """``fail("ValueError: x", at=7)``: a rank that left such a note; ``fail(code=3)``: none."""
    files = iter(range(100))

    def make(text: str | None = None, code: int = 1, at: int = 0) -> ProcessFailure:
        path = tmp_path / f"{next(files)}.json"
        if text is not None:
            extra = {"py_callstack": f"Traceback:\n{text}\n", "timestamp": str(at)}
            note = {"message": text, "extraInfo": extra}
            path.write_text(json.dumps({"message": note}))
        return ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(path))

    return make


def test_an_exception_is_told_by_its_type_and_text(fail: Fail) -> None:
    assert first_failure({2: fail("ValueError: x")}) == "rank 2 failed: ValueError: x"


def test_a_signal_is_told_by_its_name(fail: Fail) -> None:
    assert first_failure({2: fail(code=-signal.SIGKILL)}) == "rank 2 was killed by SIGKILL"


def test_an_exit_code_is_told(fail: Fail) -> None:
    assert first_failure({2: fail(code=3)}) == "rank 2 ended with exit code 3"


@pytest.mark.parametrize("consequence", ["AbortedError", "PeerClosedError", "PeerLostError"])
@pytest.mark.parametrize(
    ("cause", "code"), [("ValueError: x", 1), (None, -signal.SIGKILL), (None, 3)]
)
def test_a_cause_goes_before_its_consequences(
    fail: Fail, consequence: str, cause: str | None, code: int
) -> None:
    # The others may well be through first, and times are in whole seconds.
    failures = {0: fail(f"{consequence}: rank 1", at=4), 1: fail(cause, code, at=5)}
    assert first_failure(failures).startswith("rank 1 ")


def test_a_consequence_without_its_cause_is_told_with_its_traceback(fail: Fail) -> None:
    # The cause is on another node, or a rank that ended early without an error.
    told = first_failure({1: fail("PeerClosedError: rank 0 left")})
    assert told == "rank 1 failed: Traceback:\nPeerClosedError: rank 0 left"


def test_who_was_ended_by_the_launcher_comes_last(fail: Fail) -> None:
    ended = fail(code=-signal.SIGTERM)
    assert first_failure({0: ended, 1: fail("AbortedError: x")}).startswith("rank 1 ")
    assert first_failure({0: ended}) == "rank 0 was killed by SIGTERM"


def test_a_note_counts_even_if_the_launcher_ended_its_writer(fail: Fail) -> None:
    noted = fail("ValueError: x", code=-signal.SIGTERM)
    assert first_failure({0: fail("AbortedError: y"), 1: noted}).startswith("rank 1 ")


def test_of_two_causes_the_earlier_one_is_told(fail: Fail) -> None:
    failures = {0: fail("ValueError: x", at=5), 1: fail("KeyError: y", at=4)}
    assert first_failure(failures) == "rank 1 failed: KeyError: y"
