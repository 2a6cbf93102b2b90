"""The tests that every transport must pass, as one class to inherit from.

A transport's own test is ten lines::

    from stagelink.testing.conformance import TransportConformance

    class TestMine(TransportConformance):
        transport = MyTransport      # the class, or the name of an installed one
        options = {"interface": "lo"}

An installed one needs no line at all::

    pytest --pyargs stagelink.testing --stagelink-transport mine

Ranks are threads of the test's process where the transport says ``same_process``, else processes.
Every message goes by the transport: nothing is inline. In every test the transport is held against
the contract, see `stagelink.testing.contract_check`. What a transport cannot do by its
capabilities, or not on this machine, is skipped with the reason.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar, TypeVarTuple

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the conformance tests need pytest: pip install 'stagelink[testing]'", name="pytest"
    ) from error

import torch

from stagelink.plugins.offers import parse_options
from stagelink.plugins.plugins import Plugins
from stagelink.plugins.problems import transport_problems
from stagelink.ranks.processes import RankPool, run_fresh
from stagelink.ranks.threads import run_threads
from stagelink.testing import closing, drivers, held_back, interruptions
from stagelink.testing.contract_check import PATIENCE_S
from stagelink.testing.half_way import NOTHING_TO_WAIT_FOR
from stagelink.testing.leaks import LeakCheck
from stagelink.testing.programs import Pass
from stagelink.testing.subject import Subject
from stagelink.transport.contract import Endpoint, Link, Transport, Verdict

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_TOLD_S = 10.0
_SIZES_BYTES = (1, 0, 3, 4095, 65_537, 64, 1_048_579, 8, 20_000_003, 2)
_MESSAGES = 30
_PROGRAMS = 5


class TransportConformance:
    """Values, order, sizes, ownership, faults and close of one transport.

    Class attributes:
        transport: the class, or the name of an installed transport.
        options: its options, as in ``[transports.NAME]``.
        patience_s: seconds after which what a sound transport does in milliseconds counts as
            blocked: to be raised for a machine with much else to do.
    """

    transport: ClassVar[type[Transport] | str]
    options: ClassVar[Mapping[str, Any]] = {}
    patience_s: ClassVar[float] = PATIENCE_S

    # -- what a subclass gets

    @pytest.fixture(scope="class")
    @classmethod
    def rank_pool(cls) -> Iterator[RankPool]:
        """Rank processes that stay warm for the class's tests."""
        with RankPool() as pool:
            yield pool

    @pytest.fixture(scope="class")
    @classmethod
    def declared(cls) -> Subject:
        """The transport as the class declares it, whether or not it can be used here."""
        cls_or_name = cls.transport
        name = cls_or_name if isinstance(cls_or_name, str) else cls_or_name.name
        classes = () if isinstance(cls_or_name, str) else (cls_or_name,)
        return Subject(name, classes, cls.options, patience_s=cls.patience_s)

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, declared: Subject) -> Subject:
        """The transport, ready for use; skips what needs it where this machine cannot use it."""
        return ready(declared)

    @pytest.fixture
    def run(self, subject: Subject, rank_pool: RankPool) -> Callable[..., Any]:
        """Run a driver on ranks, two if nothing else is said; gives what each returned."""
        return runner(subject, rank_pool)

    # -- what it declares

    def test_declares_what_the_contract_asks_for(self, declared: Subject) -> None:
        """Name, version and methods are such that core takes the class."""
        (cls,) = declared.classes or (Plugins().load(declared.name),)
        assert transport_problems(cls) == []

    def test_probe_says_yes_or_gives_a_reason(self, declared: Subject) -> None:
        """A probe neither raises nor leaves the reason out."""
        cls = declared.transport()
        verdict = cls.probe(parse_options(cls, dict(declared.options)))
        assert isinstance(verdict, Verdict)
        assert verdict.ok or verdict.reason

    def test_can_connect_is_symmetric(self, subject: Subject) -> None:
        """Both ends judge a link alike."""
        cls = subject.transport()
        transport = cls(parse_options(cls, dict(subject.options)))
        here = Endpoint(0, "server a", "process a", transport.describe())
        for there in (
            Endpoint(1, "server a", "process b", {}),
            Endpoint(1, "server b", "process c", {}),
        ):
            link = Link(0, 1, cls.name, min(cls.capabilities.devices))
            one = transport.can_connect(link, here, there)
            other = transport.can_connect(link, there, here)
            assert one.ok == other.ok, (
                f"can_connect judges {link} otherwise at its two ends: {one} from {here} to "
                f"{there}, {other} the other way round"
            )

    # -- values, order, sizes

    def test_values(self, run: Callable[..., Any]) -> None:
        """Every dtype, shape and layout arrives bit by bit, forward and back."""
        run(drivers.sends_values)

    @pytest.mark.parametrize("synchronous", [False, True], ids=["buffered", "synchronous"])
    def test_sizes(self, run: Callable[..., Any], synchronous: bool) -> None:
        """Messages of 0 bytes to 20 MB in flight together arrive whole."""
        run(drivers.keeps_sizes, _SIZES_BYTES, synchronous=synchronous)

    @pytest.mark.parametrize("size_bytes", [100, 300_000])
    def test_nothing_is_lost(self, run: Callable[..., Any], size_bytes: int) -> None:
        """Thirty messages are sent, and each of them arrives."""
        arrived = run(drivers.numbers_arrived, _MESSAGES, size_bytes)[1]
        lost = sorted(set(range(_MESSAGES)) - set(arrived))
        assert not lost, (
            f"lost: messages {lost} of {_MESSAGES} never arrived; what came: {arrived}"
        )

    @pytest.mark.parametrize("size_bytes", [100, 300_000])
    def test_order_is_kept(self, run: Callable[..., Any], size_bytes: int) -> None:
        """No message takes another one's place."""
        arrived = run(drivers.numbers_arrived, _MESSAGES, size_bytes)[1]
        assert arrived == sorted(arrived), f"out of order: what came was {arrived}"

    def test_receives_out_of_order(self, run: Callable[..., Any]) -> None:
        """The order of receives need not be that of sends."""
        run(drivers.receives_out_of_order)

    @pytest.mark.parametrize("synchronous", [False, True], ids=["buffered", "synchronous"])
    @pytest.mark.parametrize("size_bytes", [64, 4 * 1024 * 1024])
    def test_both_ways_at_once(
        self, run: Callable[..., Any], size_bytes: int, synchronous: bool
    ) -> None:
        """Both sides send before either receives; small sends that are buffered hide this."""
        run(drivers.sends_both_ways_at_once, size_bytes, synchronous=synchronous)

    @pytest.mark.parametrize("size_bytes", [100, 4 * 1024 * 1024])
    def test_what_had_no_room_is_sent_when_there_is(
        self, run: Callable[..., Any], size_bytes: int
    ) -> None:
        """Messages arrive whose sender hears nothing of its peer before all of them are sent."""
        run(held_back.hears_nothing_until_all_is_sent, size_bytes)

    def test_falls_silent(self, run: Callable[..., Any]) -> None:
        """Actions are not called on and on when no message is on its way."""
        run(held_back.falls_silent)

    def test_many_edges_share_a_link(self, run: Callable[..., Any]) -> None:
        """Forty edges between two ranks cost no more links than one."""
        run(drivers.opens_many_edges)

    def test_three_ranks(self, run: Callable[..., Any]) -> None:
        """Three ranks, each linked with both others, which open in a ring."""
        run(drivers.opens_in_a_triangle, ranks=3)

    def test_ranks_as_threads(self, run: Callable[..., Any], subject: Subject) -> None:
        """Ranks may be threads of one process as well."""
        capabilities = subject.capabilities
        if capabilities.distinct_processes:
            pytest.skip(f"{subject.name!r} needs its ends in two processes")
        if capabilities.same_process:
            pytest.skip(f"all other tests of {subject.name!r} run on threads")
        run(drivers.opens_on_threads, ranks=1)

    def test_does_what_loopback_does(self, run: Callable[..., Any]) -> None:
        """Random programs of sends and receives end as they do by loopback."""
        if sys.modules.get("hypothesis", ()) is None or find_spec("hypothesis") is None:
            pytest.skip("this test needs hypothesis: pip install 'stagelink[testing]'")
        import hypothesis  # noqa: PLC0415 - an extra

        from stagelink.testing.programs import follows, programs  # noqa: PLC0415 - see above

        def agree(program: Sequence[Pass]) -> None:
            expected = run_threads(follows, 2, Subject("loopback"), program)
            assert run(follows, program) == expected

        # No shrinking: a program that hangs takes as long each time.
        settings = hypothesis.settings(
            max_examples=_PROGRAMS,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[hypothesis.Phase.generate],
        )
        settings(hypothesis.given(programs())(agree))()

    # -- ownership

    @pytest.mark.parametrize("size_bytes", [100, 300_000])
    def test_what_was_received_is_never_overwritten(
        self, run: Callable[..., Any], size_bytes: int
    ) -> None:
        """The sender overwrites at once; what was received is never written again."""
        run(drivers.holds_what_it_received, size_bytes)

    @pytest.mark.parametrize("size_bytes", [100, 300_000])
    def test_every_handle_of_a_send_is_done(
        self, run: Callable[..., Any], size_bytes: int
    ) -> None:
        """A tensor sent with copy=False is the caller's again when the handle is done."""
        run(drivers.sends_without_copy, size_bytes)

    # -- faults

    def test_a_receive_keeps_its_deadline(self, run: Callable[..., Any]) -> None:
        """Neither a receive nor reading blocks when a sender goes no further."""
        _judge(run(interruptions.check_silent_sender))

    def test_a_send_keeps_its_deadline(self, run: Callable[..., Any]) -> None:
        """A send does not block when a receiver goes no further."""
        _judge(run(interruptions.check_silent_receiver))

    def test_a_peer_that_breaks_off_is_no_end_of_a_message(self, run: Callable[..., Any]) -> None:
        """A receive whose sender has gone half way is never done as if all had come."""
        _judge(run(interruptions.check_broken_off))

    def test_a_peer_that_dies_is_no_end_of_a_message(self, subject: Subject) -> None:
        """Nor is one whose sender's process has died half way."""
        if subject.capabilities.same_process:
            pytest.skip(f"ranks of {subject.name!r} are threads of one process")
        with run_fresh(interruptions.check_died, 2, subject) as ranks:
            outcome = ranks.outcomes(2 * _TOLD_S)[1]
        assert outcome.error is None, outcome.error
        _judge([outcome.value])

    def test_abort_ends_a_receive(self, run: Callable[..., Any]) -> None:
        """Every wait for a receive ends when its end is aborted."""
        _judge(run(interruptions.check_receiver_aborts))

    def test_abort_ends_a_send(self, run: Callable[..., Any]) -> None:
        """Every wait for a send ends when its end is aborted."""
        _judge(run(interruptions.check_sender_aborts))

    def test_user_error_reaches_the_peer(self, run: Callable[..., Any]) -> None:
        """An exception on one rank ends the other's wait with its text."""
        began = time.monotonic()
        told, own = run(drivers.raises_in_user_code)
        assert "the user's own mistake" in told
        assert own == "ValueError: the user's own mistake"
        assert time.monotonic() - began < _TOLD_S

    @pytest.mark.parametrize("size_bytes", [1000, 64 * 1024 * 1024])
    @pytest.mark.parametrize("victim", [0, 1])
    def test_killed_peer(self, subject: Subject, victim: int, size_bytes: int) -> None:
        """A rank that is killed ends the other's wait with its number, also in mid-payload."""
        if subject.capabilities.same_process:
            pytest.skip(f"ranks of {subject.name!r} are threads of one process")
        survivor = 1 - victim
        with run_fresh(drivers.sends_for_ever, 2, subject, size_bytes) as ranks:
            ranks.wait_for(survivor, "going")
            ranks.kill(victim)
            outcome = ranks.outcomes(_TOLD_S)[survivor]
        assert outcome.error is not None, outcome
        assert f"rank {victim} died" in outcome.error, outcome.error

    # -- close

    def test_unread_messages_at_the_end_of_a_session(self, run: Callable[..., Any]) -> None:
        """A session left with messages unread harms neither the next one nor the close."""
        run(closing.unread_at_close)

    @pytest.mark.parametrize("size_bytes", [100, 300_000])
    def test_sends_outlive_their_session(self, run: Callable[..., Any], size_bytes: int) -> None:
        """Messages that wait for credit arrive, though session and handler are left."""
        run(closing.leaves_with_sends_waiting, size_bytes)

    def test_close_takes_in_what_is_queued(self, run: Callable[..., Any]) -> None:
        """Messages beyond `in_flight` that nobody receives hold up neither end's close."""
        run(closing.closes_with_a_queue, ())

    def test_both_ends_close_at_once(self, run: Callable[..., Any]) -> None:
        """Nor do messages both ways, none of which is through when both ends begin to close."""
        run(closing.closes_with_a_queue, ("both", "late"))

    def test_close_waits_for_a_late_sender(self, run: Callable[..., Any]) -> None:
        """A close receives from a sender that has done nothing of its part when it begins."""
        run(closing.closes_with_a_queue, ("late",))

    def test_close_keeps_its_deadline(self, run: Callable[..., Any]) -> None:
        """Closing a link, and the transport, returns in time and raises nothing."""
        _judge(run(interruptions.check_close))

    def test_close_leaves_nothing(self, run: Callable[..., Any]) -> None:
        """Ten times opened, used and closed: no thread, descriptor or temporary file stays."""
        check = LeakCheck("threads")
        run(closing.closes_without_trace)
        check.verify()


