"""Peak memory of a plan, and a lower bound of it for all shorter prefixes of the same moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import fx

from zerofx.ir import ops
from zerofx.ir.edit import consumers
from zerofx.ir.facts import copied_from
from zerofx.ir.graph import StepGraph
from zerofx.ir.operators.operator import Traffic
from zerofx.ir.operators.table import facts_of
from zerofx.ir.ops import gather_values
from zerofx.scheduler.cost.liveness import Liveness

_BRINGING: Final = frozenset({ops.reload, ops.all_gather, ops.gather_on_node, gather_values})


@dataclass(frozen=True)
class Held:
    """The device's peak in bytes, and ``firm_bytes`` of it: what stays between steps, and values that were computed
    before the peak's node and are read after it; not those that are recomputed, gathered or reloaded, nor those that
    are only there for what shorter prefixes do elsewhere, or not at all."""

    peak_bytes: int
    firm_bytes: int


def peak_memory(step: StepGraph, live: Liveness) -> Held:
    """Peak bytes of ``step``, whose bytes are ``live``, and the part that shorter prefixes hold too."""
    peak = live.peak_node
    if peak is None:
        return Held(live.peak_bytes, live.peak_bytes)
    nodes = next((nodes for nodes in live.compiled if peak in nodes), (peak,))
    freed = live.compiled[nodes].freed if nodes in live.compiled else frozenset()
    order = step.positions()
    begin = order[nodes[0]]
    firm = live.persistent_bytes

    def is_wanted(owner: fx.Node) -> bool:
        """True if a value that every shorter prefix has, too, is read at the peak or later.

        What is computed again is not in all of them, and a buffer gets its next value after what reads the one before.
        """
        later = (reader for reader in consumers(owner) if order[reader] >= begin and copied_from(reader) is None)
        return any(facts_of(reader.target).traffic is not Traffic.OVERWRITES for reader in later)

    for storage, size in live.sizes.items():
        owner, last_use = storage[0], live.last_use.get(storage)
        is_there = order[owner] < begin and (last_use is None or order[last_use] >= begin) and storage not in freed
        if is_there and copied_from(owner) is None and owner.target not in _BRINGING and is_wanted(owner):
            firm += size
    return Held(live.peak_bytes, firm)
