"""Every error stagelink raises, under one base.

A leaf also inherits the standard type that a caller would think of catching, so
``except TimeoutError`` and ``except stagelink.DeadlineError`` both work.
"""

from __future__ import annotations


class StagelinkError(Exception):
    """Base of every error of this library."""


class PlanError(StagelinkError, ValueError):
    """The plan, or an argument that must fit it, is wrong; nothing was started.

    The text has one line per problem: where in the file, what was found, what is allowed.
    """


class VerificationError(PlanError):
    """The plan is well-formed, but its schedule would deadlock, or needs too large a window.

    The text names the ranks, actions and microbatches of the cycle in the wait-for graph.
    """


class PluginError(StagelinkError, RuntimeError):
    """A plugin that was asked for is broken; the text names distribution, cause and line.

    What the plugin raised is the cause (``__cause__``).
    """


class UnknownTransportError(PluginError, LookupError):
    """No installed plugin provides the transport asked for; the text lists those known."""


class NoTransportError(StagelinkError, RuntimeError):
    """No transport that the rules allow can carry a link; the text gives each one's reason."""


class ConnectError(StagelinkError, ConnectionError):
    """The ranks could not be brought together: no answer, a port in use, a refused connection."""


class RankTakenError(ConnectError):
    """Another process already has this rank in this run."""


class DisagreementError(ConnectError, ValueError):
    """Two ranks differ in version, plan, transports, kind of session or number of microbatches.

    The text names the field and both values; both ranks get it.
    """


class MessageError(StagelinkError, ValueError):
    """One message breaks its contract (dtype, shape, layout); nothing of it was sent.

    The handler goes on: the next message works.
    """


class MessageTypeError(MessageError, TypeError):
    """An object to be sent, or received into, is no tensor, or has no strided memory."""


class RefusedError(MessageError):
    """The peer refused to send the message that is waited for; the text is the peer's error."""


class UsageError(StagelinkError, RuntimeError):
    """A call in a wrong state: another replica's microbatch, a session left, a second receive."""


class DeadlineError(StagelinkError, TimeoutError):
    """A wait timed out; the text says who waited for whom, for what, and how long."""


class TransportError(StagelinkError, RuntimeError):
    """A transport failed; the foreign exception is the cause (``__cause__``)."""


class ProtocolError(StagelinkError, ConnectionError):
    """A peer broke the wire protocol: damaged bytes, or a message that cannot come now."""


class PeerClosedError(StagelinkError, EOFError):
    """The peer closed in order, or left the session, before the message that is waited for."""


class PeerLostError(StagelinkError, ConnectionError):
    """The peer's connection broke without a goodbye: its process died or its server is gone."""


class AbortedError(StagelinkError, RuntimeError):
    """Another rank failed and aborted the run; the text has its rank and its error's text."""


class ClosedError(StagelinkError, RuntimeError):
    """The handler was closed, or is being closed, in this process."""


class ForkedError(ClosedError):
    """The handler belongs to another process: this one was forked from it."""
