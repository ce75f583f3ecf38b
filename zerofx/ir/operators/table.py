"""The table of operators, by name.

A key is an operator's name, without ``aten::``, for all its overloads; a key with an overload (``sum.dim_IntList``) has
priority for this one; one that ends in ``*`` is for all names with this prefix and no entry. A draw of a rank's own has
the facts of ATen's. To add an operator is to add an entry to the file of its family.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from zerofx.ir.op_kernels.own_draws import OWN_DRAWS
from zerofx.ir.operators import attention, convolutions, elementwise, movement, own, products, recurrent, reductions
from zerofx.ir.operators.operator import Inductor, Operator
from zerofx.torch_private.operators import OpOverload, base_name

_FAMILIES = (elementwise, products, convolutions, attention, recurrent, reductions, movement, own)
TABLE: Mapping[str, Operator] = MappingProxyType(
    {name: entry for family in _FAMILIES for name, entry in family.OPERATORS.items()}
)
_PREFIXES = tuple(name.removesuffix("*") for name in TABLE if name.endswith("*"))
_UNNAMED = Operator()
_DRAWN = {own: drawn for drawn, own in OWN_DRAWS.items()}


def facts_of(target: object) -> Operator:
    """Facts of a node's target; defaults for one that is no operator."""
    return _facts(target) if isinstance(target, OpOverload) else _UNNAMED


@functools.cache
def _facts(target: OpOverload[..., Any]) -> Operator:
    if target in _DRAWN:
        drawn = _DRAWN[target]
        counted = base_name(drawn) if drawn.overloadpacket in flop_registry else None
        # One seed is drawn, and a stream of the rank's own.
        return replace(_facts(drawn), counted_as=counted, draws_by_shape=True)
    name = base_name(target)
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    entry = (
        TABLE.get(f"{name}.{str(target).rpartition('.')[2]}") or TABLE.get(name) or TABLE.get(f"{prefix}*", _UNNAMED)
    )
    is_pointwise = entry.is_pointwise or torch.Tag.pointwise in target.tags
    inductor = Inductor.LOOP if is_pointwise and not entry.is_loop else entry.inductor
    return replace(entry, is_pointwise=is_pointwise, inductor=inductor)


def aten_entries() -> Iterator[tuple[OpOverload[..., Any], Operator]]:
    """ATen's operators with an entry of their own, each by the overload that it names, else the default one.

    Those that this torch has no more are left out.
    """
    for key, entry in TABLE.items():
        name, _, overload = key.partition(".")
        packet = None if "::" in name or name.endswith("*") else getattr(torch.ops.aten, name, None)
        if packet is not None and (overload or "default") in packet.overloads():
            yield getattr(packet, overload or "default"), entry
