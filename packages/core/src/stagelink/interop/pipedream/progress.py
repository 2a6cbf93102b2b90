"""Progress of a caller's loop in a phase."""

from __future__ import annotations

__all__ = ["Progress"]


class Progress:
    """Counts of one phase on one rank.

    Attributes:
        received: minibatches of which all was received, as the caller says.
        returned: minibatches of which all was sent back, as the caller says.
        forwards: minibatches that went, or came, forward.
        backwards: minibatches that have begun to go back.
    """

    def __init__(self) -> None:
        self.received = 0
        self.returned = 0
        self.forwards = 0
        self.backwards = 0

    def go_on(self, *, sending: bool) -> None:
        """All of a minibatch was received, or with ``sending`` sent back."""
        if sending:
            self.returned += 1
            self.began_backward(self.returned - 1)
        else:
            self.received += 1
            self.forwards = max(self.forwards, self.received)

    def sent(self, number: int) -> None:
        """Record that a tensor of this rank's n-th minibatch, from 0, was sent forward."""
        self.forwards = max(self.forwards, number + 1)

    def began_backward(self, number: int) -> None:
        """Record that the backward of this rank's n-th minibatch, from 0, has begun."""
        self.backwards = max(self.backwards, number + 1)

    @property
    def warm_up(self) -> int:
        """Forwards ahead of the first backward, asked for when that begins."""
        return max(self.forwards - 1, 0)

    def __str__(self) -> str:
        ahead = range(min(self.backwards, self.forwards), self.forwards)
        return (
            f"{self.forwards} forwards done, {self.backwards} backwards begun, minibatches "
            f"{', '.join(map(str, ahead)) or 'none'} forward and not back"
        )
