"""Parameters of a stage's module, those of ``forward``, and a call that fills them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

import torch

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
"""Where torch's own wrappers keep the module that they call."""

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (*_BY_POSITION, Parameter.KEYWORD_ONLY)
_ANYTHING = Signature(
    [Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)]
)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a module's ``forward``."""

    text: str  # the module's class and the signature, for errors
    named: Mapping[str, Any]  # all that have a name to be given by, with their defaults
    positional: Sequence[Parameter]  # those of them that may be given by position, in order
    required: frozenset[str]  # names of those without a default
    takes_any_name: bool  # whether there is a ``**kwargs``
    # where one tensor by position is a whole call, the parameter that takes it, ``*args`` being
    # one; else None
    sole: str | None

    def bind(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The call with these values, as one would write it: by position as far as that goes.

        So hooks of the module and whatever wraps it see the arguments that they are used to.

        Returns:
            Positional arguments, and the others by name.
        """
        fixed = [p.name in values and p.kind is p.POSITIONAL_ONLY for p in self.positional]
        last = max((place for place, is_fixed in enumerate(fixed) if is_fixed), default=-1)
        by_position: list[Any] = []
        rest = dict(values)
        for place, parameter in enumerate(self.positional):
            if parameter.name not in rest and place > last:
                break
            by_position.append(rest.pop(parameter.name, parameter.default))
        if self.sole in rest and self.sole not in self.named:
            by_position.append(rest.pop(self.sole))
        return by_position, rest


def parameters_of(module: torch.nn.Module) -> Parameters:
    """The parameters of a module, scripted or traced ones included, or of the one that it wraps.

    A wrapper, as `torch.compile`, `torch.nn.DataParallel` or checkpointing make it, takes
    ``(*args, **kwargs)`` and says nothing: then the module inside it tells.
    """
    signature, inner = _signature(module), module
    for within in _wrapped_by(module):
        signature, inner = _signature(within), within
    text = f"{type(inner).__qualname__}.forward{signature}"
    if inner is not module:
        text += f" (in {type(module).__qualname__})"
    every = signature.parameters.values()
    return Parameters(
        text=text,
        named={p.name: p.default for p in every if p.kind in _NAMED},
        positional=[p for p in every if p.kind in _BY_POSITION],
        required=frozenset(p.name for p in every if _is_required(p)),
        takes_any_name=any(p.kind is Parameter.VAR_KEYWORD for p in every),
        sole=_sole(signature),
    )


def _wrapped_by(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules inside a wrapper, from without, down to the first that says what it takes."""
    while _is_anything(_signature(module)):
        known = [module._modules[name] for name in _WRAPPED if name in module._modules]
        inner, *others = known[:1] or [*module.children()] or [None]
        if inner is None or others or not _has_forward(inner):
            return
        yield inner
        module = inner


def _signature(module: torch.nn.Module) -> Signature:
    forward: Any = module.forward
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):  # made in C
        schema = getattr(forward, "schema", None)
    return _ANYTHING if schema is None else _of_schema(schema)


def _of_schema(schema: Any) -> Signature:
    """The signature of a traced or scripted method, whose first argument is the module."""
    kinds = {False: Parameter.POSITIONAL_OR_KEYWORD, True: Parameter.KEYWORD_ONLY}
    return Signature(
        [
            Parameter(
                one.name.replace(".", "_"),
                kinds[one.kwarg_only],
                default=one.default_value if one.has_default_value() else Parameter.empty,
            )
            for one in schema.arguments[1:]
        ]
    )


def _is_anything(signature: Signature) -> bool:
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return kinds == [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]


def _has_forward(module: torch.nn.Module) -> bool:
    """Whether it can be called: a mere container of modules cannot."""
    return "forward" in vars(module) or type(module).forward is not torch.nn.Module.forward


def _is_required(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty and parameter.kind in _NAMED


def _sole(signature: Signature) -> str | None:
    every = signature.parameters.values()
    required = [p for p in every if _is_required(p)]
    if len(required) == 1 and required[0].kind in _BY_POSITION:
        return required[0].name
    rest = [p.name for p in every if p.kind is Parameter.VAR_POSITIONAL]
    named = any(p.kind in _NAMED for p in every)
    return f"*{rest[0]}" if rest and not named else None
