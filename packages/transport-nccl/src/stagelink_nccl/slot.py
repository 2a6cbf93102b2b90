"""The right to have an operation running: one slot a process, taken in an order without deadlock.

An NCCL operation holds its device until both ranks have issued it. Two ranks that issue different
ones wait for each other, and three can agree pair by pair and still deadlock. So an
operation runs only while the slots of both its ranks are held for it. The lower rank leads: it
takes its own slot, and asks for the other's. The answer comes at once: granted, or busy; then it
lets go of its own, and goes on with another link. After `PATIENCE` refusals it insists: it keeps
its slot and waits. Who waits while holding waits for a higher rank only, so the
waits form no cycle; and who runs needs nothing else, so every wait ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque

__all__ = ["PATIENCE", "IssueSlot", "SlotUser"]

PATIENCE = 16
"""Refusals of one operation, after which its leader holds on and waits."""


class SlotUser(ABC):
    """One end of a link as the slot sees it; every call returns at once."""

    @abstractmethod
    def ask(self, *, insists: bool) -> None:
        """Ask the other rank's slot, which calls its `IssueSlot.asked`."""

    @abstractmethod
    def answer(self, *, granted: bool) -> None:
        """Answer the other rank, which calls its `IssueSlot.answered`."""

    @abstractmethod
    def run(self) -> None:
        """Both slots are held: run the link's oldest operation, then call `IssueSlot.done`."""


class IssueSlot:
    """One process's slot. Pure: it calls what it is given; not safe from two threads at once.

    Attributes:
        holder: the link whose operation has it, or asks for the other rank's; None: it is free.
    """

    def __init__(self) -> None:
        self.holder: SlotUser | None = None
        self._led: deque[SlotUser] = deque()
        self._matched: Counter[SlotUser] = Counter()
        self._refusals: Counter[SlotUser] = Counter()
        self._waiting: deque[SlotUser] = deque()
        self._asking: SlotUser | None = None
        self._stopped = False

    def offer(self, link: SlotUser) -> None:
        """One more operation is matched of a link that this rank leads."""
        self._matched[link] += 1
        if link not in self._led and link is not self.holder:
            self._led.append(link)
        self._next()

    def asked(self, link: SlotUser, *, insists: bool) -> None:
        """The other rank, which leads the link, holds its slot and wants this one."""
        if self._stopped:
            return
        if self.holder is None:
            self._grant(link)
        elif insists:
            self._waiting.append(link)
        else:
            link.answer(granted=False)

    def answered(self, link: SlotUser, *, granted: bool) -> None:
        """The other rank's answer to what was asked."""
        if link is not self._asking:
            return  # it has been forgotten meanwhile
        self._asking = None
        if granted:
            self._matched[link] -= 1
            self._refusals[link] = 0
            link.run()
        else:
            self._refusals[link] += 1
            self.done(link)

    def done(self, link: SlotUser) -> None:
        """The link lets go of the slot."""
        self.holder = None
        if self._matched[link]:
            self._led.append(link)
        self._next()

    def forget(self, link: SlotUser) -> None:
        """Nothing more goes by this link: what it waits for is not granted."""
        self._matched[link] = 0
        self._led = deque(other for other in self._led if other is not link)
        self._waiting = deque(other for other in self._waiting if other is not link)
        if self._asking is link:
            self._asking = None
            self.done(link)

    def stop(self) -> None:
        """Grant and ask nothing any more."""
        self._stopped = True

    def _next(self) -> None:
        if self.holder is not None or self._stopped:
            return
        if self._waiting:
            self._grant(self._waiting.popleft())
        elif self._led:
            self.holder = self._asking = link = self._led.popleft()
            link.ask(insists=self._refusals[link] >= PATIENCE)

    def _grant(self, link: SlotUser) -> None:
        self.holder = link
        link.answer(granted=True)
        link.run()
