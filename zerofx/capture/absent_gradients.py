"""Stand-ins for ``p.grad`` while a step trains ``p``: gradients exist only within the step, and reading one raises.

Scripts that clip, scale or log gradients between ``loss.backward()`` and ``optimizer.step()`` find none after ``loss =
step(batch)``. With ``p.grad = None`` they would silently do nothing (``clip_grad_norm_`` skips parameters without a
gradient). An ``AbsentGradient`` has shape, dtype and device, but no memory, and raises an error when it is computed
with. ``zero_grad()`` is harmless and may stay, and a backward pass of the user's own accumulates as into ``None``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerofx.errors import UsageError
from zerofx.torch_private.dispatch import without_torch_functions
from zerofx.torch_private.operators import pytree
from zerofx.torch_private.tensors import make_wrapper

_aten = torch.ops.aten
_HARMLESS = {_aten.zero_.default, _aten.detach.default, _aten.detach_.default, _aten.alias.default}


class AbsentGradient(torch.Tensor):
    """A gradient that does not exist yet; once a gradient has been added to it, that gradient."""

    value: torch.Tensor | None

    @staticmethod
    def create(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> AbsentGradient:
        absent = make_wrapper(AbsentGradient, shape, dtype=dtype, device=device)
        absent.value = None
        return absent

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is not typed
        return "AbsentGradient()" if self.value is None else repr(self.value)

    # What torch does to memory without an operator, and so past ``__torch_dispatch__``.

    def share_memory_(self) -> AbsentGradient:
        if self.value is not None:
            self.value.share_memory_()
        return self

    def numpy(self, *, force: bool = False) -> Any:
        return _value(self).numpy(force=force)

    def tolist(self) -> Any:
        return _value(self).tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types a default that does nothing
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, AbsentGradient) and first.value is None:
            if func in _HARMLESS:
                return first
            if func is _aten._to_copy.default:  # model.to(...)
                options = kwargs or {}
                dtype, device = options.get("dtype") or first.dtype, options.get("device") or first.device
                return AbsentGradient.create(first.shape, dtype, torch.device(device))
            if func is _aten.add_.Tensor and not kwargs and not isinstance(args[1], (AbsentGradient, int, float)):
                first.value = args[1].clone()  # a backward pass of the user's own
                return first
        if func is _aten._foreach_zero_.default and first is not None:
            for gradient in first:
                if not isinstance(gradient, AbsentGradient):
                    gradient.zero_()
                elif gradient.value is not None:
                    gradient.value.zero_()
            return None
        result = func(
            *pytree.tree_map_only(AbsentGradient, _value, args),
            **pytree.tree_map_only(AbsentGradient, _value, kwargs or {}),
        )
        return first if isinstance(first, AbsentGradient) and result is first.value else result


def _value(gradient: AbsentGradient) -> torch.Tensor:
    if gradient.value is None:
        raise UsageError(
            "expected no use of p.grad after step(batch), found it read: gradients live within the step, which has "
            "reduced and applied them, so clipping, scaling or changing them here would do nothing. Give "
            "zerofx.compile max_grad_norm= instead of clip_grad_norm_ (step.grad_norm is the norm; "
            "max_grad_norm=math.inf only takes it), or keep_gradients= to read single ones by step.full(name, 'grad'), "
            "and remove the call"
        )
    return gradient.value


class AbsentGradients:
    """The absent gradients of a model's trained parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._absent: dict[nn.Parameter, AbsentGradient] = {}

    def put(self) -> None:
        """Put one wherever there is no gradient."""
        with without_torch_functions():  # which parameters that are held have
            for parameter in self._trained:
                if parameter.grad is None:
                    # Made here, not earlier: a model without values gets its device with them.
                    absent = AbsentGradient.create(parameter.shape, parameter.dtype, parameter.device)
                    parameter.grad = self._absent[parameter] = absent

    def remove(self) -> None:
        """Leave parameters without a gradient, or with the one that a backward pass of the user's has added."""
        for parameter, absent in self._absent.items():
            if parameter.grad is absent:
                parameter.grad = absent.value
        self._absent.clear()
