"""A transport's options are checked strictly, and every mistake is told with its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from pydantic import Field

from stagelink.errors import PlanError
from stagelink.plugins.offers import parse_options

if TYPE_CHECKING:
    from stagelink.transport.contract import Transport


@dataclass(frozen=True, slots=True)
class Tuning:
    depth: int = 1


@dataclass(frozen=True, slots=True)
class Options:
    interface: str | None = None
    slots: Annotated[int, Field(ge=4)] = 4
    factor: float = 1.0
    ports: tuple[int, ...] = ()
    mode: Literal["host", "device"] = "host"
    tuning: Tuning = field(default_factory=Tuning)

    def __post_init__(self) -> None:
        if self.slots > 100 and self.mode == "host":
            raise ValueError("more than 100 slots need mode 'device'")


CLASS: type[Transport] = type("Gloo", (), {"name": "gloo", "Options": Options})


def refusal(given: dict[str, Any]) -> list[str]:
    with pytest.raises(PlanError) as caught:
        parse_options(CLASS, given)
    return str(caught.value).splitlines()


def test_defaults_are_the_dataclass_s() -> None:
    assert parse_options(CLASS, {}) == Options()


def test_values_have_the_types_that_the_dataclass_says() -> None:
    given: dict[str, Any] = {
        "interface": "lo",
        "factor": 2,
        "ports": [1, 2],
        "tuning": {"depth": 3},
    }
    assert parse_options(CLASS, given) == Options("lo", 4, 2.0, (1, 2), "host", Tuning(3))


def test_an_unknown_option_is_refused_with_the_allowed_ones() -> None:
    (line,) = refusal({"interfcae": "lo"})
    assert line == (
        "transports.gloo.interfcae: unknown option 'interfcae' (did you mean 'interface'?); "
        "transport 'gloo' has 'interface', 'slots', 'factor', 'ports', 'mode', 'tuning' "
        "(value 'lo')"
    )


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"interface": 7}, "transports.gloo.interface: Input should be a valid string, not 7"),
        ({"slots": "8"}, "transports.gloo.slots: Input should be a valid integer, not '8'"),
        ({"slots": True}, "transports.gloo.slots: Input should be a valid integer, not True"),
        ({"ports": [1, "2"]}, "transports.gloo.ports.1: Input should be a valid integer, not '2'"),
    ],
)
def test_a_value_of_another_type_is_refused(given: dict[str, Any], line: str) -> None:
    assert refusal(given) == [line]


@pytest.mark.parametrize(
    ("given", "place", "allowed"),
    [
        ({"slots": 1}, "transports.gloo.slots: ", "greater than or equal to 4, not 1"),
        ({"mode": "hots"}, "transports.gloo.mode: ", "'host' or 'device', not 'hots'"),
        ({"slots": 101}, "transports.gloo: ", "more than 100 slots need mode 'device'"),
        ({"tuning": {"dept": 1}}, "transports.gloo.tuning.dept: ", "'dept'"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused(
    given: dict[str, Any], place: str, allowed: str
) -> None:
    (line,) = refusal(given)
    assert line.startswith(place)
    assert allowed in line


def test_every_mistake_has_a_line() -> None:
    lines = refusal({"interface": 7, "slots": 1, "prots": []})
    assert [line.split(":")[0] for line in lines] == [
        "transports.gloo.interface",
        "transports.gloo.slots",
        "transports.gloo.prots",
    ]
