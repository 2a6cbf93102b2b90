"""Events of another process: what a wait is for when it is called before, between and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.testing import run_fresh
from tests.gpu.answers import Answer, Findings
from tests.gpu.raw import SIZE, End, end_of

if TYPE_CHECKING:
    from torch.distributed import Store

    from tests.gpu.machines import Machine

__all__ = ["events"]

Seen = dict[str, str]

_ON_DOUBLE = {
    "an event that was never recorded": "done",
    "a wait for it": "done",
    "a wait, then a record that is held up": "done, the event not ready",
    "a record that is held up": "not ready",
    "a wait after it": "not ready",
    "the same once it goes on": "done",
    "what was written before the record": "all 9",
    "a wait between two records, when the first is done": "done, the event not ready",
}


def events(machine: Machine) -> Answer:
    """The rules that a slot's events need."""
    findings = Findings()
    with run_fresh(_events, 2, machine) as ranks:
        _, seen = ranks.results(machine.patience_s)
    findings.see_all(seen, _ON_DOUBLE)
    return findings.answer()


def _events(rank: int, world_size: int, store: Store, machine: Machine) -> Seen:
    with end_of(machine, rank, store) as end:
        return (_record, _wait)[rank](end)


def _record(end: End) -> Seen:
    rt, machine, other = end.rt, end.machine, end.other
    memory, late = end.new_memory(7), end.new_stream()
    early, event = end.new_event(), end.new_event()
    handles = [rt.ipcGetEventHandle(early), rt.ipcGetEventHandle(event)]
    other.send([rt.ipcGetMemHandle(memory), *handles])

    other.recv()  # the wait has been called
    machine.hold(rt, end.stream, machine.hold_s)
    rt.eventRecord(early, end.stream)
    other.send("recorded")
    other.recv()
    machine.release(rt, end.stream)
    rt.streamSynchronize(end.stream)

    machine.hold(rt, end.stream, machine.hold_s)
    rt.memsetAsync(memory, 9, SIZE, end.stream)
    rt.eventRecord(event, end.stream)
    other.send("recorded")
    other.recv()
    machine.release(rt, end.stream)
    other.recv()

    machine.hold(rt, end.stream, machine.hold_s)
    rt.eventRecord(event, end.stream)
    other.send("recorded")
    other.recv()  # the wait has been called
    machine.hold(rt, late, 3 * machine.hold_s)
    rt.eventRecord(event, late)
    machine.release(rt, end.stream)
    other.send("recorded again")
    other.recv()
    machine.release(rt, late)
    rt.streamSynchronize(late)
    other.send("over")
    other.recv()
    return {}


def _wait(end: End) -> Seen:
    rt, other, stream = end.rt, end.other, end.stream
    handle, of_early, of_event = other.recv()
    memory = rt.ipcOpenMemHandle(handle)
    early, event = rt.ipcOpenEventHandle(of_early), rt.ipcOpenEventHandle(of_event)
    long_s = 2 * end.machine.hold_s + end.machine.settle_s

    seen = {"an event that was never recorded": end.event_state(event)}
    rt.streamWaitEvent(stream, event)
    seen["a wait for it"] = end.settled(lambda: end.stream_state(stream))

    rt.streamWaitEvent(stream, early)
    other.send("waiting")
    other.recv()
    seen["a wait, then a record that is held up"] = (
        f"{end.settled(lambda: end.stream_state(stream), end.machine.hold_s / 2)}, "
        f"the event {end.event_state(early)}"
    )
    other.send("seen")

    other.recv()
    seen["a record that is held up"] = end.event_state(event)
    rt.streamWaitEvent(stream, event)
    end.copy(end.scratch, memory, stream)
    seen["a wait after it"] = end.stream_state(stream)
    other.send("waiting")
    seen["the same once it goes on"] = end.settled(lambda: end.stream_state(stream), long_s)
    seen["what was written before the record"] = end.look(end.scratch)
    other.send("seen")

    other.recv()
    rt.streamWaitEvent(stream, event)
    other.send("waiting")
    other.recv()
    seen["a wait between two records, when the first is done"] = (
        f"{end.settled(lambda: end.stream_state(stream), long_s)}, "
        f"the event {end.event_state(event)}"
    )
    other.send("seen")
    other.recv()
    rt.ipcCloseMemHandle(memory)
    other.send("closed")
    return seen
