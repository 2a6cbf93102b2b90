"""The choice of a transport for a link: which can carry it, and the reasons against the others.

Pure: it decides from the plan and from what both ends say of themselves, so that both come to the
same answer, each in its own process, and ``stagelink plan`` can ask without any peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from stagelink.errors import NoTransportError, PluginError, StagelinkError, UnknownTransportError
from stagelink.plan.model import AUTO, Edge, LinkRule, link_facts, rule_for
from stagelink.plan.plan import Plan
from stagelink.plugins.offers import End, Offer, Survey
from stagelink.plugins.relay import Relay
from stagelink.text import quoted
from stagelink.transport.contract import Capabilities, Endpoint, Link, Verdict


class Asker(NamedTuple):
    """Questions to this process's transports and plugins beyond the plan and the offers."""

    # `Transport.can_connect` of the link's transport, given the place of the link's source and
    # that of its target
    can_connect: Callable[[Link, Endpoint, Endpoint], Verdict]
    # `stagelink.plugins.relay.Relay.select_transport`
    select: Callable[[Link, Sequence[str]], str | None]
    # what is wrong with this process's transports that are broken or missing, by name
    errors: Mapping[str, Exception] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Eligibility of transports for one link."""

    edge: Edge  # the edge that it carries
    device: str  # kind of device of its tensors
    source: End  # the end that sends the edge's tensors
    target: End  # the end that receives them
    ask: Asker  # the transports' and plugins' own word

    def link(self, name: str) -> Link:
        """The link, if the transport of that name carried it."""
        return Link(self.source.rank, self.target.rank, name, self.device)

    def known(self) -> list[str]:
        """All transports that either end knows of: highest declared rank first, then by name."""
        names = {**self.source.offers, **self.target.offers}
        return sorted(names, key=lambda name: (-self._auto_rank(name), name))

    def offers(self, name: str) -> list[tuple[int, Offer | None]]:
        """Each end's rank and its offer of a transport; None where it knows of none."""
        return [(end.rank, end.offers.get(name)) for end in (self.source, self.target)]

    def reason(self, name: str) -> str | None:
        """Find the reason against the transport of that name; None where it can carry the link."""
        reasons = (self._offer_reasons, self._capability_reasons, self._connect_reasons)
        return next((reason for check in reasons for reason in check(name)), None)

    def _offer_reasons(self, name: str) -> Iterator[str]:
        offers = self.offers(name)
        for rank, offer in offers:
            if offer is None or offer.state == "absent":
                yield f"not installed on rank {rank}"
            elif offer.state == "disabled":
                yield f"disabled on rank {rank}"
        for rank, offer in offers:
            if offer is not None and offer.state == "broken":
                yield f"broken on rank {rank}: {offer.reason}"
        for rank, offer in offers:
            if offer is not None and offer.state == "unusable":
                yield f"rank {rank} cannot use it: {offer.reason}"

    def _capability_reasons(self, name: str) -> Iterator[str]:
        # Two ranks may have two releases of one plugin: the link needs what both can do.
        for capabilities in self._capabilities(name):
            yield from self._payload_reasons(capabilities)
            yield from self._place_reasons(capabilities)

    def _payload_reasons(self, capabilities: Capabilities) -> Iterator[str]:
        if self.device not in capabilities.devices:
            carried = quoted(sorted(capabilities.devices))
            yield f"carries tensors on {carried}, not on {self.device!r}"
        tensor = self.edge.tensor
        if capabilities.dtypes is None or tensor.dtype is None:
            return
        if tensor.dtype not in capabilities.dtypes:
            carried = quoted(sorted(capabilities.dtypes))
            yield f"carries dtype {carried}, not {tensor.dtype!r} of tensor {tensor.name!r}"

    def _place_reasons(self, capabilities: Capabilities) -> Iterator[str]:
        same_server = self.source.server == self.target.server
        same_process = self.source.process == self.target.process
        if capabilities.same_server and not same_server:
            yield "needs both ranks on one server"
        if capabilities.distinct_processes and same_process:
            yield "needs the ranks in two processes"
        if capabilities.same_process and not same_process:
            yield "needs both ranks in one process"

    def _connect_reasons(self, name: str) -> Iterator[str]:
        source, target = self.source.place(name), self.target.place(name)
        verdict = self.ask.can_connect(self.link(name), source, target)
        if not verdict:
            yield verdict.reason

    def _capabilities(self, name: str) -> list[Capabilities]:
        offers = (offer for _, offer in self.offers(name) if offer is not None)
        return [offer.capabilities for offer in offers if offer.capabilities is not None]

    def _auto_rank(self, name: str) -> int:
        return min((one.auto_rank for one in self._capabilities(name)), default=0)


