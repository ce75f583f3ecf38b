"""Take products of linear layers in fp8, of factors that are cast right in front of them.

    y = addmm(b, x, w_t)              s_x = fp8_scale(x, float8_e4m3fn, 1, True)     # 448 / max|row|, a power of two
                                      s_w = fp8_scale(w_t, float8_e4m3fn, 0, True)   # one for each column
                                ->    x_8, w_8 = fp8_cast(x, s_x, ..), fp8_cast(w_t, s_w, ..)
                                      y_8 = _scaled_mm(x_8, w_8, 1 / s_x, 1 / s_w, .., bfloat16, True)
                                      y = add(y_8, b)

The three recipes are those of torchao's ``Float8Linear`` (``Float8LinearRecipeName``), with its bits: there is one
scale for all of a factor, or one for each of its rows (columns, of the right one), along the inner size. Backward's
products by row and column are of casts alone, and scaled afterwards: CUDA's kernel with such scales is as slow
without fast sums as one in bfloat16. Factors of products of one layer and phase are scaled and cast once; what backward
casts again it reads as forward did, so that nothing is kept for it that it did not read before.

The left factor is laid out row by row and the right one column by column, as CUDA has it.

Of a factor that ranks of the model axis have in parts the casts are those of the whole: where the ranks have parts of
what has one scale, the largest magnitude is that of all of them.

    x: S1                         of_part = fp8_largest(x, 1); pending = all_reduce_values(of_part, "max", 2, "model")
                            ->    s_x = fp8_scale(wait(pending), float8_e4m3fn, 1, True)

Does not handle: products of batches and of groups of rows (experts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.aliasing import storage_source
from zerofx.ir.edit import cast, erase_unread, insert_call, node_named
from zerofx.ir.facts import Origin, origin, set_source_line, source_line, tensor
from zerofx.ir.graph import StepGraph
from zerofx.passes.lib.local_graph import AXIS
from zerofx.scheduler.analysis.linear_products import factors_of, placements_of_factors
from zerofx.scheduler.analysis.saved_values import value_node
from zerofx.scheduler.plan.decisions import Factor, ProductDecision
from zerofx.scheduler.plan.facts import unit_of
from zerofx.scheduler.plan.placements import Placement, Sharded

_aten = torch.ops.aten


@dataclass(frozen=True)
class Multiply:
    """Take products of linear layers in fp8, of factors that are cast right in front of them, as decided."""

    fp8: str
    products: tuple[ProductDecision, ...]
    num_parts: int = 1
    name: str = "multiply"

    def run(self, step: StepGraph) -> None:
        multiply_in_fp8(step, [decision for decision in self.products if decision.in_fp8], self.fp8, self.num_parts)
        step.products = self.products


@dataclass(frozen=True)
class Written:
    """Nodes in the place of a product: its own, and what its casts are made by, which others may read too."""

    own: tuple[fx.Node, ...]
    casts: tuple[fx.Node, ...]


def has_fp8(decision_left: Factor, decision_right: Factor, recipe: str) -> bool:
    """True if a recipe has the product of such factors in fp8."""
    return "weight" in (decision_left, decision_right) or recipe != "rowwise_with_gw_hp"


def multiply_in_fp8(
    step: StepGraph, decisions: Sequence[ProductDecision], recipe: str, num_parts: int
) -> Mapping[str, Written]:
    """Write products of a recipe in the place of others, by name, in place, as one of ``num_parts`` ranks has them.

    Raises:
        PlanError: a decision is about a node that the graph has not, or that is no product.
    """
    by_name, writer = step.nodes_by_name(), _Writer(step, recipe, num_parts)
    nodes = {decision.node: node_named(by_name, decision.node) for decision in decisions}
    in_order = sorted(decisions, key=lambda decision: nodes[decision.node])  # the first makes what others read too
    written = {decision.node: writer.write(nodes[decision.node], decision) for decision in in_order}
    erase_unread(step.graph)
    return written


class _Writer:
    """Writes products, and the scales and casts that several of them read once."""

    def __init__(self, step: StepGraph, recipe: str, num_parts: int) -> None:
        self._step, self._recipe, self._num_parts = step, recipe, num_parts
        self._placements = placements_of_factors(step)
        self._known: dict[tuple[Any, ...], fx.Node] = {}

    def write(self, product: fx.Node, decision: ProductDecision) -> Written:
        if product.target not in (_aten.mm.default, _aten.addmm.default):
            raise PlanError(f"the plan has {product.name} in fp8, which is no product; make the plan anew")
        graph, where, dtype = self._step.graph, origin(product), tensor(product).dtype
        left, right = factors_of(product)
        lies = self._placements[product.name]
        by_rows, is_output = self._recipe != "tensorwise", "gradient" not in (decision.left, decision.right)
        with graph.inserting_before(product):
            of_left = self._scale(left, decision.left, decision, 1, lies[0], where)
            of_right = self._scale(right, decision.right, decision, 0, lies[1], where)
            scales = of_left[-1], of_right[-1]
            casts = (
                self._cast(left, scales[0], decision.left, where),
                self._cast(right, scales[1], decision.right, where, by_columns=True),
            )
            summed = torch.bfloat16 if by_rows else dtype
            own: list[fx.Node] = []

            def call(target: Any, *args: Any, fake: Any = None, **kwargs: Any) -> fx.Node:
                own.append(insert_call(graph, target, args, where, kwargs, f"{product.name}_fp8", fake))
                return set_source_line(own[-1], source_line(product))

            if by_rows and not is_output:
                kinds = {"dtype": torch.float32, "device": self._step.device}
                ones = call(_aten.full.default, [], 1.0, fake=self._step.fake((), torch.float32), **kinds)
                inverses = ones, ones
            else:
                inverses = call(_aten.reciprocal.default, scales[0]), call(_aten.reciprocal.default, scales[1])
            result = call(_aten._scaled_mm.default, *casts, *inverses, None, None, summed, is_output)
            if by_rows and not is_output:
                result = call(ops.fp8_unscale, result, *scales)
            result = cast(graph, result, dtype, where)
            if product.target is _aten.addmm.default:
                result = call(_aten.add.Tensor, result, product.args[0])
        product.replace_all_uses_with(result)
        graph.erase_node(product)
        return Written(tuple(own), (*of_left, *of_right, *casts))

    def _scale(
        self, node: fx.Node, factor: Factor, decision: ProductDecision, dim: int, lies: Placement, where: Origin
    ) -> tuple[fx.Node, ...]:
        """The scale of a factor, after what it is made by among the ranks that have parts of what it is of."""
        is_whole = self._recipe == "tensorwise"
        is_whole |= self._recipe == "rowwise_with_gw_hp" and (factor, decision.left) == ("weight", "gradient")
        read = node
        if is_whole and tensor(owner := value_node(storage_source(node))).numel() == tensor(node).numel():
            read = owner  # whatever its shape: scaled once
        along = None if is_whole else dim
        among_ranks: tuple[fx.Node, ...] = ()
        if isinstance(lies, Sharded) and along in (None, lies.dim):
            largest = self._call_once(ops.fp8_largest, read, (along,), where)
            pending = self._call_once(ops.all_reduce_values, largest, ("max", self._num_parts), where, over=AXIS)
            read = self._call_once(ops.wait, pending, (largest,), where)
            among_ranks = largest, pending, read
        args = (self._dtype(factor), along, self._recipe != "tensorwise")
        return *among_ranks, self._call_once(ops.fp8_scale, read, args, where)

    def _cast(
        self, node: fx.Node, scale: fx.Node, factor: Factor, where: Origin, *, by_columns: bool = False
    ) -> fx.Node:
        return self._call_once(ops.fp8_cast, node, (scale, self._dtype(factor), by_columns), where)

    def _dtype(self, factor: Factor) -> torch.dtype:
        """Gradients with one scale for all have the dtype with more range."""
        wide = self._recipe == "tensorwise" and factor == "gradient"
        return torch.float8_e5m2 if wide else torch.float8_e4m3fn

    def _call_once(self, target: Any, node: fx.Node, args: tuple[Any, ...], where: Origin, **kwargs: Any) -> fx.Node:
        """A call on a value, or on an equal view of it, once in a layer and phase."""
        fake = tensor(node)
        key = (
            target, storage_source(node), tuple(fake.shape), fake.stride(), fake.storage_offset(), args,
            unit_of(where.layer, self._step.units), where.phase,
        )  # fmt: skip
        if key not in self._known:
            name = target.__name__.partition(".")[0]
            self._known[key] = insert_call(self._step.graph, target, (node, *args), where, kwargs, name)
        return self._known[key]
