"""Checks of link rules: names that do not exist, and rules that can never match."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.plan.problems import Problem
from stagelink.plan.rules import AUTO
from stagelink.text import did_you_mean, quoted, repeats, unknown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stagelink.plan.document import Document, LinkTable

__all__ = ["rule_names", "rule_numbers", "rule_transports", "unused_options"]


def rule_names(document: Document) -> Iterator[Problem]:
    """Stages and tensors that rules name and the plan does not have."""
    stages = {table.name for table in document.stages}
    tensors = {table.name for table in document.tensors}
    for index, rule in enumerate(document.links):
        for key, kind, names, known in (
            ("from", "stage", rule.from_, stages),
            ("to", "stage", rule.to, stages),
            ("tensor", "tensor", rule.tensor, tensors),
        ):
            for place, name in enumerate(names or ()):
                if name not in known:
                    text = unknown(kind, name, sorted(known))
                    yield Problem(("links", index, key, place), text)


def rule_numbers(document: Document) -> Iterator[Problem]:
    """Ranks and servers that rules name and the plan does not have."""
    ranks = sum(len(table.ranks) for table in document.stages)
    servers = len(document.pipeline.servers or ())
    for index, rule in enumerate(document.links):
        for key, kind, numbers, count in (
            ("from_rank", "rank", rule.from_rank, ranks),
            ("to_rank", "rank", rule.to_rank, ranks),
            ("from_server", "server", rule.from_server, servers),
            ("to_server", "server", rule.to_server, servers),
        ):
            for place, number in enumerate(numbers or ()):
                if number >= count:
                    yield Problem(("links", index, key, place), _no_such(kind, number, count))


def rule_transports(document: Document) -> Iterator[Problem]:
    """Preference lists that say a thing twice, or "auto" beside names."""
    for index, rule in enumerate(document.links):
        names = rule.transport
        for place, first in repeats(names):
            text = f"{names[place]!r} is already transport[{first}]"
            yield Problem(("links", index, "transport", place), text)
        if "auto" in names and tuple(names) != AUTO:
            text = f"{names!r} mixes 'auto' with names; give 'auto' alone, or names alone"
            yield Problem(("links", index, "transport"), text)


def unused_options(document: Document) -> Iterator[Problem]:
    """Options of transports that no link can take."""
    named = {name for rule in document.links for name in rule.transport}
    chosen_freely = "auto" in named or not any(map(_takes_every_link, document.links))
    for name in document.transports:
        if name == "auto":
            text = "'auto' is a choice among transports and has no options"
            yield Problem(("transports", name), text)
        elif name not in named and not chosen_freely:
            text = f"never used: the rules name only {quoted(sorted(named))}, for every link"
            yield Problem(("transports", name), f"{text}{did_you_mean(name, named)}")


def _takes_every_link(rule: LinkTable) -> bool:
    return all(value is None for key, value in rule if key != "transport")


def _no_such(kind: str, number: int, count: int) -> str:
    if count == 0:
        return f"{kind} {number}, but the plan lists no servers; give pipeline.servers"
    return f"there is no {kind} {number}; the {kind}s are 0 to {count - 1}"
