"""The hooks of one handler's plugins: one typed call per hook, and the only ones of pluggy's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagelink.errors import PluginError
from stagelink.plugins.problems import new_manager, raised
from stagelink.text import quoted
from stagelink.transport.contract import Link
from stagelink.transport.events import Event, LinkCounters
from stagelink.transport.header import NO_TRACE, TRACE_BYTES, Header
from stagelink.transport.interrupts import stops_caller


class Relay:
    """The hooks of one handler's plugins; `PluginError` says who raised, or answered wrongly."""

    def __init__(self) -> None:
        self._manager = new_manager()

    def add(self, plugin: object, name: str) -> None:
        """Let a plugin without `plugin_problems` take part from now on; added again, it stays."""
        if not self._manager.is_registered(plugin):
            self._manager.register(plugin, name)

    @property
    def wants_events(self) -> bool:
        """Whether anybody implements `stagelink_event`; if nobody does, make no event."""
        return bool(self._manager.hook.stagelink_event.get_hookimpls())

    @property
    def gives_traces(self) -> bool:
        """Whether anybody implements `stagelink_trace`; if nobody does, ask for no trace."""
        return bool(self._manager.hook.stagelink_trace.get_hookimpls())

    def select_transport(self, link: Link, candidates: Sequence[str]) -> str | None:
        """Ask the plugins to choose among the candidates; None where none has an opinion."""
        hook = "stagelink_select_transport"
        answer: str | None = self._call(hook, link=link, candidates=candidates)
        if answer is None or answer in candidates:
            return answer
        raise PluginError(
            f"{hook} of {self._implementers(hook)} answered {answer!r} for "
            f"{link.source}→{link.target}; the candidates are {quoted(candidates)}"
        )

    def link_opened(self, link: Link) -> None:
        """Tell the observers."""
        self._call("stagelink_link_opened", link=link)

    def link_closed(self, link: Link, counters: LinkCounters) -> None:
        """Tell the observers."""
        self._call("stagelink_link_closed", link=link, counters=counters)

    def event(self, event: Event) -> None:
        """Tell the observers."""
        self._call("stagelink_event", event=event)

    def trace(self, link: Link, edge: str, header: Header) -> bytes:
        """Ask for the trace context of a message; `NO_TRACE` where none is given."""
        hook = "stagelink_trace"
        answer: object = self._call(
            hook,
            link=link,
            edge=edge,
            direction=header.direction,
            microbatch=header.microbatch,
            session=header.session,
        )
        if answer is None:
            return NO_TRACE
        if isinstance(answer, bytes) and len(answer) == TRACE_BYTES:
            return answer
        raise PluginError(
            f"{hook} of {self._implementers(hook)} answered {answer!r}; a trace context is "
            f"{TRACE_BYTES} bytes"
        )

    def _call(self, hook: str, **arguments: object) -> Any:
        try:
            return getattr(self._manager.hook, hook)(**arguments)
        except Exception as error:
            if stops_caller(error):
                raise
            who = f"{hook} of {self._implementers(hook)}"
            raise PluginError(raised(who, error)) from error

    def _implementers(self, hook: str) -> str:
        implementations = getattr(self._manager.hook, hook).get_hookimpls()
        return " or ".join(sorted(repr(one.plugin_name) for one in implementations))
