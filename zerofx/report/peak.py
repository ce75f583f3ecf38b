"""The tensors on the device at the peak: their kind, the node that makes them, and the reason why they are live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import node_bytes
from zerofx.ir.facts import DEVICE, Phase, Role, copied_from, origin, placeholder, source_line, tier_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import ends_of
from zerofx.ir.text import call_name, type_text
from zerofx.scheduler.cost.categories import OF_ROLE, Category, Moment, category_of, peak_moment
from zerofx.scheduler.cost.liveness import Liveness
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.plan.text.fold import span

_LARGEST = 10  # lines of tensors: a table that is read at a glance


@dataclass(frozen=True)
class PeakTensor:
    """A tensor on the device at the peak, or ``count`` equal ones of successive layers.

    ``what`` is its name, or the operator that makes it with dtype and shape; ``layer`` the modules that it belongs to,
    first to last; ``line`` the user's line, ``""`` if unknown; ``fate`` the reason why it is live. ``num_bytes`` are
    those of all ``count``.
    """

    what: str
    layer: str
    line: str
    fate: str
    category: str
    num_bytes: int
    count: int = 1


@dataclass(frozen=True)
class Peak:
    """The peak's contents: the largest tensors, and all bytes by layer and category, in the order of layers."""

    tensors: tuple[PeakTensor, ...]
    layers: dict[str, dict[str, int]]


def peak_of(step: StepGraph, live: Liveness, plan: Plan) -> Peak:
    """The peak of a step after all passes; its bytes add up to ``live.peak_bytes``."""
    moment = peak_moment(step, live)
    tensors = list(_tensors(step, live, plan, moment))
    layers: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        layer = layers.setdefault(tensor.layer, {})
        layer[tensor.category] = layer.get(tensor.category, 0) + tensor.num_bytes
    return Peak(_largest(tensors), layers)


def _tensors(step: StepGraph, live: Liveness, plan: Plan, moment: Moment | None) -> Iterator[PeakTensor]:
    """All tensors live at the peak, in the order they were made; ``layer`` is a repeated layer if they are in one."""
    left = Counter(moment.during if moment is not None else {})
    for node in step.placeholders():
        size = node_bytes(node)
        if size and placeholder(node).alias_of is None and tier_of(node) == DEVICE:
            category = OF_ROLE[placeholder(node).role]
            left[category] -= size
            yield _placeholder_tensor(node, plan, category, size)
    if moment is None:
        return
    for node, size in _results_at_peak(step, live, moment):
        category = category_of(node)
        left[category] -= size
        yield PeakTensor(
            _call_text(node), _layer(step, node), source_line(node), _fate(step, node, live), category, size
        )
    # A region is named by the largest of its results, fused away or not.
    main = max(moment.nodes, key=node_bytes)
    runs = "a compiled region, with" if moment.nodes in live.compiled else ""
    for category, size in left.items():
        if size > 0:
            description = f"inside {runs} {_call_text(main)}"
            yield PeakTensor(description, _layer(step, main), source_line(main), "while it runs", category, size)


def _placeholder_tensor(node: fx.Node, plan: Plan, category: Category, size: int) -> PeakTensor:
    """A placeholder at the peak: persistent state, or the batch."""
    facts = placeholder(node)
    layer = facts.name.rpartition(".")[0] if facts.role in (Role.PARAMETER, Role.BUFFER) else ""
    if facts.bucket is not None:
        layer = plan.buckets[facts.bucket].name
    description = f"{facts.role.replace('_', ' ')} {facts.name} {type_text(node.meta.get('val'))}"
    fate = "given with each step" if facts.role is Role.INPUT else "stays between steps"
    return PeakTensor(description, layer or "(model)", "", fate, category, size)


def _results_at_peak(step: StepGraph, live: Liveness, moment: Moment) -> Iterator[tuple[fx.Node, int]]:
    """The calls whose results are live at the peak, with their bytes, without those of a compiled region itself."""
    order = step.positions()
    begin, region = order[moment.nodes[0]], live.compiled.get(moment.nodes)
    sizes: Counter[fx.Node] = Counter()
    for storage, size in live.sizes.items():
        first, last = order[storage[0]], live.last_use.get(storage)
        if last is not None and order[last] < begin:
            continue
        if first <= begin if region is None else first < begin and storage not in region.freed:
            sizes[storage[0]] += size
    yield from sizes.items()


def _fate(step: StepGraph, node: fx.Node, live: Liveness) -> str:
    """The reason why a call's result is live at the peak."""
    last = next((reader for (owner, _), reader in live.last_use.items() if owner is node), None)
    if node.target in (ops.all_gather, ops.gather_on_node):
        return "gathered until its last use" if origin(node).phase is not Phase.UPDATE else "on its way to all ranks"
    if node.target is ops.reload:
        return f"brought back from {ends_of(node)[0]}"
    if node.target is ops.empty_gradients:
        return "until its gradients are reduced and applied"
    if copied_from(node) is not None:
        return "computed again for backward"
    if last is None:
        return "a result of the step"
    if origin(node).phase is Phase.FORWARD and origin(last).phase is Phase.BACKWARD:
        return "kept for backward"
    where = _layer(step, last)
    return f"read until {origin(last).phase} of {'its own layer' if where == _layer(step, node) else where}"


def _layer(step: StepGraph, node: fx.Node) -> str:
    return step.unit_of(node) or origin(node).layer or "(model)"


def _call_text(node: fx.Node) -> str:
    """The operator of a call, and the dtype and shape of its result."""
    return f"{call_name(node)} {type_text(node.meta.get('val'))}"


def _largest(tensors: list[PeakTensor]) -> tuple[PeakTensor, ...]:
    """The largest tensors, with equal ones of several layers grouped."""
    alike: dict[tuple[str, ...], list[PeakTensor]] = {}
    for tensor in tensors:
        description = tensor.what.replace(tensor.layer, "…") if tensor.layer != "(model)" else tensor.what
        alike.setdefault((description, tensor.line, tensor.fate, tensor.category, str(tensor.num_bytes)), []).append(
            tensor
        )
    folded = [
        replace(
            group[0], what=what if len(group) > 1 else group[0].what, count=len(group),
            layer=span([tensor.layer for tensor in group]), num_bytes=sum(tensor.num_bytes for tensor in group),
        )
        for (what, *_), group in alike.items()
    ]  # fmt: skip
    return tuple(sorted(folded, key=lambda tensor: -tensor.num_bytes)[:_LARGEST])
