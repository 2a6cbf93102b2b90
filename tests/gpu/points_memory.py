"""Memory of another process: handles, opening twice, and freeing what is open elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.testing import run_fresh
from tests.gpu.answers import Answer, Findings
from tests.gpu.raw import SIZE, End, end_of

if TYPE_CHECKING:
    from torch.distributed import Store

    from tests.gpu.machines import Machine

__all__ = ["free_first", "memory"]

Seen = dict[str, str]

_REFUSED = "cudaErrorDeviceUninitialized"
_EXPORTER = {
    "open one's own memory": _REFUSED,
    "open one's own event": _REFUSED,
    "handle of a pointer into the middle": "the same as of its base",
    "what the importer wrote": "all 8",
    "free what was closed": "works",
}
_IMPORTER = {
    "what the exporter wrote": "all 7",
    "open it again": "the same address",
    "open by the middle's handle": "the same address",
    "after two closes of three": "all 7",
    "the last close": "works",
}


def memory(machine: Machine) -> Answer:
    """Memory that both processes see, from the hello to the end."""
    findings = Findings()
    with run_fresh(_memory, 2, machine) as ranks:
        exporter, importer = ranks.results(machine.patience_s)
    findings.see_all(importer, _IMPORTER)
    findings.see_all(exporter, _EXPORTER)
    return findings.answer()


def _memory(rank: int, world_size: int, store: Store, machine: Machine) -> Seen:
    with end_of(machine, rank, store) as end:
        return (_export, _import)[rank](end)


def _export(end: End) -> Seen:
    rt, memory, event = end.rt, end.new_memory(7), end.new_event()
    handle, event_handle = rt.ipcGetMemHandle(memory), rt.ipcGetEventHandle(event)
    middle: list[bytes] = []
    told = end.attempt(lambda: middle.append(rt.ipcGetMemHandle(memory + SIZE // 2)))
    if middle:
        told = "the same as of its base" if middle[0] == handle else "another"
    end.other.send((handle, middle[0] if middle else handle))
    end.other.recv()
    wrote = end.look(memory)
    end.other.send("seen")
    end.other.recv()
    return {
        "handle of a pointer into the middle": told,
        "what the importer wrote": wrote,
        "free what was closed": end.attempt(lambda: rt.free(memory)),
        "open one's own event": end.attempt(lambda: rt.ipcOpenEventHandle(event_handle)),
        "open one's own memory": _opens_own(end),
    }


def _opens_own(end: End) -> str:
    handle = end.rt.ipcGetMemHandle(end.new_memory(1))
    return end.attempt(lambda: end.rt.ipcOpenMemHandle(handle))


def _import(end: End) -> Seen:
    rt = end.rt
    handle, of_middle = end.other.recv()
    memory = rt.ipcOpenMemHandle(handle)
    seen = {"what the exporter wrote": end.look(memory)}
    opened = [memory]
    seen["open it again"] = _opened_again(end, handle, opened)
    seen["open by the middle's handle"] = _opened_again(end, of_middle, opened)
    while len(opened) > 1:
        rt.ipcCloseMemHandle(opened.pop())
    seen["after two closes of three"] = end.look(memory)
    end.fill(memory, 8)
    end.other.send("written")
    end.other.recv()
    seen["the last close"] = end.attempt(lambda: rt.ipcCloseMemHandle(memory))
    end.other.send("closed")
    return seen


def _opened_again(end: End, handle: bytes, opened: list[int]) -> str:
    told = end.attempt(lambda: opened.append(end.rt.ipcOpenMemHandle(handle)))
    if told == "works":
        return "the same address" if opened[-1] == opened[0] else "another address"
    return told


# -- freed too early -----------------------------------------------------------------------------


def free_first(machine: Machine) -> Answer:
    """The exporter frees what the importer has open: CUDA leaves undefined what comes of it."""
    findings = Findings()
    with run_fresh(_free_first, 2, machine) as ranks:
        exporter, importer = ranks.results(machine.patience_s)
    for name, seen in (("exporter", exporter), ("importer", importer)):
        findings.need(f"the {name}'s GPU afterwards", seen.pop("afterwards"), "works")
        for what, value in seen.items():
            findings.tell(what, value)
    return findings.answer()


def _free_first(rank: int, world_size: int, store: Store, machine: Machine) -> Seen:
    with end_of(machine, rank, store) as end:
        return (_free_early, _read_late)[rank](end)


def _free_early(end: End) -> Seen:
    memory = end.new_memory(7)
    end.other.send(end.rt.ipcGetMemHandle(memory))
    end.other.recv()
    seen = {"free while it is open elsewhere": end.attempt_in_thread(lambda: end.rt.free(memory))}
    seen["memory that is allocated next"] = (
        "is at the same address" if end.new_memory(5) == memory else "is elsewhere"
    )
    end.other.send("freed")
    end.other.recv()
    seen["afterwards"] = end.usable()
    return seen


def _read_late(end: End) -> Seen:
    memory = end.rt.ipcOpenMemHandle(end.other.recv())
    before = end.read(memory)
    end.other.send("open")
    end.other.recv()
    seen = {"what is read before and after": f"{before}, {end.read(memory)}"}
    seen["afterwards"] = end.usable()
    seen["close of what was freed"] = end.attempt_in_thread(
        lambda: end.rt.ipcCloseMemHandle(memory)
    )
    end.other.send("closed")
    return seen
