"""Point-to-point communication between the stages of a pipeline-parallel model.

Load a `Plan`, `connect` each rank, and either let a `PipelineRunner` train the module or drive the
`Session` of each pass yourself. Which wire carries a link is a rule in the plan.
"""

from __future__ import annotations

from importlib.metadata import version

from stagelink.errors import (
    AbortedError,
    ClosedError,
    ConnectError,
    DeadlineError,
    DisagreementError,
    ForkedError,
    MessageError,
    MessageTypeError,
    NoTransportError,
    PeerClosedError,
    PeerLostError,
    PlanError,
    PluginError,
    ProtocolError,
    RankTakenError,
    RefusedError,
    StagelinkError,
    TransportError,
    UnknownTransportError,
    UsageError,
    VerificationError,
)
from stagelink.exchange.connect import connect
from stagelink.exchange.handler import Handler
from stagelink.exchange.handles import RecvHandle, SendHandle
from stagelink.exchange.one_process import in_one_process
from stagelink.exchange.session import Session
from stagelink.plan import Plan
from stagelink.runner import BackwardDone, LossSum, PipelineRunner
from stagelink.schedule import UNTIL_END, Action, Kind, Verification, verify

__version__ = version("stagelink")

__all__ = [
    "UNTIL_END",
    "AbortedError",
    "Action",
    "BackwardDone",
    "ClosedError",
    "ConnectError",
    "DeadlineError",
    "DisagreementError",
    "ForkedError",
    "Handler",
    "Kind",
    "LossSum",
    "MessageError",
    "MessageTypeError",
    "NoTransportError",
    "PeerClosedError",
    "PeerLostError",
    "PipelineRunner",
    "Plan",
    "PlanError",
    "PluginError",
    "ProtocolError",
    "RankTakenError",
    "RecvHandle",
    "RefusedError",
    "SendHandle",
    "Session",
    "StagelinkError",
    "TransportError",
    "UnknownTransportError",
    "UsageError",
    "Verification",
    "VerificationError",
    "__version__",
    "connect",
    "in_one_process",
    "verify",
]
