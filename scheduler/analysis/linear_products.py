"""Find the matrix products of linear layers: with a weight, in forward and backward, and for the weight's gradient.

    y = mm(x, t(w))        (input, weight): the output
    gx = mm(gy, w)         (gradient, weight): the gradient of the input
    gw = mm(t(gy), x)      (gradient, input): the gradient of the weight

They are told by what they read, whatever the model calls its layers: a product with a parameter in backward has its
factors as forward's has them where forward is run again there, and else the parameter transposed. Of two factors
without a weight one is what a product with it has read, and the result is, through views and sums, its gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import Storage, is_view, storage_source
from zerofx.ir.facts import Phase, Role, origin, placeholder, tensor
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.plan.decisions import Factor
from zerofx.scheduler.plan.placements import REPLICATED, Placement, placement_of

_aten = torch.ops.aten
_FACTOR_OF = 16  # what CUDA wants the inner size, and the number of columns, of a product in fp8 to be a multiple of


@dataclass(frozen=True)
class LinearProduct:
    """A product of a layer whose ``weight`` is the parameter of that name, and what its factors are."""

    node: fx.Node
    weight: str
    left: Factor
    right: Factor

    def refusal(self) -> str:
        """The reason that CUDA has no such product in fp8; "" if it has one. Source: ``_scaled_mm`` in
        ``aten/src/ATen/native/cuda/Blas.cpp``; layouts and dtypes are those that factors are cast to."""
        left, right = map(tensor, factors_of(self.node))
        inner, columns = (int(size) for size in right.shape)
        for name, size in (("K", inner), ("N", columns)):
            if size % _FACTOR_OF or not left.numel():
                return f"{name} = {size} of {left.shape[0]} x {inner} x {columns} is no multiple of {_FACTOR_OF}"
        return ""


def factors_of(product: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The factors of a product, in order."""
    left, right = product.args[-2:]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    return left, right


def placements_of_factors(step: StepGraph) -> Mapping[str, tuple[Placement, Placement]]:
    """The placements of the factors of products on the model axis, by the product's name; whole without a decision."""
    placements = defaultdict[str, tuple[Placement, Placement]](lambda: (REPLICATED, REPLICATED))
    for decision in step.shardings:
        if len(decision.inputs) > 1:
            left, right = map(placement_of, decision.inputs[-2:])
            placements[decision.node] = left, right
    return placements


def find_linear_products(step: StepGraph) -> list[LinearProduct]:
    """The products of linear layers, in the order of the graph."""
    products: dict[fx.Node, LinearProduct] = {}
    laid_out: dict[str, tuple[int, ...]] = {}  # the weight's strides as forward's factor
    inputs: defaultdict[str, set[Storage]] = defaultdict(set)
    for node in step.calls():
        if not is_product(node):
            continue
        left, right = factors_of(node)
        (owner, _), strides = storage_source(right), tensor(right).stride()
        if owner.op != "placeholder" or placeholder(owner).role is not Role.PARAMETER:
            continue
        name = placeholder(owner).name
        if origin(node).phase is Phase.FORWARD:
            laid_out.setdefault(name, strides)
        if name not in laid_out:
            continue
        is_output = strides == laid_out[name]
        if is_output:
            inputs[name].add(storage_source(left))
        products[node] = LinearProduct(node, name, "input" if is_output else "gradient", "weight")
    for name, node in step.gradients.items():
        for product in _products_in(node) if name in laid_out else ():
            sides = [storage_source(factor) for factor in factors_of(product)]
            if sides[0] in inputs[name] and sides[1] not in inputs[name]:
                products[product] = LinearProduct(product, name, "input", "gradient")
            elif sides[1] in inputs[name] and sides[0] not in inputs[name]:
                products[product] = LinearProduct(product, name, "gradient", "input")
    return [products[node] for node in step.calls() if node in products]


def is_product(node: fx.Node) -> bool:
    """True for a product of two matrices of floating-point numbers in 16 bits or 32, with a sum at the most."""
    if node.target not in (_aten.mm.default, _aten.addmm.default) or node.kwargs:
        return False
    return tensor(node).dtype in (torch.bfloat16, torch.float16, torch.float32)


def _products_in(gradient: fx.Node) -> Iterator[fx.Node]:
    """The products that a gradient is the sum of, also over ranks."""
    pending, seen = [gradient], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen or origin(node).phase is not Phase.BACKWARD:
            continue
        seen.add(node)
        if is_product(node) and node.target is _aten.mm.default:
            yield node
        elif is_view(node) or node.target is _aten.add.Tensor or node.target in (ops.wait, *ops.VALUE_COLLECTIVES):
            pending.extend(node.all_input_nodes)
