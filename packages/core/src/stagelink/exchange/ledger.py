"""The account of one edge in one session: what went, what came, and what is still due."""

from __future__ import annotations

from stagelink.exchange.incoming import Received


class Marks:
    """A set of numbers from 0 that fills up from below, in little memory however many it holds.

    Those below the lowest that is missing are not kept one by one.
    """

    __slots__ = ("below", "others")

    def __init__(self) -> None:
        # the lowest number that is missing. Where it is the next to be added, and there are no
        # others, to count it up is enough
        self.below = 0
        self.others: set[int] = set()  # those above it

    def add(self, number: int) -> None:
        """Take a number in; it may be here already."""
        if number != self.below:
            if number > self.below:
                self.others.add(number)
            return
        self.below += 1
        while self.below in self.others:
            self.others.remove(self.below)
            self.below += 1

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.others

    def __len__(self) -> int:
        return self.below + len(self.others)


class Ledger:
    """Record of one rank's work on one edge, at either end, by index among its microbatches."""

    __slots__ = ("owed", "returning", "sent", "taken")

    def __init__(self) -> None:
        self.sent = Marks()  # tensors that were sent; at their producer
        # what was received: tensors at their consumer, gradients at the producer
        self.taken = Marks()
        # microbatches whose gradient is still to come back; at the producer
        self.returning: set[int] = set()
        # messages whose gradient is still to be sent, by microbatch; at the consumer
        self.owed: dict[int, Received] = {}
