"""Keys of a store under a prefix: read, written and waited for, each call in bounded time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import PrefixStore, Store

from stagelink.control.store import StoreClient
from stagelink.deadline import Deadline

__all__ = ["Keys"]

_LEAST_S = 0.5
"""For a call whose deadline is about to pass: a store that answers does so at once, and what is
looked at last, and an error's text, are to be had."""


class Keys:
    """The keys of one prefix. Every method but `submit` blocks until the store has answered.

    All raise `ConnectError` where it does not by the deadline, or has been given up.

    Args:
        client: of the store.
        prefix: of every key.
    """

    def __init__(self, client: StoreClient, prefix: str) -> None:
        self.client = client
        self.prefix = prefix

    def ask(self, work: Callable[[PrefixStore], Any], deadline: Deadline) -> Any:
        """Call ``work`` with a store that has only these keys, on the client's thread."""
        patience = deadline if deadline.remaining_s > _LEAST_S else Deadline(_LEAST_S)
        return self.client.call(lambda store: work(self._under(store)), patience)

    def submit(self, work: Callable[[PrefixStore], None]) -> threading.Event | None:
        """Ask without waiting; see `StoreClient.submit`."""
        return self.client.submit(lambda store: work(self._under(store)))

    def _under(self, store: Store) -> PrefixStore:
        return PrefixStore(self.prefix, store)

    def get(self, key: str, deadline: Deadline) -> str | None:
        """The value of a key; None where it has none."""

        def get(keys: PrefixStore) -> str | None:
            return keys.get(key).decode() if keys.check([key]) else None

        found: str | None = self.ask(get, deadline)
        return found

    def set(self, key: str, value: str, deadline: Deadline) -> None:
        """Give a key a value."""
        self.ask(lambda keys: keys.set(key, value), deadline)

    def swap(self, key: str, before: str, value: str, deadline: Deadline) -> str:
        """Give a key a value if it has the one that is expected, or none; what it has then."""
        held: bytes = self.ask(lambda keys: keys.compare_set(key, before, value), deadline)
        return held.decode()

    def absent(self, names: Sequence[str], deadline: Deadline) -> list[int]:
        """The places in a list of keys of those that have no value."""

        def look(keys: PrefixStore) -> list[int]:
            if keys.check(list(names)):  # one call, and most often all
                return []
            return [place for place, key in enumerate(names) if not keys.check([key])]

        found: list[int] = self.ask(look, deadline)
        return found

    def get_some(self, names: Sequence[str], deadline: Deadline) -> dict[int, str]:
        """The values of those keys that have one, by their places in the list."""

        def look(keys: PrefixStore) -> dict[int, str]:
            return {
                place: keys.get(key).decode()
                for place, key in enumerate(names)
                if keys.check([key])
            }

        found: dict[int, str] = self.ask(look, deadline)
        return found
