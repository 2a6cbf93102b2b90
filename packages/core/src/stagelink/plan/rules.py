"""Link rules: which transports may carry a link, decided by the first rule that matches it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stagelink.plan.model import Edge

__all__ = ["AUTO", "LinkRule", "link_facts", "named_keys", "rule_for"]

AUTO = ("auto",)
"""The transports of a rule that leaves the choice to the transports' own declared ranks."""


def link_facts(
    edge: Edge,
    ranks: tuple[int, int],
    servers: tuple[int | None, int | None],
    *,
    same_server: bool,
    device: str,
) -> dict[str, Any]:
    """Facts about an edge between two ranks that rules may ask for, by the keys of ``[[links]]``.

    The edge is seen in its forward orientation; gradients take the same transport the other way.

    Args:
        edge: the edge.
        ranks: the rank that sends its tensors, and the one that receives them.
        servers: the index of each one's server in the plan; None where the plan lists none.
        same_server: whether both ranks are on one server, by the plan or as found.
        device: kind of device of the tensors on the link.
    """
    return {
        "from": edge.source,
        "to": edge.target,
        "from_rank": ranks[0],
        "to_rank": ranks[1],
        "from_server": servers[0],
        "to_server": servers[1],
        "same_server": same_server,
        "tensor": edge.tensor.name,
        "device": device,
    }


@dataclass(frozen=True, slots=True)
class LinkRule:
    """One ``[[links]]`` table.

    Attributes:
        index: its place in the file, from 0.
        transports: names in order of preference, or `AUTO`.
        keys: the values of `link_facts` that it accepts, by key. A key that is absent accepts
            anything.
    """

    index: int
    transports: tuple[str, ...]
    keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)

    def matches(self, facts: Mapping[str, Any]) -> bool:
        """Whether every key accepts the link of these facts."""
        return all(facts[key] in accepted for key, accepted in self.keys.items())


def rule_for(rules: Iterable[LinkRule], facts: Mapping[str, Any]) -> LinkRule | None:
    """The first rule that matches, or None, which means the same as `AUTO`."""
    return next((rule for rule in rules if rule.matches(facts)), None)


def named_keys(rule: LinkRule, stage_names: Sequence[str]) -> dict[str, list[Any]]:
    """The rule's keys as the file has them: lists, with stages by name."""
    keys = {key: list(values) for key, values in rule.keys.items()}
    for key in keys.keys() & {"from", "to"}:
        keys[key] = [stage_names[index] for index in keys[key]]
    return keys
