"""Activations in 8 bits: which of those that wait for backward on the device backward may read rounded.

They are those of floating point that forward makes, each in memory of its own, but for these, which stay as they are:

- what no parameter goes into: masks of attention, which may be infinite, positions, rotary's sines;
- values of fewer than 4 KiB, or of less than a 16th of the largest that their layer saves: there is little to free, and
  they are mostly statistics, of which each number is of a whole row (means of norms, the sums of attention's softmax);
- what backward divides by, takes a logarithm or an exponential of, or compares, also after a cast, a sum or a product:
  a small error there is a large one in a gradient. The operator table has these arguments (``reads_exactly``).

Of relu's result backward reads whether it is positive: what is rounded to zero is not.

What is computed again, offloaded, or kept in parts in a plan is not in 8 bits: each value has one fate. All others are,
with a budget or without. Menus count what 8 bits take of them (``bytes_in_8_bits``): they compete by their prices.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from zerofx.ir.aliasing import Storage, storage_bytes, storage_source
from zerofx.ir.facts import Role, origin, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.saved import num_bytes_kept
from zerofx.passes.activations.compress import can_be_compressed
from zerofx.precision import dtype_name
from zerofx.scheduler.analysis.saved_values import is_read_exactly, saved_values
from zerofx.scheduler.plan.decisions import Absence

_LEAST_BYTES = 4096
_LEAST_PART = 1 / 16  # of the largest that its layer, or what is outside of layers, saves


def values_to_round(step: StepGraph) -> list[fx.Node]:
    """The nodes of values that backward may read rounded, in the order in which they are made."""
    values = [node for node in saved_values(step) if tensor(node).is_floating_point()]
    largest: dict[str, int] = {}
    for node in values:
        unit = step.unit_of(node)
        largest[unit] = max(largest.get(unit, 0), storage_bytes(tensor(node)))
    known: dict[fx.Node, bool] = {}
    of_parameters = _results_of_parameters(step)
    return [
        node
        for node in values
        if node in of_parameters
        and storage_bytes(tensor(node)) >= max(_LEAST_BYTES, _LEAST_PART * largest[step.unit_of(node)])
        and can_be_compressed(node)
        and not is_read_exactly(node, known)
    ]


def _results_of_parameters(step: StepGraph) -> set[fx.Node]:
    """The nodes that some parameter goes into."""
    results = set(step.placeholders(Role.PARAMETER))
    for node in step.calls():
        if not results.isdisjoint(node.all_input_nodes):
            results.add(node)
    return results


def bytes_in_8_bits(step: StepGraph) -> dict[Storage, int]:
    """Bytes in 8 bits of the values that may be so."""
    return {storage_source(node): num_bytes_kept(tensor(node).numel()) for node in values_to_round(step)}


def compresses_of(step: StepGraph, encoding: str, without: Collection[str]) -> tuple[Absence, ...]:
    """Decisions about the values that ``step``, whose other decisions are carried out, keeps for backward; ``without``
    those that are elsewhere meanwhile, all of them where ``encoding`` is ``""``."""
    return tuple(
        Absence(
            kind="compresses",
            value=node.name,
            num_bytes=storage_bytes(tensor(node)) - num_bytes_kept(tensor(node).numel()),
            reason=f"as asked: {encoding} in the place of {dtype_name(tensor(node).dtype)}",
            layer=origin(node).layer,
        )
        for node in (values_to_round(step) if encoding else ())
        if node.name not in without
    )
