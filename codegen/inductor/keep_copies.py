"""Have copies of what is written into made of a product with one: Inductor reads what was copied in their place.

    before = clone(a)               kept = mul(a, 1)
    copy_(a, b)               ->    before = clone(kept)
    copy_(b, before)                copy_(a, b); copy_(b, before)

Does not handle: copies of what nothing writes into, which Inductor may leave out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerofx.codegen.inductor.traced import TracedRegion, call
from zerofx.ir.aliasing import mutated_inputs, storage_source
from zerofx.ir.facts import value

_aten = torch.ops.aten

# Which argument is what they copy.
_COPIES = {_aten.clone.default: 0, _aten.copy.default: 1}


@dataclass(frozen=True)
class KeepCopies:
    """Have copies of what is written into made of a product with one."""

    name: str = "keep_copies"

    def run(self, region: TracedRegion) -> None:
        graph = region.graph
        written = {storage_source(entry) for node in graph.nodes for entry in mutated_inputs(node)}
        for node in [element for element in graph.nodes if element.target in _COPIES]:
            source = node.args[_COPIES[node.target]]
            if storage_source(source) in written:
                is_bool = value(source).dtype is torch.bool
                same, by = (_aten.bitwise_or.Scalar, False) if is_bool else (_aten.mul.Scalar, 1)
                with graph.inserting_before(node):
                    node.replace_input_with(source, call(graph, same, (source, by)))
