"""Device bytes by category, parameters, gradients, activations and so on, at every node of a simulated step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import node_bytes
from zerofx.ir.facts import DEVICE, Phase, Role, origin, placeholder, tier_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import slice_gathered
from zerofx.scheduler.cost.liveness import Liveness


class Category(StrEnum):
    """A kind of bytes on the device."""

    PARAMETERS = "parameters"  # what stays between steps: whole buckets or slices, and fp32 master copies
    GATHERED = "gathered"  # whole buckets, from gather to release, and slices on their way from a slower tier
    GRADIENTS = "gradients"  # flat gradient buffers, and reduced slices
    OPTIMIZER = "optimizer states"  # and what of them, of masters and of slices is there for an update only
    BUFFERS = "buffers"  # the model's buffers and constants, and what forward or loss_fn uses of others
    BATCH = "batch"
    ACTIVATIONS = "activations"  # made in forward, and what is reloaded of it
    TEMPORARIES = "temporaries"  # made in backward or update, or inside an operator or region
    GAPS = "arena's gaps"  # what an arena and all outside of it take beyond what is live


OF_ROLE: Mapping[Role, Category] = {
    Role.PARAMETER: Category.PARAMETERS,
    Role.FULL: Category.PARAMETERS,
    Role.SHARD: Category.PARAMETERS,
    Role.PART: Category.PARAMETERS,
    Role.MASTER: Category.PARAMETERS,
    Role.STATE: Category.OPTIMIZER,
    Role.DELAYED: Category.OPTIMIZER,
    Role.SCALAR_STATE: Category.OPTIMIZER,
    Role.BUFFER: Category.BUFFERS,
    Role.CONSTANT: Category.BUFFERS,
    Role.RANK: Category.BUFFERS,
    Role.HOST_RANK: Category.BUFFERS,
    Role.OUTSIDE: Category.BUFFERS,
    Role.INPUT: Category.BATCH,
    Role.LOSS_SCALE: Category.OPTIMIZER,
}


@dataclass(frozen=True)
class Moment:
    """Bytes on the device by category while ``nodes`` run, at the most, and after them; zeros are left out.

    ``nodes`` is one call, or all calls of a compiled region.
    """

    nodes: tuple[fx.Node, ...]
    during: dict[Category, int]
    after: dict[Category, int]


def memory_curve(step: StepGraph, live: Liveness) -> Iterator[Moment]:
    """The step's moments in order. ``during`` adds up to what ``live.during`` has, ``after`` to ``live.after``."""
    held = _persistent(step)
    dying: dict[fx.Node, list[tuple[Category, int]]] = {}
    taken: dict[fx.Node, list[tuple[Category, int]]] = {}
    for storage in live.running_on:
        held[category_of(storage[0])] += live.sizes[storage]
    for storage, size in live.sizes.items():
        owner = storage[0]
        entry = (category_of(owner), size)
        taken.setdefault(owner, []).append(entry)
        if storage in live.last_use:
            dying.setdefault(live.last_use[storage], []).append(entry)
    for nodes in _instructions(step, live):
        before = Counter(held)
        for node in nodes:
            for category, size in taken.get(node, ()):
                held[category] += size
        during = _region_bytes(before, live, nodes) if nodes in live.compiled else _call_bytes(held, live, nodes[0])
        for node in nodes:
            for category, size in dying.get(node, ()):
                held[category] -= size
        # What is left is held by reductions under way, which receive slices into buffers of their own.
        held[Category.GRADIENTS] += live.after[nodes[-1]] - sum(held.values())
        yield Moment(nodes, during, _nonzero(held))


def peak_memory(step: StepGraph, live: Liveness) -> dict[Category, int]:
    """Bytes at the peak by category, zeros left out; they add up to ``live.peak_bytes``."""
    at_peak = peak_moment(step, live)
    held = at_peak.during if at_peak is not None else _nonzero(_persistent(step))
    return _nonzero({**held, Category.GAPS: live.peak_bytes - live.peak_live_bytes})


def peak_moment(step: StepGraph, live: Liveness) -> Moment | None:
    """The moment of the peak; None where nothing runs."""
    peak = live.peak_node  # looks at every node
    return next((moment for moment in memory_curve(step, live) if peak in moment.nodes), None)


def _instructions(step: StepGraph, live: Liveness) -> Iterator[tuple[fx.Node, ...]]:
    """All calls in order, those of a compiled region together."""
    begins = {nodes[0]: nodes for nodes in live.compiled}
    inside = {node for nodes in live.compiled for node in nodes}
    for node in step.calls():
        if node in begins:
            yield begins[node]
        elif node not in inside:
            yield (node,)


def _call_bytes(held: Counter[Category], live: Liveness, node: fx.Node) -> dict[Category, int]:
    """Bytes held while a call runs; ``held`` has its results. The rest is inside the operator, or on its way in."""
    rest = Category.GRADIENTS if node.target in ops.REDUCTIONS else Category.TEMPORARIES
    return _nonzero(held + Counter({rest: live.during[node] - sum(held.values())}))


def _region_bytes(before: Counter[Category], live: Liveness, nodes: tuple[fx.Node, ...]) -> dict[Category, int]:
    """Bytes held at a compiled region's peak: what it found and has not freed, and what it has made."""
    region = live.compiled[nodes]
    held = before - Counter()
    for storage in region.freed:
        held[category_of(storage[0])] -= live.sizes[storage]
    rest = Category.ACTIVATIONS if origin(nodes[0]).phase is Phase.FORWARD else Category.TEMPORARIES
    held[rest] += region.peak_bytes - sum(held.values())
    return _nonzero(held)


_OF_PARAMETERS = frozenset(
    {
        ops.reload,
        ops.all_gather,
        ops.gather_on_node,
        ops.second_shard,
        ops.quantise,
        ops.dequantise,
        ops.fp8_slice_cast,
    }
)


def category_of(owner: fx.Node) -> Category:
    """The category of the storages that a call owns."""
    phase = origin(owner).phase
    if owner.target is ops.reload and phase is Phase.UPDATE:
        return Category.OPTIMIZER
    if owner.target in _OF_PARAMETERS and slice_gathered(owner) is not None:
        return Category.GATHERED
    if owner.target is ops.reload:
        return Category.GRADIENTS if _holds_gradients(owner) else Category.ACTIVATIONS
    if owner.target is ops.all_gather:
        return Category.GRADIENTS  # stage 0 gathers what it has reduced
    if owner.target in (ops.empty_gradients, ops.reduce_scatter, ops.exchange, *ops.QUANTISERS):
        return Category.GRADIENTS
    return Category.ACTIVATIONS if phase is Phase.FORWARD else Category.TEMPORARIES


def _holds_gradients(reload: fx.Node) -> bool:
    """True if the reloaded value had been offloaded in backward: activations are offloaded in forward."""
    stored = reload.args[0]
    assert isinstance(stored, fx.Node)
    return origin(stored).phase is Phase.BACKWARD


def _persistent(step: StepGraph) -> Counter[Category]:
    held: Counter[Category] = Counter()
    for node in step.placeholders():
        if placeholder(node).alias_of is None and tier_of(node) == DEVICE:
            held[OF_ROLE[placeholder(node).role]] += node_bytes(node)
    return held


def _nonzero(held: Mapping[Category, int]) -> dict[Category, int]:
    return {category: held.get(category, 0) for category in Category if held.get(category, 0)}
