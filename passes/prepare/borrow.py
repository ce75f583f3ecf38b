"""Read parameters of other steps' models as those steps have them, and make of them what is computed with.

    y = mm(x, t(w))     w: bfloat16         ->      low = _to_copy(w, dtype=bfloat16)       w: float32
                                                    y = mm(x, t(low))
    y = mm(x, t(w))                         ->      whole = cat(w[0:2], w[2:4])             two slices
                                                    y = mm(x, t(whole))

A forward computes with whole parameters of other models, in the precision of its own step. What it reads lies as the
step has it that trains it, in that one's dtype, and perhaps in slices. It is cast, and put together, in front of each
reader, in forward and in backward: what comes of it waits for nothing, and buckets are gathered and released as they
would be without.

Does not handle: a step's own parameters, which lie as it computes with them. Products with slices one after the other,
as the other step may have them: their sums are rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import fx

from zerofx.ir.edit import cast, consumers, erase_unread, insert_call, insert_parameter, read_instead
from zerofx.ir.facts import Role, origin, placeholder, set_slice, set_value, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.parameters import ParameterInfo

_aten = torch.ops.aten


@dataclass(frozen=True)
class Borrow:
    """Read parameters of other steps' models as those steps have them. ``held``: as what each is there, by name."""

    held: Mapping[str, Sequence[ParameterInfo]] = field(default_factory=lambda: MappingProxyType({}))
    name: str = "borrow"

    def run(self, step: StepGraph) -> None:
        for node in list(step.placeholders(Role.PARAMETER)):
            held = self.held.get(placeholder(node).name, ())
            if len(held) > 1 or any(info.compute_dtype != tensor(node).dtype for info in held):
                _read(step, node, held)
        step.parameters = tuple(info for own in step.parameters for info in self.held.get(own.name, (own,)))


def _read(step: StepGraph, parameter: fx.Node, held: Sequence[ParameterInfo]) -> None:
    """Read what is ``held`` in the place of a parameter, which is made of it for each of its readers."""
    computed, order = tensor(parameter).detach(), step.positions()
    readers = sorted(consumers(parameter), key=order.__getitem__)
    parts = (
        [parameter]
        if len(held) == 1
        else [insert_parameter(step, parameter, info.name, step.fake(info.shape, info.compute_dtype)) for info in held]
    )
    set_value(parameter, computed.to(held[0].compute_dtype))
    for reader in readers:
        where = origin(reader)
        with step.graph.inserting_before(reader):
            read = parts[0]
            if len(parts) > 1:
                read = insert_call(step.graph, _aten.cat.default, (list(parts),), where)
                set_slice(read, placeholder(parameter).name)  # slices are there for it alone
            read = cast(step.graph, read, computed.dtype, where)
        read_instead(reader, parameter, {parameter: read}, where)
    erase_unread(step.graph)
    if parameter not in parts:
        step.graph.erase_node(parameter)
