"""PipeDream's communication handler, by its old names.

PipeDream's ``runtime.py`` runs on it unchanged: put a module ``communication`` in its path that
has the one line ``from stagelink.interop.pipedream import CommunicationHandler``.
"""

from __future__ import annotations

from stagelink.interop.pipedream.handler import CommunicationHandler

__all__ = ["CommunicationHandler"]
