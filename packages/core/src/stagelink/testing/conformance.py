"""The tests that every transport must pass, as one class to inherit from.

A transport's own test is ten lines::

    from stagelink.testing.conformance import TransportConformance

    class TestMine(TransportConformance):
        transport = MyTransport      # the class, or the name of an installed one
        options = {"interface": "lo"}

Ranks are threads of the test's process where the transport says ``same_process``, else processes.
Every message goes by the transport: nothing is inline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar, TypeVarTuple

import pytest

from stagelink.testing import drivers
from stagelink.testing.drivers import Subject
from stagelink.testing.pool import RankPool
from stagelink.testing.ranks import run_fresh
from stagelink.testing.threads import run_threads
from stagelink.transport.contract import Capabilities, Link, Place, Transport, Verdict
from stagelink.transport.options import parse_options
from stagelink.transport.plugins import Plugins
from stagelink.transport.validation import transport_problems

__all__ = ["TransportConformance"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_TOLD_S = 10.0
_SIZES_BYTES = (1, 0, 3, 4095, 65_537, 64, 1_048_579, 8, 20_000_003, 2)


class TransportConformance:
    """Values, order, sizes, ownership, faults and close of one transport.

    Class attributes:
        transport: the class, or the name of an installed transport.
        options: its options, as in ``[transports.NAME]``.
    """

    transport: ClassVar[type[Transport] | str]
    options: ClassVar[Mapping[str, Any]] = {}

    # -- what a subclass gets

    @pytest.fixture(scope="class")
    @classmethod
    def rank_pool(cls) -> Iterator[RankPool]:
        """Rank processes that stay warm for the class's tests."""
        with RankPool() as pool:
            yield pool

    @pytest.fixture
    def run(self, rank_pool: RankPool) -> Callable[..., Any]:
        """Run a driver on two ranks, and give back what each returned."""

        def run(driver: Callable[..., _T], *args: Any) -> list[_T]:
            if self._capabilities().same_process:
                return run_threads(driver, 2, self._subject(), *args)
            return rank_pool.run(driver, 2, self._subject(), *args)

        return run

    def _subject(self) -> Subject:
        if isinstance(self.transport, str):
            return Subject(self.transport, (), self.options)
        return Subject(self.transport.name, (self.transport,), self.options)

    def _class(self) -> type[Transport]:
        if isinstance(self.transport, str):
            return Plugins().load(self.transport)
        return self.transport

    def _capabilities(self) -> Capabilities:
        return self._class().capabilities

    # -- what it declares

    def test_declares_what_the_contract_asks_for(self) -> None:
        """Name, version and methods are such that core takes the class."""
        assert transport_problems(self._class()) == []

    def test_probe_says_yes_or_gives_a_reason(self) -> None:
        """A probe neither raises nor leaves the reason out."""
        cls = self._class()
        verdict = cls.probe(parse_options(cls, dict(self.options)))
        assert isinstance(verdict, Verdict)
        assert verdict.ok or verdict.reason

    def test_can_connect_is_symmetric(self) -> None:
        """Both ends judge a link alike."""
        cls = self._class()
        transport = cls(parse_options(cls, dict(self.options)))
        here = Place(0, "server a", "process a", transport.describe())
        for there in (
            Place(1, "server a", "process b", {}),
            Place(1, "server b", "process c", {}),
        ):
            link = Link(0, 1, cls.name, min(cls.capabilities.devices))
            one = transport.can_connect(link, here, there)
            assert one.ok == transport.can_connect(link, there, here).ok

    # -- values, order, sizes

    def test_values(self, run: Callable[..., Any]) -> None:
        """Every dtype, shape and layout arrives bit by bit, forward and back."""
        run(drivers.sends_values)

    def test_sizes_and_order(self, run: Callable[..., Any]) -> None:
        """Messages of 0 bytes to 20 MB under way together are told apart."""
        run(drivers.keeps_order, _SIZES_BYTES)

    def test_receives_out_of_order(self, run: Callable[..., Any]) -> None:
        """The order of receives need not be that of sends."""
        run(drivers.receives_out_of_order)

    @pytest.mark.parametrize("size_bytes", [64, 4 * 1024 * 1024])
    def test_both_ways_at_once(self, run: Callable[..., Any], size_bytes: int) -> None:
        """Both sides send before either receives; small sends that are buffered hide this."""
        run(drivers.sends_both_ways_at_once, size_bytes)

    def test_many_edges_share_a_link(self, run: Callable[..., Any]) -> None:
        """Forty edges between two ranks cost no more links than one."""
        run(drivers.opens_many_edges)

    # -- ownership

    @pytest.mark.parametrize("size_bytes", [100, 300_000])
    def test_ownership(self, run: Callable[..., Any], size_bytes: int) -> None:
        """The sender overwrites at once; what was received is never written again."""
        run(drivers.holds_what_it_received, size_bytes)

    @pytest.mark.parametrize("size_bytes", [100, 300_000])
    def test_send_without_copy(self, run: Callable[..., Any], size_bytes: int) -> None:
        """With copy=False the tensor is the caller's again when the handle is done."""
        run(drivers.sends_without_copy, size_bytes)

    # -- faults and close

    def test_user_error_reaches_the_peer(self, run: Callable[..., Any]) -> None:
        """An exception on one rank ends the other's wait with its text."""
        began = time.monotonic()
        told, own = run(drivers.raises_in_user_code)
        assert "the user's own mistake" in told
        assert own == "ValueError: the user's own mistake"
        assert time.monotonic() - began < _TOLD_S

    @pytest.mark.parametrize("size_bytes", [1000, 64 * 1024 * 1024])
    @pytest.mark.parametrize("victim", [0, 1])
    def test_killed_peer(self, victim: int, size_bytes: int) -> None:
        """A rank that is killed ends the other's wait with its number, also in mid-payload."""
        if self._capabilities().same_process:
            pytest.skip("ranks of this transport are threads of one process")
        survivor = 1 - victim
        with run_fresh(drivers.sends_for_ever, 2, self._subject(), size_bytes) as ranks:
            ranks.wait_for(survivor, "going")
            ranks.kill(victim)
            outcome = ranks.outcomes(_TOLD_S)[survivor]
        assert outcome.error is not None, outcome
        assert f"rank {victim} died" in outcome.error

    def test_unread_messages_at_the_end_of_a_session(self, run: Callable[..., Any]) -> None:
        """A session left with messages unread harms neither the next one nor the close."""
        run(drivers.unread_at_close)

    def test_close_leaves_nothing(self, run: Callable[..., Any]) -> None:
        """Ten times opened, used and closed: threads and descriptors are as before."""
        run(drivers.closes_without_trace)
