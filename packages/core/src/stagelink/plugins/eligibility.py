"""Eligibility of one transport for one link, with the reason where it cannot carry it."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from stagelink.text import quoted
from stagelink.transport.contract import Link

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from stagelink.plan.model import Edge
    from stagelink.plugins.offers import End, Offer
    from stagelink.transport.contract import Capabilities, Place, Verdict

__all__ = ["Asker", "Eligibility"]


class Asker(NamedTuple):
    """Questions to this process's transports and plugins beyond the plan and the offers.

    Attributes:
        can_connect: `Transport.can_connect` of the link's transport, given the place of the link's
            source and that of its target.
        select: `stagelink.plugins.relay.Relay.select_transport`.
        errors: what is wrong with this process's transports that are broken or missing, by name.
    """

    can_connect: Callable[[Link, Place, Place], Verdict]
    select: Callable[[Link, Sequence[str]], str | None]
    errors: Mapping[str, Exception] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Eligibility of transports for one link.

    Attributes:
        edge: the edge that it carries.
        device: kind of device of its tensors.
        source: the end that sends the edge's tensors.
        target: the end that receives them.
        ask: the transports' and plugins' own word.
    """

    edge: Edge
    device: str
    source: End
    target: End
    ask: Asker

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