def ready(declared: Subject) -> Subject:
    """Give a transport a device; skips the test where this machine cannot use it."""
    transport = declared.transport()
    verdict = transport.probe(parse_options(transport, dict(declared.options)))
    if not verdict.ok:
        pytest.skip(f"{declared.name!r} cannot be used here: {verdict.reason}")
    devices = transport.capabilities.devices
    here = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    device = next((kind for kind in here if kind in devices), None)
    if device is None:
        pytest.skip(f"{declared.name!r} carries tensors of {sorted(devices)} only: none here")
    return replace(declared, device=device)


def runner(subject: Subject, rank_pool: RankPool) -> Callable[..., Any]:
    """Make what runs a driver on ranks, on threads or processes as the transport has it."""

    def run(driver: Callable[..., _T], *args: Any, ranks: int = 2, **how: Any) -> list[_T]:
        played = replace(subject, **how)
        if subject.capabilities.same_process:
            return run_threads(driver, ranks, played, *args)
        return rank_pool.run(driver, ranks, played, *args)

    return run


def _judge(found: Sequence[str]) -> None:
    """Fail for what a check has found; skip where it had nothing to look at."""
    faults = [fault for fault in found if fault not in {"", NOTHING_TO_WAIT_FOR}]
    assert not faults, "; ".join(faults)
    if NOTHING_TO_WAIT_FOR in found:
        pytest.skip(NOTHING_TO_WAIT_FOR)