_NO_RULE = "no rule in `links` matches"


class Refusal(NamedTuple):
    """A transport that was passed over, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The transport of one link, with the reasons."""

    # the link in its edge's forward orientation; gradients take the same transport back
    link: Link
    rule: int | None  # index of the link rule that decided; None where none matched
    auto: bool  # whether the rule, or the lack of one, left it to the transports' declared ranks
    # those that were preferred and cannot carry the link; under ``auto`` all that cannot
    passed_over: tuple[Refusal, ...] = ()
    outranked: tuple[str, ...] = ()  # those that ``auto`` could have taken as well, best first

    @property
    def transport(self) -> str:
        """The transport's name."""
        return self.link.transport

    def explain(self) -> list[str]:
        """Lines of text: the transport taken and by which rule, and the reasons against others."""
        by = _NO_RULE if self.rule is None else f"links[{self.rule}]"
        how = f"auto; {by}" if self.auto else by
        refusals = [f"not {name!r}: {reason}" for name, reason in self.passed_over]
        lower = [f"ranked lower: {quoted(self.outranked)}"] if self.outranked else []
        return [f"{self.link} ({how})", *lower, *refusals]


def device_of(plan: Plan, edge: Edge) -> str:
    """Kind of device on an edge's links: that of both stages, ``"cpu"`` where they differ."""
    source, target = plan.stages[edge.source].device, plan.stages[edge.target].device
    return source if source == target else "cpu"


def asked_for(plan: Plan, links: Iterable[tuple[Edge, int, int]]) -> set[str] | None:
    """Names of the transports that the rules allow for some links; None: all that are installed.

    A link is an edge, its source rank and target rank. Where the plan lists no servers, it is not
    known yet whether the two share one, and both cases count.
    """
    names: set[str] = set()
    for edge, source, target in links:
        known = plan.servers is not None
        same = plan.server_of(source) == plan.server_of(target)
        for same_server in (same,) if known else (True, False):
            rule = rule_for(plan.rules, _facts(plan, edge, (source, target), same_server))
            if rule is None or rule.transports == AUTO:
                return None
            names.update(rule.transports)
    return names


def asker(survey: Survey, hooks: Relay, rank: int | None) -> Asker:
    """Ask this process's transports and plugins.

    The places of ``rank`` are the local ones; None: the transports answer for the source.
    """

    def can_connect(link: Link, source: Endpoint, target: Endpoint) -> Verdict:
        if link.target == rank:
            return survey.can_connect(link, target, source)
        return survey.can_connect(link, source, target)

    return Asker(can_connect, hooks.select_transport, survey.errors)


