"""How a rank shows that it belongs to the job, before anything else that it says is looked at."""

from __future__ import annotations

import hmac

from stagelink.errors import ProtocolError

__all__ = ["PROOF_BYTES", "Proof"]

PROOF_BYTES = 32
"""What comes first in the note of every HELLO."""


class Proof:
    """A job's secret: what this rank shows, and what it wants to be shown.

    Args:
        token: the secret, from the store; `PROOF_BYTES` ASCII characters.

    Attributes:
        shown: what HELLO begins with.
    """

    def __init__(self, token: str) -> None:
        self.shown = token.encode("ascii").ljust(PROOF_BYTES)[:PROOF_BYTES]

    def check(self, shown: bytes) -> None:
        """Look at what another rank shows, in a time that does not tell how much of it is right.

        Raises:
            ProtocolError: it is not this job's.
        """
        if not hmac.compare_digest(shown, self.shown):
            raise ProtocolError("HELLO without this job's token")
