"""Whether there is a UCX here."""

from __future__ import annotations

import pytest

from stagelink_ucx import Ucx, UcxOptions

_VERDICT = Ucx.probe(UcxOptions())

needs_ucx = pytest.mark.skipif(not _VERDICT, reason=_VERDICT.reason or "there is one")