def choose(plan: Plan, edge: Edge, source: End, target: End, ask: Asker) -> Choice:
    """Choose the transport of one link; both ends come to the same answer.

    The first rule that matches names the transports in order of preference, and the first that can
    carry the link is taken. Where the rule says ``auto``, or none matches, all that either end
    knows of are judged, highest `Capabilities.auto_rank` first, then by name; the first is taken
    unless the hook `stagelink_select_transport` names another that can.

    Raises:
        NoTransportError: none of those that the rule allows can carry the link.
        UnknownTransportError: the rule allows one only, and an end does not have it.
        PluginError: the rule allows one only, and an end's is broken; or a plugin failed when
            asked.
    """
    same_server = source.server == target.server
    rule = rule_for(plan.rules, _facts(plan, edge, (source.rank, target.rank), same_server))
    case = Eligibility(edge, device_of(plan, edge), source, target, ask)
    if rule is None or rule.transports == AUTO:
        return _by_rank(case, rule)
    return _by_preference(case, rule)


def _by_preference(case: Eligibility, rule: LinkRule) -> Choice:
    refused: list[Refusal] = []
    for name in rule.transports:
        reason = case.reason(name)
        if reason is None:
            return Choice(case.link(name), rule.index, False, tuple(refused))
        refused.append(Refusal(name, reason))
    if len(refused) == 1:
        raise _sole_failure(case, rule, refused[0]) from _cause(case, refused)
    raise NoTransportError(_nothing_fits(case, rule, refused)) from _cause(case, refused)


def _by_rank(case: Eligibility, rule: LinkRule | None) -> Choice:
    judged = [(name, case.reason(name)) for name in case.known()]
    fit = [name for name, reason in judged if reason is None]
    refused = [Refusal(name, reason) for name, reason in judged if reason is not None]
    if not fit:
        raise NoTransportError(_nothing_fits(case, rule, refused)) from _cause(case, refused)
    taken = case.ask.select(case.link(fit[0]), tuple(fit)) or fit[0]
    place = fit.index(taken)
    refused += [Refusal(name, "a plugin chose another") for name in fit[:place]]
    lower = tuple(fit[place + 1 :])
    return Choice(case.link(taken), rule.index if rule else None, True, tuple(refused), lower)


def _cause(case: Eligibility, refused: Sequence[Refusal]) -> Exception | None:
    """This process's own error, with its traceback, of the first transport that has one."""
    errors = [case.ask.errors.get(one.name) for one in refused]
    return next((error for error in errors if error is not None and error.__cause__), None)


def _sole_failure(case: Eligibility, rule: LinkRule, refused: Refusal) -> StagelinkError:
    """The only transport that was asked for: its plugin's own error, if that is what is wrong."""
    kinds = {"absent": UnknownTransportError, "disabled": UnknownTransportError}
    for rank, offer in case.offers(refused.name):
        if offer is None:
            continue
        if offer.state in ("absent", "disabled", "broken"):
            kind = kinds.get(offer.state, PluginError)
            return kind(f"{_head(case)}; {_decider(rule.index)}. On rank {rank}: {offer.reason}")
    return NoTransportError(_nothing_fits(case, rule, [refused]))


def _nothing_fits(case: Eligibility, rule: LinkRule | None, refused: Sequence[Refusal]) -> str:
    reasons = "".join(f"\n  - {name!r}: {reason}" for name, reason in refused)
    decider = _decider(rule.index if rule else None)
    if not refused:
        return f"{_head(case)}; {decider}, and no transport is installed on either rank"
    return (
        f"{_head(case)}; {decider}:{reasons}\n"
        "Install one that can on both ranks, or let the rule allow it."
    )


def _head(case: Eligibility) -> str:
    return (
        f"nothing can carry tensor {case.edge.tensor.name!r} from rank {case.source.rank} to rank "
        f"{case.target.rank} (device {case.device!r})"
    )


def _decider(rule: int | None) -> str:
    return _NO_RULE if rule is None else f"links[{rule}] decides"


def _facts(plan: Plan, edge: Edge, ranks: tuple[int, int], same_server: bool) -> dict[str, Any]:
    servers = plan.server_of(ranks[0]), plan.server_of(ranks[1])
    device = device_of(plan, edge)
    return link_facts(edge, ranks, servers, same_server=same_server, device=device)
