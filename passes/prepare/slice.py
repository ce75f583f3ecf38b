"""Take huge parameters a slice at a time: each slice is gathered, used, and released before the next.

    y = mm(x, t(w))                         y = cat(mm(x, t(w[0:2])), mm(x, t(w[2:4])))
    ...                                     ...
    gx = mm(gy, w)                          gx = mm(gy[:, 0:2], w[0:2]);  gw[0:2] = mm(t(gy)[0:2], x)
    gw = mm(t(gy), x)                       gx = addmm(gx, gy[:, 2:4], w[2:4]);  gw[2:4] = mm(t(gy)[2:4], x)

Like ``simplify`` it runs before the plan is made. The slices it leaves are parameters of the captured graph, each with
a gradient: the layout gives each a bucket, and so a gather, a reduction, an update and a place in the tiers of its
own. A slice's part of a weight's gradient is computed next to its other use in backward, while it is there.

What is put together of slices (columns, rows, lookups) has the same terms in the same order: it is bit-for-bit what it
was wherever a kernel's result for a column does not depend on how many columns it is given (matrix products of a BLAS
may). Lookups and their gradients are bit-for-bit the same. Sums over slices are equal within rounding; in half
precision they are added up in float32.

Does not handle: parameters that other operators than matrix products and lookups read (``scheduler/analysis/slices.py``
says why each has to be whole).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import is_view, storage_source
from zerofx.ir.edit import erase_unread, insert_call, insert_parameter
from zerofx.ir.facts import Phase, origin, set_slice, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.parameters import ParameterInfo
from zerofx.scheduler.analysis.loss_heads import sum_dtype
from zerofx.scheduler.analysis.saved_values import value_node
from zerofx.scheduler.analysis.slices import Sliceable, Use, Way, find_sliceable, product_of
from zerofx.scheduler.plan.decisions import TileDecision

_aten = torch.ops.aten


@dataclass(frozen=True)
class Slice:
    """Take huge parameters a slice at a time. ``slices`` says which."""

    slices: tuple[TileDecision, ...] = ()
    name: str = "slice"

    def run(self, step: StepGraph) -> None:
        slice_parameters(step, self.slices)


def slice_parameters(step: StepGraph, decisions: Sequence[TileDecision]) -> None:
    """Put the slices of ``decisions`` in the place of whole parameters, in place.

    Raises:
        PlanError: a decision is about what this graph has not, or needs whole.
    """
    for decision in decisions:
        _Slicer(step, find_sliceable(step, decision), decision.num_tiles).run()
    step.slices = (*step.slices, *decisions)


class _Slicer:
    """Writes the slices of one parameter in front of what reads it, and takes it away."""

    def __init__(self, step: StepGraph, what: Sliceable, num_slices: int) -> None:
        self._step, self._what = step, what
        rows = what.info.shape[0]
        self._bounds = [(rows * n // num_slices, rows * (n + 1) // num_slices) for n in range(num_slices)]
        self._names = [f"{what.info.name}[{start}:{end}]" for start, end in self._bounds]
        self._weights: list[fx.Node] = []

    def run(self) -> None:
        step, what = self._step, self._what
        self._weights = [self._placeholder(number) for number in range(len(self._bounds))]
        parts: dict[fx.Node, list[fx.Node]] = {}
        beside = self._use_for_gradient()
        for use in what.uses:
            gradient = what.gradient[-1] if use is beside else None
            joined, of_slices = self._use(use, gradient)
            use.node.replace_all_uses_with(joined)
            if gradient is not None:
                parts[gradient] = of_slices
        for node in what.gradient:
            if node not in parts:
                with step.graph.inserting_before(node):
                    parts[node] = [self._gradient(node, number, parts) for number in range(len(self._bounds))]
        gradients: dict[str, fx.Node] = {}
        for name, node in step.gradients.items():
            mine = name == what.info.name
            gradients.update(zip(self._names, parts[node], strict=True) if mine else {name: node}.items())
        step.set_outputs(step.loss, step.mutations, gradients)
        step.parameters = tuple(
            entry for info in step.parameters for entry in (self._infos() if info is what.info else (info,))
        )
        erase_unread(step.graph)
        step.graph.erase_node(what.node)

    def _infos(self) -> tuple[ParameterInfo, ...]:
        info = self._what.info
        return tuple(
            replace(info, name=name, shape=(end - start, *info.shape[1:]), whole=info.name, first_row=start)
            for name, (start, end) in zip(self._names, self._bounds, strict=True)
        )  # fmt: skip

    def _placeholder(self, number: int) -> fx.Node:
        whole, name, (start, end) = self._what.node, self._names[number], self._bounds[number]
        fake = self._step.fake((end - start, *tensor(whole).shape[1:]), tensor(whole).dtype)
        return insert_parameter(self._step, whole, name, fake)

    def _use_for_gradient(self) -> Use | None:
        """The use in backward next to which the gradient can be computed slice by slice, if there is one."""
        gradient = self._what.gradient
        product = product_of(gradient[0]) if len(gradient) == 1 else None
        if product is None:
            return None
        for use in self._what.uses:
            if origin(use.node).phase is not Phase.BACKWARD:
                continue
            owners = [value_node(storage_source(source)) for source in product.all_input_nodes]
            if all(owner < use.node for owner in owners):  # nodes compare by their place in the graph
                return use
        return None

    def _use(self, use: Use, gradient: fx.Node | None) -> tuple[fx.Node, list[fx.Node]]:
        """The result of ``use``, assembled from slices in front of it; and the slices of ``gradient`` with them."""
        graph, count = self._step.graph, len(self._bounds)
        product = product_of(gradient) if gradient is not None else None
        if product is not None:
            _put_views_before(product, use.node)
        results: list[fx.Node] = []
        gradients: list[fx.Node] = []
        with graph.inserting_before(use.node):
            for number in range(count):
                if use.way is Way.LOOKUP:
                    results = [self._lookup(use.node, number, results)]
                elif use.way is Way.SUM:
                    results = [self._add(use, number, results)]
                else:
                    results.append(self._product(use, number))
                if gradient is not None:
                    gradients.append(self._gradient(gradient, number, {}))
            joined = results[0]
            if len(results) > 1:
                joined = self._call(use.node, None, _aten.cat.default, results, 1 if use.way is Way.COLUMNS else 0)
            joined = self._cast(use.node, None, joined, tensor(use.node).dtype)
        return joined, gradients

    def _factors(self, use: Use, number: int) -> tuple[fx.Node, fx.Node]:
        """The factors of a product with a slice, in order."""
        weight = self._weights[number]
        if use.turned:
            weight = self._call(use.node, number, _aten.t.default, weight)
        left, right = use.node.args[-2:]
        other = right if use.on_left else left
        assert isinstance(other, fx.Node)
        if use.way is Way.SUM:
            other = self._part(use.node, number, other, 0 if use.on_left else 1)
        return (weight, other) if use.on_left else (other, weight)

    def _product(self, use: Use, number: int) -> fx.Node:
        """Some columns, or rows, of what ``use`` gives."""
        factors = self._factors(use, number)
        if use.node.target is _aten.mm.default:
            return self._call(use.node, number, _aten.mm.default, *factors)
        added = use.node.args[0]
        assert isinstance(added, fx.Node)
        dim = tensor(added).dim() - (1 if use.way is Way.COLUMNS else 2)
        if dim >= 0 and tensor(added).shape[dim] == self._what.info.shape[0]:
            added = self._part(use.node, number, added, dim)
        return self._call(use.node, number, _aten.addmm.default, added, *factors)

    def _add(self, use: Use, number: int, before: list[fx.Node]) -> fx.Node:
        """The sum that ``use`` gives, up to slice ``number``, in float32 at least."""
        factors = self._factors(use, number)
        wide = sum_dtype(tensor(use.node).dtype)
        if not before:
            added = use.node.args[:1] if use.node.target is _aten.addmm.default else ()
            return self._cast(use.node, number, self._call(use.node, number, use.node.target, *added, *factors), wide)
        if wide == tensor(use.node).dtype:
            return self._call(use.node, number, _aten.addmm.default, before[0], *factors)
        part = self._call(use.node, number, _aten.mm.default, *factors)
        return self._call(use.node, number, _aten.add.Tensor, before[0], part)

    def _lookup(self, node: fx.Node, number: int, before: list[fx.Node]) -> fx.Node:
        """The rows for the indices up to slice ``number``; an index outside all slices fails as in the whole."""
        indices = node.args[1]
        assert isinstance(indices, fx.Node)
        last = len(self._bounds) - 1
        outside = self._find_outside(node, number, indices, first=number == 0, last=number == last)
        within = self._shift_into(node, number, indices, outside, 0)
        rows = self._call(node, number, _aten.embedding.default, self._weights[number], within)
        if not before:
            return rows
        apart = self._call(node, number, _aten.unsqueeze.default, outside, -1)
        return self._call(node, number, _aten.where.self, apart, before[0], rows)

    def _find_outside(self, node: fx.Node, number: int, indices: fx.Node, *, first: bool, last: bool) -> fx.Node:
        """A mask of the indices outside a slice; the ``first`` has all below it, the ``last`` all above."""
        start, end = self._bounds[number]
        below = None if first else self._call(node, number, _aten.lt.Scalar, indices, start)
        above = None if last else self._call(node, number, _aten.ge.Scalar, indices, end)
        if below is not None and above is not None:
            return self._call(node, number, _aten.logical_or.default, below, above)
        outside = below if below is not None else above
        assert outside is not None, "there are two slices at least"
        return outside

    def _shift_into(self, node: fx.Node, number: int, indices: fx.Node, outside: fx.Node, otherwise: int) -> fx.Node:
        """Indices into a slice, ``otherwise`` where they are outside of it."""
        moved = self._call(node, number, _aten.sub.Tensor, indices, self._bounds[number][0])
        return self._call(node, number, _aten.masked_fill.Scalar, moved, outside, otherwise)

    def _gradient(self, node: fx.Node, number: int, parts: Mapping[fx.Node, list[fx.Node]]) -> fx.Node:
        """Some rows of a gradient, at the insertion point."""
        product = product_of(node)
        if product is not None:
            left, right = product.args
            assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
            if product is node:
                return self._call(node, number, _aten.mm.default, self._part(node, number, left, 0), right)
            transposed = self._call(node, number, _aten.mm.default, left, self._part(node, number, right, 1))
            return self._call(node, number, _aten.t.default, transposed)
        if node.target is _aten.add.Tensor:
            terms = [parts[source][number] for source in node.args if isinstance(source, fx.Node)]
            return self._call(node, number, _aten.add.Tensor, *terms)
        grad, indices, _, padding, by_frequency = node.args
        assert isinstance(indices, fx.Node) and isinstance(padding, int)
        rows = self._bounds[number][1] - self._bounds[number][0]
        outside = self._find_outside(node, number, indices, first=number == 0, last=number == len(self._bounds) - 1)
        if padding >= 0:
            padded = self._call(node, number, _aten.eq.Scalar, indices, padding)
            outside = self._call(node, number, _aten.logical_or.default, outside, padded)
        # What lies elsewhere goes to a row after the slice, which is its padding.
        within = self._shift_into(node, number, indices, outside, rows)
        args = (grad, within, rows + 1, rows, by_frequency)
        gradient_of_padded = self._call(node, number, node.target, *args)
        return self._call(node, number, _aten.slice.Tensor, gradient_of_padded, 0, 0, rows)

    def _part(self, node: fx.Node, number: int, source: fx.Node, dim: int) -> fx.Node:
        """The part of a matrix that goes with a slice: a view."""
        start, end = self._bounds[number]
        owner = value_node(storage_source(source))
        if owner.op == "placeholder":
            return self._call(node, number, _aten.slice.Tensor, source, dim, start, end)
        fake = tensor(source).narrow(dim, start, end - start)
        offset = int(fake.storage_offset()) - int(tensor(owner).storage_offset())
        return self._call(node, number, ops.part, owner, list(fake.shape), list(fake.stride()), offset)

    def _cast(self, node: fx.Node, number: int | None, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        if tensor(source).dtype == dtype:
            return source
        return self._call(node, number, _aten._to_copy.default, source, dtype=dtype)

    def _call(self, node: fx.Node, number: int | None, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call in the place of ``node``, on slice ``number`` or on what is put together of all."""
        call = insert_call(self._step.graph, target, args, origin(node), kwargs)
        return call if number is None else set_slice(call, self._names[number])


def _put_views_before(node: fx.Node, place: fx.Node) -> None:
    """Move the views that ``node`` reads before ``place``, after which their owner is not."""
    for source in node.all_input_nodes:
        if source > place and is_view(source):
            _put_views_before(source, place)
            place.prepend(source)
