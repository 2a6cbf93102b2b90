"""Every place where a plugin can take part: the hook specifications, as documented functions.

A plugin is a module, or in code also an object, with functions of these names that are marked
`hookimpl`. A function may leave out arguments that it does not need; it may not add any. A hook
that is misspelt, unmarked or marked for another project is refused when the plugin is loaded.

A plugin is loaded when something asks for it: a transport's module when a plan names the transport
(or a rule says ``auto``), an observer when the plan lists it or `connect` is given it. Every hook
of a loaded plugin takes part, whichever group of entry points it came through. Where several
plugins implement one hook, the last one loaded is called first.
"""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from stagelink.transport.contract import Link, Transport
from stagelink.transport.events import Event, LinkCounters
from stagelink.transport.header import Direction

PROJECT = "stagelink"
"""The name under which pluggy keeps this project's marks apart from those of others."""

hookspec = pluggy.HookspecMarker(PROJECT)
"""Marks the specifications below; of no use to a plugin."""

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as the implementation of the hook that it is named after."""


@hookspec
def stagelink_register_transport() -> type[Transport] | list[type[Transport]]:
    """Return the transport classes of this module.

    Called once per handler and entry point, when the plugin is loaded, in the thread that calls
    `connect`; before anything is probed or opened. Only the module that an entry point in the
    group ``stagelink.transports`` names is asked, and only when a plan names that entry point, a
    rule says ``auto``, or ``stagelink doctor`` looks at all.

    It should do no more than return; whether the transport can be used here is for
    `Transport.probe` to say. An exception makes the plugin a broken one: the call that needed it
    raises `stagelink.PluginError` with its name, and nothing of the plugin stays registered.

    Returns:
        The class, or a list of classes where one module serves several entry points; the one whose
        ``name`` equals the entry point's is taken. Classes, never instances.
    """
    return []  # for the type checker: a specification is never called


@hookspec(firstresult=True)
def stagelink_select_transport(link: Link, candidates: Sequence[str]) -> str | None:
    """Choose the transport of one link that the plan leaves to ``auto``.

    Called while connecting, once per link and end, after every candidate has been probed and
    judged, in the thread that calls `connect`; also by ``stagelink plan``. Never called for a link
    whose rule names its transports. Calling stops at the first plugin that does not return None.

    Both ends of a link ask, each in its own process, and must come to the same answer: decide from
    the arguments alone, and install the plugin on every rank. A difference is found, and refused
    on both ends, before a message is sent.

    Args:
        link: the pair of ranks and the device; its ``transport`` is the one taken if nobody
            answers.
        candidates: names of the transports that can carry the link, by declared rank, best first.

    Returns:
        One of the candidates; anything else is an error. None: no opinion. If every plugin says
        None, the first candidate is taken.
    """


@hookspec
def stagelink_link_opened(link: Link) -> None:
    """Observe that one end of a link was opened.

    Called on both ranks of the link, in the thread that calls `connect`, once per end, after all
    links of the rank are open and before any message.

    Args:
        link: the link, with the transport that was chosen for it.
    """


@hookspec
def stagelink_link_closed(link: Link, counters: LinkCounters) -> None:
    """Observe that one end of a link was closed, with its totals.

    Called once for every end that was opened, after a failure too, in the thread that closes the
    handler, after the end was closed. No event of the link follows.

    Args:
        link: as given to `stagelink_link_opened`.
        counters: this end's totals; nobody changes them any more.
    """


@hookspec
def stagelink_event(event: Event) -> None:
    """Observe one step of one message.

    Called after the step, on the thread on which it happened: the caller's, a link's worker, or
    the one that reads the control plane. Calls may come from several threads at once, and those of
    one link in any order. Messages wait meanwhile: it returns at once and never blocks. An
    exception fails the handler, as any other on that thread does.

    Without an implementation no event is made at all.

    Args:
        event: frozen; may be kept.
    """


@hookspec(firstresult=True)
def stagelink_trace(
    link: Link, edge: str, direction: Direction, microbatch: int, session: int
) -> bytes | None:
    """Return the trace context that a message is to carry to its receiver.

    Called in the thread that sends, once per message and receiver, when nothing is wrong with the
    message and before it waits for credit. What is given travels in the message's header and is in
    each of its events, on both ranks. Calling stops at the first plugin that does not return
    None. The message waits meanwhile; an exception comes out of the call that sends it, which then
    is not sent.

    Without an implementation messages carry none, and nothing is asked.

    Args:
        link: the link that is to carry the message; its source is this rank.
        edge: name of the edge.
        direction: forward for an activation, backward for a gradient.
        microbatch: global id of the microbatch.
        session: number of the session on this handler, from 0.

    Returns:
        `stagelink.transport.header.TRACE_BYTES` bytes, which core does not look into; anything
        else is an error. None: no opinion.
    """
