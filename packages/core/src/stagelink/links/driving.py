"""Waiting for what a link brings, and meanwhile doing its work where that is the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stagelink.errors import ClosedError, PeerClosedError, StagelinkError

if TYPE_CHECKING:
    from stagelink.control.chain import Awaited
    from stagelink.control.plane import Plane
    from stagelink.deadline import Deadline
    from stagelink.links.in_link import InLink

__all__ = ["wait_driving"]


def wait_driving(
    plane: Plane,
    link: InLink,
    ready: Callable[[], bool],
    deadline: Deadline,
    awaited: Awaited | None = None,
) -> bool:
    """Block until ``ready()`` is true; False when time ran out.

    Messages before the awaited one must not hold it up: they fill the link, and are finished here
    where `InLink.finishes_in_caller`.

    Raises:
        ClosedError, PeerClosedError: this end or the peer closed.
        StagelinkError: the transport or the handler failed; or what ``ready`` raises.
    """
    if not link.finishes_in_caller:
        return plane.wait(ready, deadline, awaited)
    while plane.wait(lambda: ready() or link.drivable, deadline, awaited):
        if ready():
            return True
        try:
            link.drive(deadline)
        except (ClosedError, PeerClosedError) as error:
            plane.failure.interrupted(error)
            raise
        except StagelinkError as error:
            plane.failure.raise_blamed(error, link.link.source)
        except BaseException as error:
            plane.failure.interrupted(error)
            raise
        if deadline.passed:  # what is drivable would be so for ever
            return ready()
    return False
