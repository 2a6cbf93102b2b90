"""The conformance tests of installed transports, for ``pytest --pyargs stagelink.testing``.

The plugin `pytest_stagelink` says which, from the command line.
"""

from __future__ import annotations

import pytest

from pytest_stagelink import chosen_transports
from stagelink.testing.conformance import TransportConformance
from stagelink.testing.subject import Subject


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test once for each transport that is named."""
    names = list(chosen_transports(metafunc.config)) or ["none"]
    metafunc.parametrize("declared", names, indirect=True, scope="class")


class TestTransport(TransportConformance):
    """The tests, of transports that the command line names."""

    @pytest.fixture(scope="class")
    @classmethod
    def declared(cls, request: pytest.FixtureRequest) -> Subject:
        """An installed transport with its options."""
        chosen = chosen_transports(request.config)
        if request.param not in chosen:
            pytest.skip("no transport is named by --stagelink-transport, of pytest_stagelink")
        options = chosen[request.param]
        return Subject(request.param, (), options)
