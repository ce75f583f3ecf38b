"""Decide which matrix products of linear layers are taken in fp8: those with which a step is faster, casts included.

A product in fp8 takes what its kernel takes at the machine's rate for fp8, and its part of the scales and casts that it
reads: what several products read is shared among those that are in fp8. All that CUDA has are taken to be, then those
that lose by it are not, which leaves more of the casts to the others, until none loses. The cost of a scale and a cast
is that of a fused kernel: one that reads the factor, and one that reads it again and writes a byte for each element.
Sizes and seconds are those of one rank's part, where the ranks of the model axis share the computation. What they tell
each other of the largest magnitude of a factor that they have in parts is taken to be waited for.
The gradient of a weight is copied into its buffer, where a product as it is writes it by itself (``passes/direct.py``).

A weight's products are decided once: another batch shape of the step, or an evaluation, has those in fp8 that the first
has, as far as their sizes let it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import fx

from zerofx.ir.graph import StepGraph
from zerofx.ir.ops import VALUE_COLLECTIVES
from zerofx.passes.prepare.multiply import has_fp8, multiply_in_fp8
from zerofx.scheduler.analysis.linear_products import (
    LinearProduct,
    find_linear_products,
    is_product,
    placements_of_factors,
)
from zerofx.scheduler.analysis.loss_heads import find_logits
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost, seconds_to_copy
from zerofx.scheduler.cost.wire_volume import value_collective_seconds
from zerofx.scheduler.plan.decisions import ProductDecision
from zerofx.scheduler.plan.placements import Placement, Replicated, Sharded
from zerofx.units import format_seconds

ProductKey = tuple[str, str]
"""A product in all graphs of a model: its parameter, and what it gives."""


def decide_products(
    whole: StepGraph, step: StepGraph, num_parts: int, machine: Machine, recipe: str,
    earlier: Collection[ProductKey] | None = None,
) -> tuple[ProductDecision, ...]:  # fmt: skip
    """Decisions about all products of linear layers of ``step``, as one of ``num_parts`` ranks runs a micro-batch.

    ``whole``: the same of whole values, which tells what products are. ``earlier``: those that are in fp8 in the first
    step of the model, which this one follows.
    """
    products, heads, own = find_linear_products(whole), find_logits(whole), step.nodes_by_name()
    logits = {product.weight for product in products if product.node in heads}
    products = [replace(product, node=own[product.node.name]) for product in products if product.node.name in own]
    placements = placements_of_factors(step)
    decisions = {
        product.node.name: ProductDecision(
            product.node.name, product.weight, product.left, product.right, not refusal, refusal
        )
        for product in products
        for refusal in [_refusal(product, placements[product.node.name], machine, recipe, logits)]
    }
    if earlier is not None:
        for name, decision in decisions.items():
            is_low = (decision.weight, decision.gives) in earlier
            reason = "as in the model's first step" if is_low == decision.in_fp8 or not is_low else decision.reason
            decisions[name] = replace(decision, in_fp8=is_low and decision.in_fp8, reason=reason)
        return tuple(decisions.values())
    plain = {product.node.name: node_cost(product.node, machine).seconds for product in products}
    return tuple(_choose(step, num_parts, machine, recipe, decisions, plain).values())


def _refusal(
    product: LinearProduct, lies: Sequence[Placement], machine: Machine, recipe: str, logits: Collection[str]
) -> str:
    """The reason that a product is not taken in fp8 whatever it would take; "" if there is none."""
    if machine.device.peak.fp8 is None:
        return f"{machine.name} has no rate for fp8"
    if machine.device.compute_capability is None and not machine.is_cpu:
        return f"{machine.name} has formats of its own for fp8, as it is not NVIDIA's"
    if not has_fp8(product.left, product.right, recipe):
        return f"{recipe} has weights' gradients in the compute dtype"
    if product.weight in logits:
        return "it gives the logits of the loss, or is for their gradient"
    if not is_product(product.node) or not all(isinstance(each, Replicated | Sharded) for each in lies):
        return f"ranks share it by factors that lie as {' and '.join(map(str, lies))}, of which no scale is known"
    return product.refusal()


def _choose(
    step: StepGraph,
    num_parts: int,
    machine: Machine,
    recipe: str,
    decisions: dict[str, ProductDecision],
    plain: Mapping[str, float],
) -> dict[str, ProductDecision]:
    """The decisions, with those products in fp8 that gain by it; ``plain``: their seconds as they are."""
    chosen = [decision for decision in decisions.values() if decision.in_fp8]
    written = multiply_in_fp8(step.clone(), chosen, recipe, num_parts)
    of_product = dict(written)
    seconds: dict[fx.Node, float] = {}
    for node in (node for each in written.values() for node in (*each.own, *each.casts)):
        is_sent = node.target in VALUE_COLLECTIVES
        seconds[node] = value_collective_seconds(node, machine) if is_sent else node_cost(node, machine).seconds
    while of_product:
        readers = Counter(node for each in of_product.values() for node in each.casts)
        lost = []
        for name, each in of_product.items():
            casts = sum(seconds[node] / readers[node] for node in each.casts)
            low, high = sum(seconds[node] for node in each.own) + casts, plain[name]
            if decisions[name].gives == "weight gradient":  # a product as it is writes its gradient where it is to be
                low += seconds_to_copy(each.own[-1], machine)
            sent = sum(seconds[node] / readers[node] for node in each.casts if node.target in VALUE_COLLECTIVES)
            for_casts = f"{format_seconds(casts)} of it for casts" + f", {format_seconds(sent)} between ranks" * (
                sent > 0
            )
            words = f"{format_seconds(low)}, {for_casts}, in place of {format_seconds(high)}"
            decisions[name] = replace(decisions[name], in_fp8=low < high, seconds=high - low, reason=words)
            lost += [name] if low >= high else []
        if not lost:
            break
        for name in lost:
            del of_product[name]
    return decisions
