"""Link rules: which transports may carry a link, decided by the first rule that matches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stagelink.plan.model import Edge

__all__ = ["AUTO", "LinkFacts", "LinkRule", "matches", "named_keys", "rule_for"]

AUTO = ("auto",)
"""The transports of a rule that leaves the choice to the transports' own declared ranks."""


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """What rules may ask about one edge between two ranks.

    The edge is seen in its forward orientation; gradients take the same transport the other way.

    Attributes:
        edge: the edge.
        source_rank: the rank that sends its tensors.
        target_rank: the rank that receives them.
        source_server: index of the source's server in the plan; None where the plan lists none.
        target_server: the same of the target.
        same_server: whether both ranks are on one server, by the plan or as found.
        device: kind of device of the tensors on the link.
    """

    edge: Edge
    source_rank: int
    target_rank: int
    source_server: int | None
    target_server: int | None
    same_server: bool
    device: str


@dataclass(frozen=True, slots=True)
class LinkRule:
    """One ``[[links]]`` table. A key that is None matches anything, a tuple each of its values.

    Attributes:
        index: its place in the file, from 0.
        transports: names in order of preference, or `AUTO`.
        from_: indices of producing stages.
        to: indices of consuming stages.
        from_rank: producing ranks.
        to_rank: consuming ranks.
        from_server: indices of the producing rank's server.
        to_server: indices of the consuming rank's server.
        same_server: whether both ends must be on one server, or must not be.
        tensor: names of tensors.
        device: kinds of device.
    """

    index: int
    transports: tuple[str, ...]
    from_: tuple[int, ...] | None = None
    to: tuple[int, ...] | None = None
    from_rank: tuple[int, ...] | None = None
    to_rank: tuple[int, ...] | None = None
    from_server: tuple[int, ...] | None = None
    to_server: tuple[int, ...] | None = None
    same_server: bool | None = None
    tensor: tuple[str, ...] | None = None
    device: tuple[str, ...] | None = None

    def keys(self) -> dict[str, tuple[Any, ...]]:
        """The keys that were given, as named in the file, each with the values that it accepts."""
        every = {
            "from": self.from_,
            "to": self.to,
            "from_rank": self.from_rank,
            "to_rank": self.to_rank,
            "from_server": self.from_server,
            "to_server": self.to_server,
            "same_server": None if self.same_server is None else (self.same_server,),
            "tensor": self.tensor,
            "device": self.device,
        }
        return {key: values for key, values in every.items() if values is not None}


def matches(rule: LinkRule, facts: LinkFacts) -> bool:
    """Whether every key that the rule gives accepts the link."""
    found = _values(facts)
    return all(found[key] in accepted for key, accepted in rule.keys().items())


def rule_for(rules: Iterable[LinkRule], facts: LinkFacts) -> LinkRule | None:
    """The first rule that matches, or None, which means the same as `AUTO`."""
    return next((rule for rule in rules if matches(rule, facts)), None)


def named_keys(rule: LinkRule, stage_names: Sequence[str]) -> dict[str, list[Any]]:
    """The rule's keys as the file has them: lists, with stages by name."""
    keys: dict[str, list[Any]] = {key: list(values) for key, values in rule.keys().items()}
    for key in ("from", "to"):
        if key in keys:
            keys[key] = [stage_names[index] for index in keys[key]]
    return keys


def _values(facts: LinkFacts) -> Mapping[str, Any]:
    return {
        "from": facts.edge.source,
        "to": facts.edge.target,
        "from_rank": facts.source_rank,
        "to_rank": facts.target_rank,
        "from_server": facts.source_server,
        "to_server": facts.target_server,
        "same_server": facts.same_server,
        "tensor": facts.edge.tensor.name,
        "device": facts.device,
    }
