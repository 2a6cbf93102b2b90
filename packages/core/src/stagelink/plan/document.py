"""The tables and keys of a plan's file, each with its type and bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from stagelink.plan.dtypes import DTYPE_BY_NAME, MAX_DIMS
from stagelink.plan.model import ROUTINGS, SCHEDULES, Control, Limits
from stagelink.text import shown, unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "UNKNOWN_NAME",
    "ControlTable",
    "Document",
    "LimitsTable",
    "LinkTable",
    "PipelineTable",
    "StageTable",
    "TensorTable",
]

UNKNOWN_NAME = "unknown_name"
"""Type of the errors whose message is already a whole text of ours."""

_MAX_INT64 = 2**63 - 1
_MAX_PORT = 65535
_PORTS = 2
_CONTROL = Control()
_LIMITS = Limits()


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _listed_or_scalar(value: object) -> object:
    return list(value) if isinstance(value, list | tuple) else [value]


def _one_of(kind: str, known: Iterable[str]) -> Callable[[str], str]:
    names = tuple(known)

    def check(name: str) -> str:
        if name not in names:
            text = unknown(kind, name, names, owner="this version")
            raise PydanticCustomError(UNKNOWN_NAME, "{text}", {"text": text})
        return name

    return check


def _port_range(value: object) -> object:
    """Two ports in ascending order, whatever is wrong with them told in one sentence."""
    found = list(value) if isinstance(value, tuple) else value
    sound = (
        isinstance(found, list)
        and len(found) == _PORTS
        and all(type(port) is int and 1 <= port <= _MAX_PORT for port in found)
        and found[0] <= found[1]
    )
    if found is None or (sound and isinstance(found, list)):
        return found if found is None else tuple(found)
    text = f"{shown(value)}: must be the first and the last port, as [20000, 20100]"
    raise PydanticCustomError(UNKNOWN_NAME, "{text}", {"text": text})


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


class ControlTable(_Table):
    """``[control]``."""

    interface: _Name | None = _CONTROL.interface
    inline_bytes: Annotated[int, Field(ge=0, le=65536)] = _CONTROL.inline_bytes
    spin_us: _Index = _CONTROL.spin_us
    ports: _Ports = _CONTROL.ports


class LimitsTable(_Table):
    """``[limits]``."""

    deadline_s: _Seconds = _LIMITS.deadline_s
    first_deadline_s: _Seconds = _LIMITS.first_deadline_s
    connect_deadline_s: _Seconds = _LIMITS.connect_deadline_s
    close_deadline_s: _Seconds = _LIMITS.close_deadline_s
    receive_bytes: _Count | None = _LIMITS.receive_bytes
    pool_bytes: _Count = _LIMITS.pool_bytes


class Document(_Table):
    """A whole plan as written: names not yet resolved, nothing checked across tables."""

    pipeline: PipelineTable
    stages: _Some[StageTable]
    tensors: _List[TensorTable] = []
    links: _List[LinkTable] = []
    transports: dict[_Name, dict[str, JsonValue]] = {}
    control: ControlTable = ControlTable()
    limits: LimitsTable = LimitsTable()
