"""The least that core takes for a transport; it can open no link."""

from __future__ import annotations

from stagelink.transport.contract import Capabilities, Receiver, Sender, Transport, Verdict

__all__ = ["Minimal", "changed"]


class Minimal(Transport):
    """A transport of the fewest members."""

    name = "minimal"
    api_version = (2, 0)
    capabilities = Capabilities(devices=frozenset({"cpu"}), auto_rank=1)

    @classmethod
    def probe(cls, options: object) -> Verdict:
        return Verdict(True)

    def open_sender(self, link: object, port: object, deadline: object) -> Sender:
        raise OSError

    def open_receiver(self, link: object, port: object, deadline: object) -> Receiver:
        raise OSError


def changed(**members: object) -> type[Transport]:
    """Make the same with members of other values, its name for one."""
    return type("Changed", (Minimal,), members)
