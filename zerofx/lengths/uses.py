"""What a forward does with the whole numbers of its batch: looks them up, or takes them for targets of its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

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


class Spread:
    """What stands for parameters in a trial: theirs, times what makes products of them as large as their factors.

    A layer that changes little when training begins, or nothing since its weight is zero, has an effect then that can
    be told from rounding.
    """

    def __init__(self) -> None:
        self._scales: dict[int, tuple[torch.nn.Parameter, float]] = {}

    def __call__(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """What to compute with in the place of a parameter."""
        values = parameter.detach()
        if not values.is_floating_point() or not values.numel():
            return parameter
        if id(parameter) not in self._scales:
            mean_square = float(values.float().square().mean())
            num_terms = values[0].numel() if values.dim() > 1 else 1
            scale = 0.0 if mean_square == 0 else (mean_square * num_terms) ** -0.5 if values.dim() > 1 else 1.0
            self._scales[id(parameter)] = parameter, scale
        scale = self._scales[id(parameter)][1]
        if scale:
            return values if scale == 1 else values * scale
        generator = torch.Generator(values.device).manual_seed(list(self._scales).index(id(parameter)))
        noise = torch.randn(values.shape, generator=generator, device=values.device)
        return noise.div(math.sqrt(max(values.shape[-1:] or (1,)))).to(values.dtype)


class Uses(TorchDispatchMode):
    """While open, watches where the whole numbers of a batch's tensors go.

    ``ignored``: the value of a target that a loss leaves out, by the name of the tensor that its targets come from.
    ``looked_up``: the tensors that say which rows of a table are read. ``has_nan``: whether an operator gave a NaN.
    ``value_of`` gives what is computed with in the place of a parameter.
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
