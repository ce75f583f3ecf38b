"""Draws of one rank's part of a value: ATen's random operators, from a stream that the rank has for itself.

    mask = aten.bernoulli.p(x, 0.9)                    # of a value that all ranks have: alike on all of them
    mask = zerofx.own_bernoulli.p(x, 0.9, rank=rank)   # of this rank's part: unlike on each

Ranks that share a computation have torch's generators in one state (``zerofx/session/seeds.py``), and draw from them
what all of them have. A draw of a part takes a seed from there, the same on all ranks, and draws with it and the rank's
number; then the generator goes on as if nothing else had been drawn. So there is one state, which checkpoints have.

Operators without an own form are run by every rank on whole values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from zerofx.ir import ops
from zerofx.ir.op_kernels.own_operator import own_operator
from zerofx.torch_private.operators import OpOverload, schema_of

_aten = torch.ops.aten
_DRAWN: tuple[OpOverload[..., Any], ...] = (
    _aten.bernoulli.p,
    _aten.bernoulli.default,
    _aten.native_dropout.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.uniform.default,
    _aten.exponential.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    ops.bernoulli_into,
)
_STRIDE = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd: ranks' seeds differ in the 32 bits that CPUs read


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that random operations on ``device`` draw from unless told otherwise."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    generator: torch.Generator = module.default_generators[index]
    return generator


@contextlib.contextmanager
def _own_stream(device: torch.device, rank: torch.Tensor) -> Iterator[None]:
    generator = generator_of(device)
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    before = generator.get_state()
    generator.manual_seed((seed + int(rank) * _STRIDE) % 2**63)
    try:
        yield
    finally:
        generator.set_state(before)


def _kernel(target: OpOverload[..., Any]) -> Callable[..., Any]:
    def draw(first: torch.Tensor, *args: Any, rank: torch.Tensor, **kwargs: Any) -> Any:
        with _own_stream(first.device, rank):
            return target(first, *args, **kwargs)

    return draw


def _fake(target: OpOverload[..., Any]) -> Callable[..., Any]:
    def fake(*args: Any, rank: torch.Tensor, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return fake


def _define(target: OpOverload[..., Any]) -> OpOverload[..., Any]:
    """The own form of an operator: its arguments, and the rank's number as a tensor on the host, int64, shape []."""
    arguments, results = str(schema_of(target)).partition("::")[2].rsplit(") -> ", 1)
    keywords = arguments if "*, " in arguments else f"{arguments}, *"
    return own_operator(
        f"own_{keywords}, Tensor rank) -> {results}", _fake(target), kernel=_kernel(target),
        tags=(torch.Tag.nondeterministic_seeded,),
    )  # fmt: skip


OWN_DRAWS: Mapping[OpOverload[..., Any], OpOverload[..., Any]] = MappingProxyType(
    {target: _define(target) for target in _DRAWN}
)
"""Random operators, and the own form of each."""
