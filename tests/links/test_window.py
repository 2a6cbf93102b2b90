"""Places of an edge: never more under way than the window has, and nobody is forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stagelink.links.window import Window


def _window(size: int) -> Window:
    window = Window()
    window.size = size
    return window


def test_a_window_is_open_until_it_is_full() -> None:
    window = _window(2)
    for microbatch in (0, 1):
        assert window.try_admit(0, microbatch)
    assert not window.try_admit(0, 2)
    assert window.outstanding() == [0, 1]


def test_an_answer_in_any_order_frees_a_place() -> None:
    window = _window(2)
    window.admit(0, 0)
    window.admit(0, 1)
    assert window.release(0, 1) == []
    assert window.outstanding() == [0]
    assert window.try_admit(0, 2)


def test_an_answer_that_comes_twice_frees_one_place() -> None:
    window = _window(1)
    window.admit(0, 0)
    window.release(0, 0)
    window.admit(0, 1)
    window.release(0, 0)
    assert not window.try_admit(0, 2)


def test_places_of_sessions_before_still_count() -> None:
    window = _window(2)
    window.admit(0, 0)
    window.admit(1, 0)
    assert not window.try_admit(1, 1)
    assert window.outstanding(1) == [0]
    assert window.outstanding() == [0, 0]
    window.release(0, 0)
    assert window.try_admit(1, 1)


def test_what_is_parked_goes_first_and_has_its_place_when_it_starts() -> None:
    window = _window(1)
    started: list[int] = []
    window.admit(0, 0)
    for microbatch in (1, 2):
        window.park(0, microbatch, lambda number=microbatch: started.append(number))  # type: ignore[misc]
    (start,) = window.release(0, 0)
    # Before it runs: nobody takes the place in between, and no second one starts.
    assert not window.try_admit(0, 3)
    assert window.release(0, 0) == []
    assert window.outstanding() == [1]
    start()
    assert started == [1]


def test_a_larger_window_starts_all_that_fit() -> None:
    window = _window(1)
    window.admit(0, 0)
    for microbatch in range(1, 5):
        window.park(0, microbatch, lambda: None)
    window.size = 3
    assert len(window.release(0, 0)) == 3


def test_a_smaller_window_only_waits() -> None:
    window = _window(3)
    for microbatch in range(3):
        window.admit(0, microbatch)
    window.size = 1
    window.park(0, 3, lambda: None)
    assert window.release(0, 0) == []
    assert window.release(0, 1) == []
    assert len(window.release(0, 2)) == 1


def test_what_has_not_started_is_due_to_its_session() -> None:
    window = _window(1)
    window.admit(0, 0)
    assert window.due(0) == [0]
    window.started(0, 0)
    window.park(0, 1, lambda: None)
    window.park(1, 0, lambda: None)
    assert (window.due(0), window.due(1), window.waiting) == ([1], [0], 2)
    window.release(0, 0)
    assert (window.due(0), window.waiting) == ([1], 2)  # it has a place, and is about to start
    window.started(0, 1)
    assert (window.due(0), window.due(1), window.waiting) == ([], [0], 1)


def test_where_nothing_is_kept_everything_starts() -> None:
    window = _window(1)
    window.admit(0, 0)
    for microbatch in range(1, 4):
        window.park(0, microbatch, lambda: None)
    assert len(window.release_all()) == 3
    assert window.outstanding() == [0, 1, 2, 3]
    assert not window.try_admit(0, 4)


@given(size=st.integers(1, 4), steps=st.lists(st.sampled_from(["send", "answer"]), max_size=60))
def test_everything_starts_once_in_order_and_never_too_many(size: int, steps: list[str]) -> None:
    window = _window(size)
    started: list[int] = []
    answered = 0
    sent = 0
    for step in steps:
        if step == "send":
            if window.try_admit(0, sent):
                started.append(sent)
            else:
                window.park(0, sent, lambda number=sent: started.append(number))  # type: ignore[misc]
            sent += 1
        elif answered < len(started):
            for start in window.release(0, answered):
                start()
            answered += 1
        assert len(window.outstanding()) == len(started) - answered <= size
        assert started == list(range(min(sent, answered + size)))
