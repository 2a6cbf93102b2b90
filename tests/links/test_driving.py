"""A caller that does a link's work itself stops when its time is up."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from stagelink.deadline import Deadline
from stagelink.links.driving import wait_driving

if TYPE_CHECKING:
    from collections.abc import Callable

    from stagelink.control.plane import Plane
    from stagelink.links.in_link import InLink


class FakePlane:
    def wait(self, ready: Callable[[], bool], deadline: Deadline, awaited: object = None) -> bool:
        return ready() or not deadline.passed


class FakeLink:
    """Always has something to finish, and brings ``after`` tries what is waited for."""

    finishes_in_caller = True
    drivable = True

    def __init__(self, after: int) -> None:
        self.left = after

    def drive(self, deadline: Deadline) -> None:
        del deadline
        self.left -= 1


@pytest.mark.parametrize(("after", "seconds", "comes"), [(3, 20.0, True), (2, 0.0, False)])
def test_it_drives_until_it_is_ready_or_time_is_up(
    after: int, seconds: float, comes: bool
) -> None:
    link = FakeLink(after)
    plane = cast("Plane", FakePlane())
    waited = wait_driving(plane, cast("InLink", link), lambda: link.left == 0, Deadline(seconds))
    assert waited == comes
    assert link.left == (0 if comes else after - 1)
