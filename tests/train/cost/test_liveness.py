"""Live bytes, against an interpreter that runs the graph on real tensors and counts the storages that names hold."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from tests.lib.graphs import TwoBlocks, calls, prepare
from tests.lib.lowered import lowered
from zerofx.ir import ops
from zerofx.ir.facts import Placeholder, Role, set_placeholder, set_value, tensor
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.cost.liveness import Liveness, MemoryEvent, apply_profiles, liveness

aten = torch.ops.aten
SIDE = 4
Op = tuple[Any, tuple[Any, ...]]

# Every operator takes a matrix [SIDE, SIDE] first, and gives one, a view of one, or several values.
FRESH: list[Op] = [(aten.neg.default, ()), (aten.clone.default, ()), (aten.mul.Tensor, (2.0,))]
IN_PLACE: list[Op] = [(aten.relu_.default, ()), (aten.mul_.Tensor, (2.0,))]
VIEWS: list[Op] = [(aten.t.default, ()), (aten.view.default, ([SIDE, SIDE],)), (aten.detach.default, ())]
MAYBE_COPIES: list[Op] = [(aten.reshape.default, ([SIDE, SIDE],))]
SEVERAL: list[tuple[Any, tuple[Any, ...], int]] = [
    (aten.split.Tensor, (2,), 2),  # views, in a list
    (aten.max.dim, (0, True), 2),  # storages of their own
    (aten.aminmax.default, (), 2),
]


@dataclass
class Builder:
    """Grows a graph with the values of its nodes beside it; ``matrices`` are the nodes that further ones may read."""

    graph: fx.Graph
    matrices: list[fx.Node]

    def call(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        node = self.graph.call_function(target, args)
        return set_value(node, target(*fx.map_arg(args, lambda n: n.meta["val"])))


@st.composite
def step_graphs(draw: st.DrawFn) -> StepGraph:
    graph = fx.Graph()
    build = Builder(graph, [])
    for i in range(draw(st.integers(1, 2))):
        node = graph.placeholder(f"x{i}")
        set_value(node, torch.rand(SIDE, SIDE))
        build.matrices.append(set_placeholder(node, Placeholder(Role.INPUT, f"x{i}")))
    for _ in range(draw(st.integers(1, 15))):
        source = draw(st.sampled_from(build.matrices))
        kind = draw(st.sampled_from(["fresh", "in place", "view", "maybe", "several", "two"]))
        if kind == "several":
            target, rest, count = draw(st.sampled_from(SEVERAL))
            whole = build.call(target, (source, *rest))
            for index in draw(st.lists(st.integers(0, count - 1), unique=True)):
                part = build.call(operator.getitem, (whole, index))
                if draw(st.booleans()):
                    build.call(aten.neg.default, (part,))
            continue
        if kind == "two":
            build.matrices.append(build.call(aten.add.Tensor, (source, draw(st.sampled_from(build.matrices)))))
            continue
        ops_of = {"fresh": FRESH, "in place": IN_PLACE, "view": VIEWS, "maybe": MAYBE_COPIES}[kind]
        target, rest = draw(st.sampled_from(ops_of))
        if target is aten.view.default and not source.meta["val"].is_contiguous():
            target, rest = aten.t.default, ()
        build.matrices.append(build.call(target, (source, *rest)))
    loss = build.call(aten.sum.default, (draw(st.sampled_from(build.matrices)),))
    graph.output((loss,))
    return StepGraph(graph, torch.device("cpu"), ())


def held_bytes(names: Mapping[fx.Node, Any]) -> int:
    """Bytes of the distinct storages after all names."""
    tensors = [t for value in names.values() for t in (value if isinstance(value, list | tuple) else (value,))]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
    return sum(storages.values())


def interpret(step: StepGraph) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """Bytes held while each call runs, and after it, where a name goes with its last reader.

    An operator's outputs are named as it returns, as Python unpacks them: those without a name die at once.
    """
    nodes = list(step.graph.nodes)
    last = {node: max([i, *(nodes.index(user) for user in node.users)]) for i, node in enumerate(nodes)}
    names: dict[fx.Node, Any] = {n: n.meta["val"].clone() for n in nodes if n.op == "placeholder"}
    during, after = {}, {}
    for i, node in enumerate(nodes):
        if node.op != "call_function":
            continue
        if node.target is not operator.getitem:
            result = node.target(*fx.map_arg(node.args, names.__getitem__))
            if isinstance(result, list | tuple):
                fresh: dict[fx.Node, Any] = {node: result}
                during[node] = held_bytes(names | fresh)
                names |= {user: result[user.args[1]] for user in node.users}
            else:
                names[node] = result
                during[node] = held_bytes(names)
        else:
            during[node] = held_bytes(names)
        for name in [n for n in names if n.op != "placeholder" and last[n] <= i]:
            del names[name]
        after[node] = held_bytes(names)
    return during, after


@settings(max_examples=150, deadline=None)
@given(step_graphs())
def test_live_bytes_are_those_of_real_storages(step: StepGraph) -> None:
    found = liveness(step, on_cpu=False)
    during, after = interpret(step)
    assert {node: found.during[node] for node in during} == during
    assert found.after == after
    assert found.peak_bytes >= max(during.values())
    assert found.persistent_bytes == sum(SIDE * SIDE * 4 for _ in step.placeholders())


@settings(max_examples=50, deadline=None)
@given(step_graphs())
def test_every_storage_is_freed_by_its_last_reader_but_the_loss(step: StepGraph) -> None:
    found = liveness(step, on_cpu=False)
    order = step.positions()
    assert all(order[node] <= order[reader] for (node, _), reader in found.last_use.items())
    kept = set(found.sizes) - set(found.last_use)
    assert sum(found.sizes[storage] for storage in kept) + found.persistent_bytes == list(found.after.values())[-1]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("stage", [0, 3])
def test_on_cpu_reductions_hold_the_other_ranks_slices(stage: int, num_ranks: int) -> None:
    step = prepare(TwoBlocks(), stage=stage, num_ranks=num_ranks).run().step
    shared, direct = (liveness(step, on_cpu=way) for way in (False, True))
    # One slice is the result, unless that lies in the buffer; the rest come from the other ranks.
    num_apart = num_ranks - 1 if stage == 0 else num_ranks - 2
    reductions = [node for node in step.calls() if node.target in ops.REDUCTIONS]
    assert reductions
    for started in reductions:
        slice_bytes = tensor(started).nbytes
        under_way = _reductions_under_way(step, started)
        assert direct.after[started] - shared.after[started] == under_way * num_apart * slice_bytes
    assert list(direct.after.values())[-1] == list(shared.after.values())[-1]


def _reductions_under_way(step: StepGraph, node: fx.Node) -> int:
    order = step.positions()
    started = [n for n in step.calls() if n.target in ops.REDUCTIONS and order[n] <= order[node]]
    return sum(all(order[wait] > order[node] for wait in one.users) for one in started)


def test_a_release_gives_the_bucket_back() -> None:
    step = prepare(TwoBlocks()).run().step
    found = liveness(step, on_cpu=True)
    before = None
    for node in step.calls():
        if node.target is ops.release:
            full = node.args[0]
            assert isinstance(full, fx.Node) and before is not None
            assert found.after[before] - found.after[node] == full.meta["val"].nbytes
        before = node


def test_every_tier_holds_what_was_copied_there() -> None:
    """Counted anew, from the start of each copy to its wait, and from the first to the last name of what is stored."""
    lowered_step = lowered(5, tiers=["host", "nvme"])
    step, found = lowered_step.graph, lowered_step.simulation.live
    order = step.positions()
    spans: dict[str, list[tuple[int, int, int]]] = {"host": [], "nvme": []}  # bytes, first and last node
    for out in calls(step, ops.offload):
        (stored,) = out.users
        (back,) = (node for node in stored.users if node.target is ops.reload)
        (again,) = back.users
        tier, size = out.args[1], out.meta["val"].nbytes
        assert isinstance(tier, str)
        spans[tier].append((size, order[out], order[again]))
        if tier == "nvme":
            spans["host"] += [(size, order[out], order[stored]), (size, order[back], order[again])]
    assert spans["nvme"] and len(spans["host"]) > len(spans["nvme"])
    for tier, held in spans.items():
        use = found.slower[tier]
        for node in step.calls():
            at = order[node]
            assert use.during[node] == sum(size for size, first, last in held if first <= at <= last)
            assert use.after[node] == sum(size for size, first, last in held if first <= at < last)
        assert found.peaks[tier] == use.peak_bytes == max(use.during.values())
        assert list(use.after.values())[-1] == use.persistent_bytes == 0


def test_what_waits_elsewhere_is_not_on_the_device() -> None:
    kept, offloaded = (lowered(8, tiers=tiers).simulation.live for tiers in ((), ("host",)))
    assert offloaded.peak_bytes < kept.peak_bytes
    assert offloaded.persistent_bytes == kept.persistent_bytes
    assert kept.slower == {} and kept.peaks.keys() == {"device"}


@dataclass
class _Region:
    inputs: tuple[fx.Node, ...]
    own: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...] = ()
    key: str = ""


def _chain(*targets: Callable[..., Any]) -> tuple[StepGraph, list[fx.Node], Liveness]:
    """x -> first -> second ..., a matrix each; the last is the loss."""
    graph = fx.Graph()
    build = Builder(graph, [])
    node = set_placeholder(graph.placeholder("x"), Placeholder(Role.INPUT, "x"))
    set_value(node, torch.rand(SIDE, SIDE))
    nodes = [node := build.call(target, (node,)) for target in targets]
    graph.output((nodes[-1],))
    step = StepGraph(graph, torch.device("cpu"), ())
    return step, nodes, liveness(step, on_cpu=False)


def test_a_compiled_regions_own_memory_takes_the_place_of_its_nodes() -> None:
    size = SIDE * SIDE * 4
    step, (first, second, third), live = _chain(aten.neg.default, aten.exp.default, aten.neg.default)
    assert live.peak_bytes == 3 * size
    # Fused into one kernel that writes the output alone; its input dies first.
    region = _Region((first,), (second, third))
    fused = apply_profiles(live, step, [(region, [MemoryEvent(freed=0), MemoryEvent(size)])])
    assert fused.peak_bytes == 2 * size
    # A kernel with a buffer of its own.
    events = [MemoryEvent(size), MemoryEvent(3 * size), MemoryEvent(-3 * size), MemoryEvent(freed=0)]
    assert apply_profiles(live, step, [(region, events)]).peak_bytes == 6 * size
    assert fused.after == live.after
