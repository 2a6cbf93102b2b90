"""Weight stashing: the weights that microbatches in flight still need, version by version.

An optimizer changes weights in place, so a backward whose forward met older ones would compute
with wrong values. Forwards therefore run on copies, one for each version (see
`stagelink.schedule.version_for`), and gradients go from the copies to the module's own
parameters, the masters, which the optimizer steps. Buffers are not versioned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.func import functional_call

from stagelink.errors import UsageError

_State = tuple[int, int] | None


class Versions:
    """The versions of one stage's trained parameters in an epoch; the first is 0.

    Backwards come in the order of forwards.

    Args:
        direct: every forward is followed by its backward before the next update, and meets the
            newest version: then no copies are needed.
        two: forwards may meet the version before the newest, which is kept for them.

    Raises:
        UsageError: a parameter has hooks, which copies would not call; or the module is scripted
            or traced, and cannot be given copies.
    """

    def __init__(self, module: torch.nn.Module, *, direct: bool, two: bool) -> None:
        self.newest = 0  # the version that the module's parameters are now
        self._module = module
        self._direct = direct
        self._behind = 1 if two else 0
        self._masters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if not direct:
            self._check_copies_will_do()
        self._copies: dict[int, dict[str, torch.Tensor]] = {}
        self._under_way: deque[int] = deque()

    def _check_copies_will_do(self) -> None:
        for name, parameter in self._masters.items():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise UsageError(
                    f"parameter {name!r} has hooks; with an asynchronous schedule gradients are "
                    "those of copies, which have none: do in the optimizer what they do"
                )

        if any(isinstance(part, torch.jit.ScriptModule) for part in self._module.modules()):
            raise UsageError(
                f"a {type(self._module).__qualname__}: with an asynchronous schedule forwards run "
                "on copies of the weights, which a scripted or traced module cannot be given; "
                "take the module itself, or torch.compile"
            )

    @property
    def kept(self) -> int:
        """Number of versions that are held besides the masters."""
        return len(self._copies)

    def forward_on(self, version: int) -> Callable[..., Any]:
        """The module with the weights of a version, for one microbatch's forward in training."""
        if version != self.newest and version not in self._copies:
            raise RuntimeError(f"weights of version {version}: the newest is {self.newest}")
        if self._direct:
            return self._module
        self._under_way.append(version)
        weights = self._copy(version)
        return lambda *args, **kwargs: functional_call(self._module, weights, args, kwargs)

    def backward(self, run: Callable[[], None]) -> None:
        """Run the oldest microbatch's backward, and add its gradients to the masters'.

        The module has the microbatch's weights meanwhile: where activations are checkpointed its
        forward runs again.

        Raises:
            UsageError: the module's forward changed its weights, or did not use those that its
                parameters' names stand for.
        """
        if self._direct:
            run()
            return
        version = self._under_way.popleft()
        copies = self._copies[version]
        given = {name: _state(master.grad) for name, master in self._masters.items()}
        weights = {f"module.{name}": copy for name, copy in copies.items()}
        functional_call(_Within(self._module), weights, (run,))
        for name, copy in copies.items():
            self._check_used(name, copy, given[name])
            master, gradient, copy.grad = self._masters[name], copy.grad, None
            if gradient is not None:
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        self._forget()

    def _check_used(self, name: str, copy: torch.Tensor, before: _State) -> None:
        if copy._version:
            raise UsageError(
                f"parameter {name!r}: the module's forward changes it in place (as an embedding "
                "with max_norm does), and with an asynchronous schedule that would be lost: it "
                "works on a copy"
            )
        if _state(self._masters[name].grad) != before:
            raise UsageError(
                f"parameter {name!r}: the module's forward reaches it past its name (by a list of "
                "its own, say), and so uses newer weights than the asynchronous schedule says"
            )

    def about_to_update(self) -> None:
        """The masters are about to become the next version."""
        if self._behind:
            self._copy(self.newest)
        self.newest += 1
        self._forget()

    def _copy(self, version: int) -> dict[str, torch.Tensor]:
        if version not in self._copies:
            self._copies[version] = {
                name: master.detach().clone().requires_grad_()
                for name, master in self._masters.items()
            }
        return self._copies[version]

    def _forget(self) -> None:
        oldest = min([*self._under_way, self.newest - self._behind])
        for version in [version for version in self._copies if version < oldest]:
            del self._copies[version]


class _Within(torch.nn.Module):
    """Runs something while its inner module is given other weights."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[], None]) -> None:
        run()


def _state(gradient: torch.Tensor | None) -> _State:
    """What changes when something is added to a gradient."""
    return None if gradient is None else (id(gradient), gradient._version)
