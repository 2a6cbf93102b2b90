"""A `Done` of tests, in place of core's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Completion"]

SOON_S = 20.0


class Completion:
    """What a transport says of one message. Once, or the test fails.

    Attributes:
        payload: what came with it.
        error: why it failed.
    """

    def __init__(self) -> None:
        self.payload: torch.Tensor | None = None
        self.error: BaseException | None = None
        self._over = threading.Event()

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        """The message is done."""
        assert not self._over.is_set(), "done twice"
        self.payload = payload
        self._over.set()

    def failed(self, error: BaseException) -> None:
        """The message has failed."""
        assert not self._over.is_set(), "done twice"
        self.error = error
        self._over.set()

    @property
    def over(self) -> bool:
        """Whether anything was said."""
        return self._over.is_set()

    def wait(self, seconds: float = SOON_S) -> torch.Tensor | None:
        """Wait until the message is done; what came with it.

        Raises:
            TimeoutError: nothing was said.
            BaseException: it has failed with this.
        """
        if not self._over.wait(seconds):
            raise TimeoutError(f"not done within {seconds:g} s")
        if self.error is not None:
            raise self.error
        return self.payload
