"""What is left of CUDA in a process whose peer was killed, with work of its under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from stagelink.testing import RankFailedError, RankProcesses, report, run_fresh
from tests.gpu.answers import Answer, Findings
from tests.gpu.raw import SIZE, End, end_of

if TYPE_CHECKING:
    from torch.distributed import Store

    from tests.gpu.machines import Machine

__all__ = ["dead_exporter", "dead_importer"]

Seen = dict[str, str]
Program = Callable[[End, str], None]

_STEPS = (
    *("the event", "the stream", "other streams", "its memory", "afterwards"),
    *("synchronize the stream", "give the memory back"),
)
_NEEDED = ("other streams", "afterwards")
_SETTLED = ("done", "done", "works", "all 9", "works", "works", "works")
_STUCK = ("not ready", "not ready", "works", "all 7", "works", "hangs", "hangs")
_READING = ("not recorded", "done", "works", "all 7", "works", "works", "works")
_ROUNDS_AFTER = 20


def dead_exporter(machine: Machine) -> Answer:
    """Killed with a ready event still to come; and while its memory is read."""
    return _answer(machine, 0, {"pending": _STUCK, "reading": _READING})


def dead_importer(machine: Machine) -> Answer:
    """Killed when it has recorded that a slot is free: its own event, or the exporter's."""
    on_double = {"done": _SETTLED, "pending": _STUCK, "pending, lent": _STUCK}
    return _answer(machine, 1, on_double)


def _answer(machine: Machine, victim: int, on_double: Mapping[str, tuple[str, ...]]) -> Answer:
    findings = Findings()
    with ExitStack() as stack:
        pairs = {
            how: stack.enter_context(run_fresh(_live, 2, machine, victim, how))
            for how in on_double
        }
        for ranks in pairs.values():
            ranks.wait_for(1 - victim, "waiting", machine.patience_s)
            ranks.kill(victim)
        for how, ranks in pairs.items():
            seen = _followed(ranks, 1 - victim, machine)
            for step, expected in zip(_STEPS, on_double[how], strict=True):
                judge = findings.need if step in _NEEDED else findings.see
                judge(f"{how}: {step}", seen.get(step, "not tried"), expected)
    return findings.answer()


def _followed(ranks: RankProcesses[None], survivor: int, machine: Machine) -> Seen:
    """What the survivor says, up to where it hangs or ends."""
    seen: Seen = {}
    for step in _STEPS:
        try:
            seen[step] = ranks.wait_for(survivor, step, 3 * machine.settle_s + 2.0)
        except TimeoutError:
            seen[step] = "hangs, and the interpreter with it"
            break
        except RankFailedError as error:
            lines = str(error.outcomes[0]).strip().splitlines()
            seen[step] = f"{lines[0]}: {lines[-1]}"
            break
    return seen


def _live(
    rank: int, world_size: int, store: Store, machine: Machine, victim: int, how: str
) -> None:
    programs: dict[tuple[int, int], Program] = {
        (0, 0): _export_and_die,
        (0, 1): _outlive_exporter,
        (1, 0): _outlive_importer,
        (1, 1): _import_and_die,
    }
    with end_of(machine, rank, store) as end:
        programs[victim, rank](end, how)


def _wait_to_be_killed() -> None:
    threading.Event().wait()


def _observe(end: End, event: int | None, memory: int, give_back: Callable[[], None]) -> None:
    """Step by step, each of which may be the last."""
    steps: tuple[Callable[[], str], ...] = (
        lambda: "not recorded" if event is None else end.settled(lambda: end.event_state(event)),
        lambda: end.settled(lambda: end.stream_state(end.stream)),
        end.usable,
        lambda: end.read(memory),
        end.usable,
        lambda: end.attempt_in_thread(lambda: end.rt.streamSynchronize(end.stream)),
        lambda: end.attempt_in_thread(give_back),
    )
    for name, step in zip(_STEPS, steps, strict=True):
        report(name, step())


# -- the exporter is killed ----------------------------------------------------------------------


def _export_and_die(end: End, how: str) -> None:
    rt, machine = end.rt, end.machine
    memory, event = end.new_memory(7), end.new_event()
    end.other.send((rt.ipcGetMemHandle(memory), rt.ipcGetEventHandle(event)))
    end.other.recv()
    if how == "pending":
        machine.hold(rt, end.stream, machine.long_s)
        rt.memsetAsync(memory, 9, SIZE, end.stream)
        rt.eventRecord(event, end.stream)
    end.other.send("recorded")
    _wait_to_be_killed()


def _outlive_exporter(end: End, how: str) -> None:
    rt = end.rt
    handle, of_event = end.other.recv()
    memory, event = rt.ipcOpenMemHandle(handle), rt.ipcOpenEventHandle(of_event)
    target = end.new_memory(0)
    end.other.send("open")
    end.other.recv()
    if how == "pending":
        rt.streamWaitEvent(end.stream, event)
        end.copy(target, memory, end.stream)
        report("waiting")
        end.wait_for_death()
    else:
        report("waiting")
        _read_until_death(end, target, memory)
    pending = event if how == "pending" else None
    _observe(end, pending, memory, lambda: rt.ipcCloseMemHandle(memory))


def _read_until_death(end: End, target: int, memory: int) -> None:
    """Copies without a pause: some are under way when the memory's owner is killed."""
    left = _ROUNDS_AFTER
    while left:
        if end.other.poll():
            left -= 1
        for _ in range(8):
            end.copy(target, memory, end.stream)
        if end.settled(lambda: end.stream_state(end.stream)) != "done":
            return


# -- the importer is killed ----------------------------------------------------------------------


def _import_and_die(end: End, how: str) -> None:
    rt, machine = end.rt, end.machine
    handle, of_lent = end.other.recv()
    memory, lent = rt.ipcOpenMemHandle(handle), rt.ipcOpenEventHandle(of_lent)
    own, target = end.new_event(), end.new_memory(0)
    end.other.send(rt.ipcGetEventHandle(own))
    end.other.recv()
    if how != "done":
        machine.hold(rt, end.stream, machine.long_s)
    end.copy(target, memory, end.stream)
    rt.eventRecord(lent if how == "pending, lent" else own, end.stream)
    if how == "done":
        rt.streamSynchronize(end.stream)
    end.other.send("recorded")
    _wait_to_be_killed()


def _outlive_importer(end: End, how: str) -> None:
    rt = end.rt
    memory, lent = end.new_memory(7), end.new_event()
    end.other.send((rt.ipcGetMemHandle(memory), rt.ipcGetEventHandle(lent)))
    theirs = rt.ipcOpenEventHandle(end.other.recv())
    event = lent if how == "pending, lent" else theirs
    end.other.send("open")
    end.other.recv()
    if how == "done":
        report("waiting")
        end.wait_for_death()
    rt.streamWaitEvent(end.stream, event)
    rt.memsetAsync(memory, 9, SIZE, end.stream)
    if how != "done":
        report("waiting")
        end.wait_for_death()
    _observe(end, event, memory, lambda: rt.free(memory))
