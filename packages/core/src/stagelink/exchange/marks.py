"""A set of numbers that fills up from below, in little memory however many it holds."""

from __future__ import annotations

__all__ = ["Marks"]


class Marks:
    """Numbers from 0; those below the lowest that is missing are not kept one by one."""

    def __init__(self) -> None:
        self._below = 0
        self._others: set[int] = set()

    def add(self, number: int) -> None:
        """Take a number in; it may be here already."""
        if number != self._below:
            if number > self._below:
                self._others.add(number)
            return
        self._below += 1
        while self._below in self._others:
            self._others.remove(self._below)
            self._below += 1

    def __contains__(self, number: int) -> bool:
        return number < self._below or number in self._others
