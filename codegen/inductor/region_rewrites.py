"""Rewrites of a traced region on its way to Inductor, and the region that they edit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from zerofx.ir.aliasing import mutated_inputs, storage_source
from zerofx.ir.edit import Rewrite
from zerofx.ir.facts import value
from zerofx.torch_private.operators import OpOverload


@dataclass
class TracedRegion:
    """A traced region, whose nodes have fake values in ``meta["val"]``.

    ``module`` has the graph, ``mode`` makes its fake values. ``retraced`` traces a function of the region's inputs with
    the decompositions that regions are compiled with. ``kernels``: those of zerofx's own that it uses
    (``codegen/kernels/table.py``). ``views``: what the graph takes, in order, once views of the region's inputs are
    hoisted (``HoistViews``): pairs of an input's index and ``as_strided`` arguments, none for all of it.
    """

    module: fx.GraphModule
    mode: Any
    retraced: Callable[[Callable[..., Any]], fx.GraphModule]
    kernels: frozenset[str]
    views: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph


RegionRewrite: TypeAlias = Rewrite[[TracedRegion]]


def call(graph: fx.Graph, target: OpOverload, args: tuple[object, ...]) -> fx.Node:
    """A node with its fake value; called in the fake mode of the others'."""
    node = graph.call_function(target, args)  # type: ignore[arg-type]  # fx's own argument types
    given = fx.node.map_arg(node.args, lambda source: source.meta["val"])
    node.meta["val"] = target(*given)
    return node


def require_node(argument: object) -> fx.Node:
    """An argument that is a node."""
    assert isinstance(argument, fx.Node)
    return argument


@dataclass(frozen=True)
class HoistViews:
    """Turn ``as_strided`` views of inputs into inputs. Inductor then sees plain contiguous tensors.

        f(full, x):                                      f(x, view_0):
            w = as_strided(full, [4, 4], [4, 1], 16)         return mm(x, view_0)
            return mm(x, w)                        ->    called with x, full.as_strided([4, 4], [4, 1], 16)

    So parameters in a gathered bucket and slots of a gradient buffer come as what they are.

    Does not handle: views of views, which stay inside.
    """

    name: str = "hoist_views"

    def run(self, region: TracedRegion) -> None:
        graph = region.graph
        placeholders = list(graph.find_nodes(op="placeholder"))
        passed: list[tuple[int, tuple[Any, ...]]] = []
        last = placeholders[-1]
        for index, original in enumerate(placeholders):
            for user in list(original.users):
                if user.target is torch.ops.aten.as_strided.default:
                    with graph.inserting_after(last):
                        last = graph.placeholder(f"view_{len(passed)}")
                    last.meta["val"] = user.meta["val"]
                    user.replace_all_uses_with(last)
                    passed.append((index, tuple(user.args[1:])))
                    graph.erase_node(user)
        own = [(index, ()) for index, node in enumerate(placeholders) if node.users]
        for node in placeholders:
            if not node.users:
                graph.erase_node(node)
        graph.lint()
        region.module.recompile()
        region.views = [*own, *passed]


_aten = torch.ops.aten

# Which argument is what they copy.
_COPIES = {_aten.clone.default: 0, _aten.copy.default: 1}


@dataclass(frozen=True)
class KeepCopies:
    """Have copies of what is written into made of a product with one. Inductor would read the original after the write.

        before = clone(a)               kept = mul(a, 1)
        copy_(a, b)               ->    before = clone(kept)
        copy_(b, before)                copy_(a, b); copy_(b, before)

    Does not handle: copies of what nothing writes into, which Inductor may leave out.
    """

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


@dataclass(frozen=True)
class PlannedStrides:
    """Take operators apart as regions are compiled, with every value in the strides that are recorded for it.

        y = cat([x, empty])                 y = clone(x)                      # y has the strides of x: wrong
        z = view(y, [8])              ->    y = clone(permute(x, ...)); z = view(permute(y, ...), [8])

    A decomposition may lay its result out unlike the operator does (``cat`` of one tensor that is not empty keeps that
    tensor's strides): the views that follow, and the regions that read the result, were made for the operator's.

    Does not handle: values that do not fill their memory, which stay as the decomposition lays them out.
    """

    name: str = "planned_strides"

    def run(self, region: TracedRegion) -> None:
        region.module = region.retraced(_InPlannedStrides(region.module).run)


class _InPlannedStrides(fx.Interpreter):
    """Runs a graph so that every value has the strides recorded for it."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        planned = n.meta.get("val")
        if isinstance(result, list | tuple) and isinstance(planned, list | tuple):
            return tuple(map(_restride, result, planned))
        return _restride(result, planned)


def _restride(result: Any, planned: Any) -> Any:
    """``result`` laid out like ``planned``, where both are tensors that fill their memory."""
    if not isinstance(result, torch.Tensor) or not isinstance(planned, torch.Tensor):
        return result
    differ = any(
        entry != other
        for size, entry, other in zip(result.shape, result.stride(), planned.stride(), strict=True)
        if size > 1
    )
    if not differ:
        return result
    order = sorted(range(planned.dim()), key=lambda dim: (-planned.stride()[dim], -planned.shape[dim], dim))
    return result.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])
