"""A step over parameters that lie whole on different ranks, for an optimizer that combines them.

Every rank runs the optimizer's own ``step`` over all parameters, in their order. A parameter of this rank's has values;
another's is a tensor without. What is computed of one parameter stays with its owner. Where something is computed of
several (a sum of norms, a factor for all), read as a number, or added to what all ranks have, its parts are sent to all
ranks first, and from there on all have it: sums are made in the order and with the bits of one process.

    norm = p.grad.norm()            # at the owner of p
    total = total + norm ** 2       # total: what all ranks have, so norm ** 2 is sent to all
    p.mul_(1 / total.sqrt())        # at the owner of p, with what all ranks have
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from zerofx.errors import OptimizerError
from zerofx.optimizers.blame import blame
from zerofx.torch_private.dispatch import TorchDispatchMode, without_modes
from zerofx.torch_private.operators import OpOverload, base_name, call_one_by_one, is_foreach, pytree, schema_of

# Sends a tensor from its owner, a rank, to all; there it is without values on others.
Share = Callable[[torch.Tensor, int], torch.Tensor]

_READS: Final = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "item"})
# Elements of what is sent to all ranks: numbers and small tables, never a parameter.
_MOST_SHARED: Final = 1 << 12
_OWNER: Final = "_zerofx_owner"


def set_owner(tensor: torch.Tensor, owner: int) -> None:
    """Note that ``owner`` alone has the values of ``tensor``."""
    setattr(tensor, _OWNER, owner)


def owner_of(tensor: torch.Tensor) -> int | None:
    """The rank that alone has the values of a tensor; None where all ranks have them."""
    owner: int | None = getattr(tensor, _OWNER, None)
    return owner


class Combined(TorchDispatchMode):
    """While it is open, operators run where their tensors have values, and what several ranks need is sent to all."""

    def __init__(self, name: str, share: Share) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._name, self._share = name, share

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_foreach(func):
            with self:
                return call_one_by_one(func, args, kwargs)
        owners = {owner_of(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        if not owners - {None}:
            return func(*args, **kwargs)
        owner = self._place(func, args, kwargs, owners)
        args, kwargs = pytree.tree_map_only(
            torch.Tensor,
            lambda leaf: leaf if owner_of(leaf) in (None, owner) else self._send(func, leaf),
            (args, kwargs),
        )
        result = func(*args, **kwargs)
        if owner is not None:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    set_owner(leaf, owner)
        return result

    def _place(
        self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], owners: set[int | None]
    ) -> int | None:
        """The rank at which an operator runs; None for all of them."""
        arguments = schema_of(func).arguments
        values = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
        written = [
            value for argument, value in values if argument.alias_info is not None and argument.alias_info.is_write
        ]
        targets = {owner_of(leaf) for leaf in pytree.tree_leaves(written) if isinstance(leaf, torch.Tensor)}
        if len(targets) > 1:
            raise self._refuse(f"calls {func}, which writes to several parameters at once")
        if targets:
            return targets.pop()
        alone = owners - {None}
        return None if base_name(func) in _READS or len(alone) > 1 else alone.pop()

    def _send(self, func: OpOverload[..., Any], tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which one rank has, on all ranks."""
        owner = owner_of(tensor)
        assert owner is not None
        if tensor.numel() > _MOST_SHARED:
            raise self._refuse(
                f"calls {func} on a tensor of shape {list(tensor.shape)} and what belongs to another parameter"
            )
        with without_modes():
            return self._share(tensor, owner)

    def _refuse(self, what: str) -> OptimizerError:
        return OptimizerError(
            f"expected an optimizer that combines parameters by numbers alone, found that {self._name} "
            f"{what}{blame()}: whole parameters lie on different ranks; use one that works on each by itself"
        )


def check_apart(tree: Any, name: str) -> None:
    """Check that groups or attributes hold nothing of which one rank alone has the values.

    Raises:
        OptimizerError: they do.
    """
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and owner_of(leaf) is not None:
            raise OptimizerError(
                f"expected {name} to keep what it computes of one parameter in state[p], found a tensor of shape "
                f"{list(leaf.shape)} in its groups or attributes: other ranks have no values of it"
            )
