"""Read parameters of other steps' models as those steps have them, and make of them what is computed with.

    y = mm(x, t(w))     w: bfloat16         ->      low = _to_copy(w, dtype=bfloat16)       w: float32
                                                    y = mm(x, t(low))

A forward computes with parameters of other models in the precision of its own step. What it reads lies in the dtype
that the step has it in that trains it, and is cast in front of each reader, in forward and in backward: what is cast
waits for nothing, and a bucket is gathered and released as it would be without.

Does not handle: a step's own parameters, which lie as it computes with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import fx

from zerofx.ir.edit import consumers, erase_unread, is_view_of, view_again
from zerofx.ir.facts import Role, origin, placeholder, set_value, tensor
from zerofx.ir.graph import ParameterInfo, StepGraph, insert_call

_aten = torch.ops.aten


@dataclass(frozen=True)
class Borrow:
    """Read parameters of other steps' models as those steps have them. ``held``: as what each is there, by name."""

    held: Mapping[str, ParameterInfo] = field(default_factory=lambda: MappingProxyType({}))
    name: str = "borrow"

    def run(self, step: StepGraph) -> None:
        for node in list(step.placeholders(Role.PARAMETER)):
            held = self.held.get(placeholder(node).name)
            if held is not None and held.compute_dtype != tensor(node).dtype:
                _cast(step, node, held.compute_dtype)
        step.parameters = tuple(self.held.get(info.name, info) for info in step.parameters)
        erase_unread(step.graph)


def _cast(step: StepGraph, parameter: fx.Node, held: torch.dtype) -> None:
    """Have ``parameter`` in the dtype ``held``, and cast it in front of each of its readers."""
    computed, order = tensor(parameter), step.positions()
    set_value(parameter, computed.detach().to(held))
    for reader in sorted(consumers(parameter), key=order.__getitem__):
        where = origin(reader)
        with step.graph.inserting_before(reader):
            kwargs = {"dtype": computed.dtype}
            cast = insert_call(step.graph, _aten._to_copy.default, (parameter,), where, kwargs, fake=computed.detach())
            copies = {parameter: cast}
            for source in list(reader.all_input_nodes):
                if is_view_of(source, parameter):
                    reader.replace_input_with(source, view_again(step.graph, source, copies, where))
