"""Calls whose backward depends on values in eager mode: each is traced with one operator that handles all values.

x[mask] = values                     values get gradient[mask], as many rows as the mask names, summed where there
x.masked_fill(mask, value)           are fewer values; here masked_sum(gradient, mask, values.shape) does both
x.prod(dim)                          a quotient where no value is zero; here prod_gradient(gradient, x, result, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zerofx.ir import ops


def find_traceable_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """The call of torch's function of this name in a form whose backward can be traced; None if it needs none."""
    arguments = (*args, *kwargs.values())
    match name.removesuffix("_"), arguments:
        case "__setitem_", [x, mask, values] if _puts(x, mask, values):
            return lambda: x.copy_(
                _spread(x, mask, values) if _is_one(x, mask, values) else _put(x, mask, values, False)
            )
        case "index_put", [x, [mask], values, *rest] if _puts(x, mask, values):
            outcome = partial(_put, x, mask, values, *rest)
        case "masked_fill", [x, mask, torch.Tensor() as value] if value.requires_grad:
            outcome = partial(_Filled.apply, x, mask, value)
        case "prod", [x, *rest] if isinstance(x, torch.Tensor) and x.requires_grad:
            return partial(_prod, x, *args[1:], **kwargs)
        case _:
            return None
    return (lambda: x.copy_(outcome())) if name.endswith("_") else outcome


def _puts(x: Any, mask: Any, values: Any) -> bool:
    """True if ``x[mask] = values`` writes values with a gradient to the elements of a mask."""
    return (
        all(isinstance(argument, torch.Tensor) for argument in (x, mask, values))
        and mask.dtype == torch.bool
        and 0 < mask.dim() <= x.dim()
        and mask.shape == x.shape[: mask.dim()]
        and values.requires_grad
        and values.dtype == x.dtype
    )


def _is_one(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> bool:
    """True if all rows get one value."""
    num_dims = x.dim() - mask.dim()
    return values.dim() <= num_dims or (values.dim() == num_dims + 1 and len(values) == 1)


def _spread(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    rows = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
    return torch.where(rows, _Spread.apply(value, mask, x.shape), x)  # type: ignore[no-untyped-call]


def _put(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    return _Put.apply(x, mask, values, accumulate)  # type: ignore[no-any-return,no-untyped-call]


def _prod(
    x: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return _Prod.apply(x if dtype is None else x.to(dtype), dim, keepdim)  # type: ignore[no-any-return,no-untyped-call]


class _Spread(torch.autograd.Function):
    """A value in each place of a shape, whose gradient is that of the rows which a mask names."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, mask: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.size = value.shape
        return value.expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return ops.masked_sum(gradient, mask, ctx.size), None, None


class _Put(torch.autograd.Function):
    """Values for the rows that a mask names, or added to them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor, accumulate: bool) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.size, ctx.accumulate = values.shape, accumulate
        return x.index_put((mask,), values, accumulate)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor, None]:
        (mask,) = ctx.saved_tensors
        of_x = gradient if ctx.needs_input_grad[0] else None
        if of_x is not None and not ctx.accumulate:
            of_x = of_x.index_put((mask,), gradient.new_zeros(1))
        return of_x, None, ops.masked_sum(gradient, mask, ctx.size), None


class _Filled(torch.autograd.Function):
    """One number for each element that a mask names."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return x.masked_fill(mask, value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor]:
        (mask,) = ctx.saved_tensors
        of_x = gradient.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        return of_x, None, ops.masked_sum(gradient, mask.expand(gradient.shape), [])


class _Prod(torch.autograd.Function):
    """The product of all values, or of those along a dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
        result = x.prod() if dim is None else x.prod(dim, keepdim)
        ctx.save_for_backward(x, result)
        ctx.given = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ops.prod_gradient(gradient, *ctx.saved_tensors, *ctx.given), None, None
