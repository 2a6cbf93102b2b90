"""The tables and keys of a plan's file, each with its type and bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from stagelink.plan.dtypes import DTYPE_BY_NAME, MAX_DIMS
from stagelink.plan.model import ROUTINGS, SCHEDULES
from stagelink.text import shown, unknown

OWN_TEXT = "own_text"
"""Type of the errors whose message is already a whole text of ours."""

_MAX_INT64 = 2**63 - 1
_MAX_PORT = 65535
_PORTS = 2


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _listed_or_scalar(value: object) -> object:
    return list(value) if isinstance(value, list | tuple) else [value]


def _one_of(kind: str, known: Iterable[str]) -> Callable[[str], str]:
    names = tuple(known)

    def check(name: str) -> str:
        if name not in names:
            text = unknown(kind, name, names, owner="this version")
            raise PydanticCustomError(OWN_TEXT, "{text}", {"text": text})
        return name

    return check


def _port_range(value: object) -> object:
    """Two ports in ascending order, whatever is wrong with them told in one sentence."""
    found = list(value) if isinstance(value, tuple) else value
    if found is None or (
        isinstance(found, list)
        and len(found) == _PORTS
        and all(type(port) is int and 1 <= port <= _MAX_PORT for port in found)
        and found[0] <= found[1]
    ):
        return found if found is None else tuple(found)
    text = f"{shown(value)}: must be the first and the last port, as [20000, 20100]"
    raise PydanticCustomError(OWN_TEXT, "{text}", {"text": text})


_T = TypeVar("_T")
_List = Annotated[list[_T], BeforeValidator(_listed)]
_Some = Annotated[list[_T], BeforeValidator(_listed), Field(min_length=1)]
_OneOrMany = Annotated[list[_T], BeforeValidator(_listed_or_scalar)]
_OneOrSome = Annotated[list[_T], BeforeValidator(_listed_or_scalar), Field(min_length=1)]

_Name = Annotated[str, Field(min_length=1)]
_Index = Annotated[int, Field(ge=0, le=_MAX_INT64)]
_Count = Annotated[int, Field(ge=1, le=_MAX_INT64)]
_Size = Annotated[int, Field(ge=-1, le=_MAX_INT64)]
_Seconds = Annotated[float, Field(gt=0)]
_Ports = Annotated[tuple[int, int] | None, BeforeValidator(_port_range)]
_Device = Annotated[str, AfterValidator(_one_of("device", ("cpu", "cuda")))]
_DType = Annotated[str, AfterValidator(_one_of("dtype", DTYPE_BY_NAME))]
_Schedule = Annotated[str, AfterValidator(_one_of("schedule", SCHEDULES))]
_Routing = Annotated[str, AfterValidator(_one_of("routing", ROUTINGS))]


class _Table(BaseModel):
    """A table of a plan's file: its keys, each with its type and bounds."""

    # Strict, since a rank "0" or true is a slip to be told, not a number to be guessed.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PipelineTable(_Table):
    """``[pipeline]``."""

    name: _Name = "pipeline"
    schedule: _Schedule = "1f1b"
    microbatches: _Count
    routing: _Routing = "round_robin"
    window: _Count | None = None
    observers: _List[_Name] = []
    servers: _Some[_Some[_Index]] | None = None


class StageTable(_Table):
    """One ``[[stages]]``."""

    name: _Name
    ranks: _Some[_Index]
    device: _Device = "cpu"
    warm_up: _Index | None = None
    arguments: dict[_Name, _Name] = {}


class TensorTable(_Table):
    """One ``[[tensors]]``; ``grad`` left out follows from the dtype."""

    name: _Name
    from_: _Name = Field(alias="from")
    to: _OneOrMany[_Name]
    dtype: _DType | None = None
    shape: Annotated[_List[_Size], Field(max_length=MAX_DIMS)] | None = None
    grad: bool | None = None


class LinkTable(_Table):
    """One ``[[links]]``: the keys of a rule and its transports."""

    from_: _OneOrSome[_Name] | None = Field(default=None, alias="from")
    to: _OneOrSome[_Name] | None = None
    from_rank: _OneOrSome[_Index] | None = None
    to_rank: _OneOrSome[_Index] | None = None
    from_server: _OneOrSome[_Index] | None = None
    to_server: _OneOrSome[_Index] | None = None
    same_server: bool | None = None
    tensor: _OneOrSome[_Name] | None = None
    device: _OneOrSome[_Device] | None = None
    transport: _OneOrSome[_Name]

    def keys(self) -> dict[str, list[Any]]:
        """The keys of the rule that were given, as in the file, each with its values."""
        given = self.model_dump(by_alias=True, exclude_none=True, exclude={"transport"})
        return {key: found if isinstance(found, list) else [found] for key, found in given.items()}


class Limits(_Table):
    """``[limits]``: how long waits may take and how much memory receives may need.

    Attributes:
        deadline_s: seconds a call may wait for one message or one credit.
        first_deadline_s: the same for the first message of a session (compilation, data loading).
        connect_deadline_s: seconds that `connect` may take.
        close_deadline_s: seconds that `close` may take to drain and say goodbye.
        receive_bytes: bound on one rank's receive memory, checked beforehand as far as shapes are
            declared, and at run time of what has come and was not taken yet; None: no bound.
        pool_bytes: idle receive buffers kept for reuse per rank.
    """

    deadline_s: _Seconds = 60.0
    first_deadline_s: _Seconds = 600.0
    connect_deadline_s: _Seconds = 120.0
    close_deadline_s: _Seconds = 10.0
    receive_bytes: _Count | None = None
    pool_bytes: _Count = 256 * 1024 * 1024


class Control(_Table):
    """``[control]``: how the control plane connects.

    Attributes:
        interface: network interface at whose address this rank listens for control connections of
            other servers; None: that of the route to the store's host, or what else tells it, see
            `stagelink.transport.addresses.own_address`.
        inline_bytes: CPU payloads up to this size travel in the header's message (0 to 65536;
            0: never).
        spin_us: microseconds that a waiting caller polls before it blocks, where its last waits
            were shorter than that; 0: never.
        ports: the first and the last port that this rank may listen at for control connections of
            other servers; None: any.
    """

    interface: _Name | None = None
    inline_bytes: Annotated[int, Field(ge=0, le=65536)] = 8192
    spin_us: _Index = 100
    ports: _Ports = None


class Document(_Table):
    """A whole plan as written: names not yet resolved, nothing checked across tables."""

    pipeline: PipelineTable
    stages: _Some[StageTable]
    tensors: _List[TensorTable] = []
    links: _List[LinkTable] = []
    transports: dict[_Name, dict[str, JsonValue]] = {}
    control: Control = Control()
    limits: Limits = Limits()
