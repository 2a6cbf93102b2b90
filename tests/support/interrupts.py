"""Exceptions as signal handlers raise them: one at each place where the interpreter runs one."""

from __future__ import annotations

import dis
import signal
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["Interrupted", "interrupted_everywhere", "lock_is_free", "struck"]


class Interrupted(Exception):
    """What the signal handler raises."""


class _Injector:
    """Raises at the place of a number, counted over all code of some modules that runs here.

    A handler runs when a function begins, after each call, and where a loop goes back; and a
    ``with`` that waits for its lock is interrupted before it has it.
    """

    def __init__(self, modules: frozenset[str], number: int, raised: type[BaseException]) -> None:
        self._modules = modules
        self._raised = raised
        self._left = number
        self._before: dict[FrameType, int] = {}
        self.raised_at: str | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> object:
        del argument
        if frame.f_globals.get("__name__") not in self._modules:
            return None
        if event == "call":
            frame.f_trace_opcodes = True
        elif event == "opcode":
            self._step(frame)
        elif event == "return":
            self._before.pop(frame, None)
        return self

    def _step(self, frame: FrameType) -> None:
        here = _opcode(frame, frame.f_lasti)
        before = self._before.get(frame)
        self._before[frame] = frame.f_lasti
        runs = here == "BEFORE_WITH" or (before is not None and _runs_handlers(frame, before))
        if self.raised_at is not None or not runs:
            return
        if self._left == 0:
            self.raised_at = f"{frame.f_code.co_qualname}, line {frame.f_lineno}, before {here}"
            raise self._raised(self.raised_at)
        self._left -= 1


def _runs_handlers(frame: FrameType, before: int) -> bool:
    opcode = _opcode(frame, before)
    goes_back = "BACKWARD" in opcode and frame.f_lasti < before
    return opcode.startswith("CALL") or opcode == "RESUME" or goes_back


def _opcode(frame: FrameType, at: int) -> str:
    return dis.opname[frame.f_code.co_code[at]]


def interrupted_everywhere(
    call: Callable[[], object], *modules: str, raised: type[BaseException] = Interrupted
) -> Iterator[tuple[str, BaseException | None]]:
    """Run ``call()`` again and again, interrupted at one place further each time.

    Args:
        call: what is interrupted.
        modules: names of those in whose code it is.
        raised: what is raised there; its text is the place.

    Yields:
        Each place, and what came out of the call. The last run meets none, and yields nothing.
    """
    absent = set(modules) - sys.modules.keys()
    assert not absent, f"no modules: {absent}"
    for number in range(100_000):
        injector = _Injector(frozenset(modules), number, raised)
        caught: BaseException | None = None
        before = sys.gettrace()
        sys.settrace(injector)  # type: ignore[arg-type]  # it returns itself, or None
        try:
            call()
        except BaseException as error:  # whatever it is, it is told of
            caught = error
        finally:
            sys.settrace(before)
        if injector.raised_at is None:
            assert number, f"nothing of {modules} has run"
            return
        yield injector.raised_at, caught


def struck(raised: type[Exception]) -> Callable[..., NoReturn]:
    """A function for others to call, in whose midst a signal handler raises this."""

    def handler(number: int, frame: object) -> NoReturn:
        raise raised(f"a handler's, of signal {number}")

    def call(*_: object, **__: object) -> NoReturn:
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)
        raise AssertionError("the handler has not run")

    return call


def lock_is_free(lock: threading.RLock, within_s: float = 0.0) -> bool:
    """Whether nobody holds a lock, this thread included.

    Args:
        lock: the lock.
        within_s: how long another thread that is at work may hold it meanwhile.
    """
    free: list[bool] = []

    def look() -> None:
        free.append(lock.acquire(timeout=within_s) if within_s else lock.acquire(blocking=False))
        if free[0]:
            lock.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return free[0]
