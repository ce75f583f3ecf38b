"""Track the whole numbers of a batch through a forward: indices into tables, and targets of its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zerofx.deferred import DeferredTensor
from zerofx.torch_private.dispatch import TorchDispatchMode
from zerofx.torch_private.operators import pytree

_LOSSES = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
# Operators that read the rows of a table that whole numbers say, and where those are among their arguments.
_LOOKUPS = {
    torch.ops.aten.embedding.default: 1,
    torch.ops.aten._embedding_bag.default: 1,
    torch.ops.aten.gather.default: 2,
    torch.ops.aten.index_select.default: 2,
    torch.ops.aten.index.Tensor: 1,
    torch.ops.aten.take.default: 1,
}
# Operators whose results have the values of what they are given, besides views.
_COPIES = (
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.cat.default,
    torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten.roll.default,
)


class SpreadParameters:
    """Parameters for a trial, rescaled so that products with them are as large as their factors.

    A layer that changes little when training begins, or nothing since its weight is zero, then has an effect that
    exceeds rounding. If a parameter has no values yet, or only zeros, values are drawn, on ``device``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scales: dict[int, tuple[torch.nn.Parameter, float]] = {}

    def __call__(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The tensor to compute with instead of a parameter."""
        if not parameter.is_floating_point() or not parameter.numel():
            return parameter
        if id(parameter) not in self._scales:
            self._scales[id(parameter)] = parameter, _scale_of(parameter)
        scale = self._scales[id(parameter)][1]
        if scale == 1:
            return parameter
        if scale:
            return parameter.detach() * scale
        generator = torch.Generator(self._device).manual_seed(list(self._scales).index(id(parameter)))
        noise = torch.randn(parameter.shape, generator=generator, device=self._device)
        is_matrix = parameter.dim() > 1
        return (noise / math.sqrt(noise[0].numel()) if is_matrix else 1 + noise / 10).to(parameter.dtype)


def _scale_of(parameter: torch.nn.Parameter) -> float:
    """The factor that gives the rows of a parameter norm 1 on average; 1 without rows, 0 without values."""
    if is_without_values(parameter):
        return 0.0
    mean_square = float(parameter.detach().float().square().mean())
    if mean_square == 0 or parameter.dim() < 2:
        return float(mean_square > 0)
    return 1 / math.sqrt(mean_square * parameter[0].numel())


def is_without_values(tensor: torch.Tensor) -> bool:
    """True if a tensor is deferred, on ``meta``, or an expanded NaN, as where a step has it in slices."""
    if isinstance(tensor, DeferredTensor) or tensor.is_meta:
        return True
    return bool(tensor.numel()) and not any(tensor.stride()) and bool(tensor.detach()[(0,) * tensor.dim()].isnan())


class Uses(TorchDispatchMode):
    """While open, tracks the whole numbers of a batch's tensors.

    ``ignored``: the target value that a loss leaves out, by the name of the target tensor. ``looked_up``: the tensors
    that index rows of a table. ``has_nan``: whether an operator gave a NaN. ``value_of`` gives the tensor to compute
    with instead of a parameter.
    """

    def __init__(
        self, named: Mapping[str, torch.Tensor], value_of: Callable[[torch.nn.Parameter], torch.Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._sources = {id(tensor): (tensor, frozenset([name])) for name, tensor in named.items()}
        self._value_of = value_of
        self.ignored: dict[str, int] = {}
        self.looked_up: set[str] = set()
        self.has_nan = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.nn.Parameter, self._value_of, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func in _LOSSES:
            self.ignored |= dict.fromkeys(self._names(args[1]), args[4])
        elif func in _LOOKUPS:
            self.looked_up |= self._names(args[_LOOKUPS[func]])
        names = self._names(args) if func.is_view or func in _COPIES else frozenset[str]()
        if "empty" in func.name():  # whose values are anything
            return result
        for tensor in pytree.tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.is_floating_point():
                self.has_nan = self.has_nan or bool(tensor.isnan().any())
            elif names:
                self._sources[id(tensor)] = tensor, names
        return result

    def _names(self, given: Any) -> frozenset[str]:
        """The batch's tensors whose values are in ``given``."""
        known = (self._sources.get(id(leaf)) for leaf in pytree.tree_leaves(given))
        return frozenset[str]().union(*(source[1] for source in known if source is not None))
