"""The one way to define an operator of zerofx's own, with its schema, its fake and its kernels in one statement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from zerofx.torch_private.operators import OpOverload

_library = torch.library.Library("zerofx", "DEF")  # torch unregisters the operators when this object goes


def own_operator(
    schema: str,
    fake: Callable[..., Any],
    *,
    kernel: Callable[..., Any] | None = None,
    cpu: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> OpOverload[..., Any]:
    """Define ``zerofx::`` and ``schema``, and return it; ``fake`` gives results for fake tensors.

    ``kernel`` runs on any device, ``cpu`` and ``cuda`` on theirs. An operator without is there for step graphs alone.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=tuple(tags))
    dispatched = {"Meta": fake, "CompositeExplicitAutograd": kernel, "CPU": cpu, "CUDA": cuda}
    for key, implementation in dispatched.items():
        if implementation is not None:
            _library.impl(name, implementation, key)
    packet, _, overload = name.partition(".")
    operator: OpOverload[..., Any] = getattr(getattr(torch.ops.zerofx, packet), overload or "default")
    return operator


def launcher(module: str, name: str) -> Callable[..., Any]:
    """A kernel's launch, of a module of ``codegen``; what it takes to build kernels is imported with the first."""

    def launch(*args: Any) -> Any:
        return getattr(import_module(f"zerofx.codegen.{module}"), name)(*args)

    return launch
