"""Rows of experts in rounds: whatever the routing, ranks together compute what the whole graph does, within less."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.graph.passes.prepare.test_partition import GPT_OSS, captured, decision, of_rank
from tests.lib.models import CASES, Case
from tests.lib.virtual_ranks import feeds_of, part_of, run
from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.facts import Role, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.row_routes import pack_rows
from zerofx.passes.prepare.partition import partition
from zerofx.passes.prepare.rounds import Rounds
from zerofx.passes.verify import verify
from zerofx.scheduler.analysis.sharding_ways import sharding_ways
from zerofx.scheduler.plan.decisions import ShardingDecision
from zerofx.scheduler.plan.placements import LOSS_OF_OVERFLOW, REPLICATED, placement_of


def decisions_that_send(
    step: StepGraph, num_ranks: int, capacity: float, num_rounds: int
) -> tuple[ShardingDecision, ...]:
    ways, decisions = sharding_ways(step, num_ranks, capacity=capacity), list[ShardingDecision]()
    for node, rules in ways.rules.items():
        for rule in [rule for rule in rules if rule.is_bounded][:1]:
            members = ways.classes.members[node]
            decisions += [replace(decision(ways, member, rule), num_rounds=num_rounds) for member in members]
    experts = [node.name for node in step.placeholders(Role.PARAMETER) if "experts" in placeholder(node).name]
    return (*decisions, *(ShardingDecision(name, ("S0",)) for name in experts))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("case", "num_ranks", "capacity", "num_rounds", "divides_experts"),
    [
        (CASES["mixtral"], 2, 1.25, 2, False),
        (CASES["mixtral"], 2, 1.0, 3, False),
        (CASES["mixtral"], 4, 1.25, 4, True),
        (CASES["mixtral"], 2, 0.5, 6, True),
        (GPT_OSS, 2, 1.25, 2, False),
        (GPT_OSS, 2, 0.5, 6, True),
    ],
)
def test_rows_are_sent_in_rounds(
    case: Case, num_ranks: int, capacity: float, num_rounds: int, divides_experts: bool
) -> None:
    """To the bit in bf16 where each expert's rows are in one round; its gradient is rounded once more in others. Rows
    of biases, which are where they are added, are not sent."""
    model, batch, step = captured(case, torch.bfloat16)
    decisions = decisions_that_send(step, num_ranks, capacity, num_rounds)
    feeds, placements = feeds_of(step, model, batch), {d.node: placement_of(d.outputs[0] or "R") for d in decisions}
    (whole,) = run(step.graph, [feeds])
    partition(step, decisions, num_ranks)
    Rounds(decisions).run(step)
    step.graph.lint()
    verify(step, "rounds")
    calls = Counter(node.target for node in step.calls())
    # Of each layer and round: two exchanges to experts and one back, one of gradients and two back, and the first two
    # again in backward.
    assert calls[pack_rows] == calls[ops.exchange_values] == num_rounds * 8 * 2
    results = run(step.graph, [of_rank(feeds, placements, rank, num_ranks) for rank in range(num_ranks)])
    assert all(torch.equal(result[0], whole[0]) for result in results)
    nodes = {placeholder(node).name: node.name for node in step.placeholders(Role.PARAMETER)}
    for number, name in enumerate(step.gradient_names, 1):
        lies = placements.get(nodes[name], REPLICATED)
        bound = 2.0**-7 * whole[number].abs().max().item() if divides_experts and "experts" in name else 0.0
        for rank, (_, _, *gradients) in enumerate(results):
            terms = torch.stack([gradient[number + 1] for gradient in results])
            gradient = terms.sum(0) if lies == REPLICATED else gradients[number - 1]
            torch.testing.assert_close(gradient, part_of(whole[number], lies, rank, num_ranks), rtol=0, atol=bound)


def test_the_loss_says_where_there_are_too_few_rounds() -> None:
    model, batch, step = captured("mixtral", torch.bfloat16)
    decisions = decisions_that_send(step, 2, 0.5, 2)
    feeds, placements = feeds_of(step, model, batch), {d.node: placement_of(d.outputs[0] or "R") for d in decisions}
    partition(step, decisions, 2)
    Rounds(decisions).run(step)
    for loss, shares, *_ in run(step.graph, [of_rank(feeds, placements, rank, 2) for rank in range(2)]):
        assert loss == LOSS_OF_OVERFLOW
        assert shares[0] == shares[1] > 1


def test_sums_over_rows_that_do_not_add_up_are_refused() -> None:
    _, _, step = captured("mixtral", torch.bfloat16)
    decisions = decisions_that_send(step, 2, 1.25, 2)
    partition(step, decisions, 2)
    product = next(node for node in step.calls() if "grouped_mm" in str(node.target))
    with step.graph.inserting_after(product):
        largest = step.graph.call_function(torch.ops.aten.amax.default, (product, [0]))
    largest.meta = {**product.meta, "val": product.meta["val"][0]}
    with pytest.raises(PlanError, match=f"{largest.name} is none of the sums"):
        Rounds((*decisions, ShardingDecision(largest.name, ("R",)))).run(step)
