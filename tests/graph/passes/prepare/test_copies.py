"""Rows of the busiest experts on all ranks: whatever the routing, ranks together compute what the whole graph does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.graph.passes.prepare.test_partition import GPT_OSS, captured, of_rank
from tests.graph.passes.prepare.test_rounds import decisions_that_send
from tests.lib.models import CASES, Case
from tests.lib.virtual_ranks import Feeds, feeds_of, part_of, run
from zerofx.ir import ops
from zerofx.ir.facts import Role, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.row_copies import deal_rows
from zerofx.ir.op_kernels.row_routes import pack_rows
from zerofx.passes.prepare.copies import Copies
from zerofx.passes.prepare.partition import partition
from zerofx.passes.prepare.rounds import Rounds
from zerofx.passes.verify import verify
from zerofx.scheduler.plan.placements import LOSS_OF_OVERFLOW, REPLICATED, placement_of


def _run(
    num_ranks: int, capacity: float, num_copies: int, num_rounds: int = 1, case: Case = CASES["mixtral"]
) -> tuple[StepGraph, list[tuple[Tensor, ...]], tuple[Tensor, ...], Sequence[tuple[Tensor, Tensor]]]:
    """The step of each of the ranks, their results, those of one, and the gradients of experts of both, of each
    rank."""
    model, batch, step = captured(case, torch.bfloat16)
    plain = decisions_that_send(step, num_ranks, capacity, num_rounds)
    decisions = tuple(replace(each, num_copies=num_copies) if each.sends_rows else each for each in plain)
    feeds, placements = feeds_of(step, model, batch), {d.node: placement_of(d.outputs[0] or "R") for d in decisions}
    (whole,) = run(step.graph, [feeds])
    partition(step, decisions, num_ranks)
    Copies(decisions, num_ranks).run(step)
    if num_rounds > 1:
        Rounds(decisions).run(step)
    step.graph.lint()
    verify(step, "copies")
    of_ranks: list[Feeds] = [of_rank(feeds, placements, rank, num_ranks) for rank in range(num_ranks)]
    results = run(step.graph, of_ranks)
    nodes, gradients = {placeholder(node).name: node.name for node in step.placeholders(Role.PARAMETER)}, []
    for number, name in enumerate(step.gradient_names, 1):
        lies = placements.get(nodes[name], REPLICATED)
        for rank, result in enumerate(results):
            own = (
                torch.stack([each[number + 1] for each in results]).sum(0) if lies == REPLICATED else result[number + 1]
            )
            expected = part_of(whole[number], lies, rank, num_ranks)
            if lies == REPLICATED:
                assert torch.equal(own, expected), name
            else:
                gradients.append((own, expected))
    return step, results, whole, gradients


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("case", "num_ranks", "capacity", "num_copies", "num_rounds"),
    [
        *((CASES["mixtral"], *how) for how in [(2, 4.0, 1, 1), (2, 1.25, 4, 1), (4, 16.0, 2, 1), (4, 1.25, 4, 1)]),
        *((CASES["mixtral"], *how) for how in [(2, 1.0, 1, 3), (4, 0.5, 4, 6)]),
        *((GPT_OSS, *how) for how in [(2, 2.0, 1, 1), (4, 1.25, 4, 1), (2, 1.0, 1, 3), (4, 0.5, 4, 6)]),
    ],
)
def test_rows_of_copied_experts_are_dealt(
    case: Case, num_ranks: int, capacity: float, num_copies: int, num_rounds: int
) -> None:
    """All but the gradients of experts' weights and biases to the bit, in bf16; those are sums of ranks', each
    rounded."""
    step, results, whole, gradients = _run(num_ranks, capacity, num_copies, num_rounds, case)
    assert all(torch.equal(result[0], whole[0]) for result in results)
    for own, expected in gradients:
        bound = num_ranks * num_rounds * 2.0**-8 * expected.abs().max().item()
        torch.testing.assert_close(own, expected, rtol=0, atol=bound)
    calls = Counter(node.target for node in step.calls())
    assert calls[deal_rows] == 2
    # Weights of two products, forward and backward, and their gradients; biases in forward, and theirs.
    assert calls[ops.all_reduce_values] == 2 * (10 if case is GPT_OSS else 6)
    assert calls[pack_rows] == calls[ops.exchange_values] == 2 * (6 if num_rounds == 1 else 8 * num_rounds)


def test_with_all_experts_copied_each_rank_has_as_many_rows_for_each() -> None:
    _, results, *_ = _run(4, 1.25, 4)
    for _, shares, *_ in results:
        assert shares[0] <= 1.25
    plain = _run(4, 16.0, 1)[1]
    assert all(shares[0] > results[0][1][0] for _, shares, *_ in plain)


def test_the_loss_says_where_too_few_are_copied() -> None:
    model, batch, step = captured("mixtral", torch.bfloat16)
    plain = decisions_that_send(step, 4, 0.5, 1)
    decisions = tuple(replace(each, num_copies=1) if each.sends_rows else each for each in plain)
    feeds, placements = feeds_of(step, model, batch), {d.node: placement_of(d.outputs[0] or "R") for d in decisions}
    partition(step, decisions, 4)
    Copies(decisions, 4).run(step)
    for loss, shares, *_ in run(step.graph, [of_rank(feeds, placements, rank, 4) for rank in range(4)]):
        assert loss == LOSS_OF_OVERFLOW
        assert shares[0] == shares[1] > 0.5
