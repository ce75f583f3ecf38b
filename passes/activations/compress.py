"""Keep activations in 8 bits between forward and backward.

    forward                         forward
    a = relu(x)                     a = relu(x)
    y = mm(a, w)                    y = mm(a, w)
    ...                             packed_a = quantise_saved(a, "int8", [0, 1])  # codes, scales; a dies here
    ...                             codes_a = packed_a[0]; scales_a = packed_a[1]
    backward                        backward
    ...                             a_again = restore_saved(codes_a, scales_a, "int8", [..], [..], float32)
    gw = mm(t(a), gy)               gw = mm(t(a_again), gy)

Forward reads the value as it is, and all of backward the same rounded one, which has the strides of the original: what
is computed again is computed from it too. It is rounded after its last reader in forward, and restored before its first
in backward, where compiled regions do both in the kernels around them.

Does not handle: views, values that are written in place, that a loop hands on, or that a later micro-batch's forward
reads, results of the step, values that are not of 16 or 32 bits, or that leave gaps in their memory. A plan that has
one in 8 bits is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.aliasing import storage_bytes
from zerofx.ir.edit import consumers, erase_unread, insert_call, node_named, read_instead, skip_getitems
from zerofx.ir.facts import Origin, Phase, origin, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.saved import DTYPES, memory_order
from zerofx.passes.activations.offload import refusal
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class Compress:
    """Round values after their last use in forward, and restore them before their first in backward."""

    name: str = "compress"

    def run(self, step: StepGraph, plan: Plan) -> None:
        compress(step, plan.compresses, plan.saved)


def compress(step: StepGraph, decisions: Sequence[Absence], encoding: str) -> None:
    """Carry decisions out in place.

    Raises:
        PlanError: a value cannot be kept so.
    """
    by_name = step.nodes_by_name()
    values = [node_named(by_name, decision.value) for decision in decisions]
    for value in values:
        if not can_be_compressed(value):
            raise PlanError(
                f"expected to keep {value.name} in {encoding}, found that it is no value of forward, of 16 or 32 bits "
                f"in memory of its own, that backward alone still reads: make the plan anew"
            )
    for value in values:
        _compress(step.graph, value, encoding)
    if values:
        erase_unread(step.graph)


def can_be_compressed(value: fx.Node) -> bool:
    """True if a node's value is one of forward that can wait for backward in 8 bits."""
    if refusal(value) is not None or tensor(value).dtype not in DTYPES or not _is_dense(tensor(value)):
        return False
    readers = sorted(consumers(value))
    first = next((reader for reader in readers if origin(reader).phase is Phase.BACKWARD), None)
    # What a loop hands on, or a later forward reads, is needed as it is.
    handed_on = any(reader.target in ops.AROUND_MICRO_BATCHES for reader in readers)
    return (
        first is not None
        and not handed_on
        and all(reader < first or origin(reader).phase is Phase.BACKWARD for reader in readers)
    )


def _is_dense(value: Tensor) -> bool:
    """True if the elements are all there is in the value's memory, each once."""
    in_order = value.permute(memory_order(value.shape, value.stride()))
    return in_order.is_contiguous() and storage_bytes(value) == value.numel() * value.element_size()


def _compress(graph: fx.Graph, value: fx.Node, encoding: str) -> None:
    readers, name, fake = sorted(consumers(value)), value.name, tensor(value)
    backward = [reader for reader in readers if origin(reader).phase is Phase.BACKWARD]
    last = next((reader for reader in reversed(readers) if origin(reader).phase is Phase.FORWARD), value)
    where = Origin(origin(last).layer, Phase.FORWARD)
    with graph.inserting_before(skip_getitems(last).next):
        args: tuple[object, ...] = (value, encoding, memory_order(fake.shape, fake.stride()))
        packed = insert_call(graph, ops.quantise_saved, args, where, name=f"packed_{name}")
        codes, scales = (
            insert_call(graph, operator.getitem, (packed, place), where, name=f"{part}_{name}")
            for place, part in enumerate(("codes", "scales"))
        )
    where = Origin(origin(backward[0]).layer, Phase.BACKWARD)
    with graph.inserting_before(backward[0]):
        args = (codes, scales, encoding, list(fake.shape), list(fake.stride()), fake.dtype)
        again = insert_call(graph, ops.restore_saved, args, where, name=f"{name}_again")
    copies = {value: again}
    for reader in backward:
        read_instead(reader, value, copies, where)
