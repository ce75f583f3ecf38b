"""Attention whose queries are shared by tokens: keys and values whole, or handed around, give one process's values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graph.passes.prepare.test_partition import compare, decision
from zerofx.capture.trace import Batch, capture
from zerofx.ir.ops import shift_values
from zerofx.ir.sharding.rule import Rule
from zerofx.passes.prepare.simplify import simplify
from zerofx.scheduler.analysis.sharding_ways import sharding_ways
from zerofx.scheduler.plan.decisions import ShardingDecision
from zerofx.scheduler.plan.placements import REPLICATED, Sharded

NUM_TOKENS = 32


class Attention(nn.Module):
    """Queries, keys and values of one matrix each; fewer heads of keys than of queries."""

    def __init__(self, *, causal: bool, num_keys: int = NUM_TOKENS, masked: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(0.3 * torch.randn(8, size)) for size in (16, 8, 8))
        self.causal, self.num_keys = causal, num_keys
        self.mask: Tensor | None
        self.register_buffer("mask", torch.randn(NUM_TOKENS, num_keys) if masked else None)

    def forward(self, x: Tensor) -> Tensor:
        def heads(weight: Tensor, num_tokens: int) -> Tensor:
            of_heads: Tensor = (x[:, :num_tokens] @ weight).unflatten(-1, (-1, 4)).transpose(1, 2)
            return of_heads

        queries, keys = heads(self.query, NUM_TOKENS), heads(self.key, self.num_keys)
        values = heads(self.value, self.num_keys)
        y = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=self.mask, is_causal=self.causal, enable_gqa=True
        )
        loss: Tensor = y.square().sum() + y.sum()
        return loss


def shared(model: nn.Module, num_ranks: int, groups: int, *, ring: bool) -> tuple[set[object], int]:
    """Compare with the whole graph what ranks give that share attention alone; targets, and how many calls."""
    torch.manual_seed(0)
    batch = Batch.from_call((torch.randn(2, NUM_TOKENS, 8),), {})
    step = capture(model, batch)
    simplify(step)
    ways = sharding_ways(step, num_ranks)
    decisions: list[ShardingDecision] = []
    for node, rules in ways.rules.items():
        if "attention" in str(node.target):
            rule = next(rule for rule in rules if _is_by_tokens(rule, groups, ring=ring))
            decisions += [decision(ways, member, rule) for member in ways.classes.members[node]]
    assert len(decisions) == 2
    compare(model, batch, step, decisions, num_ranks)
    targets = [node.target for node in step.calls()]
    return set(targets), sum("attention" in str(target) for target in targets)


def _is_by_tokens(rule: Rule, groups: int, *, ring: bool) -> bool:
    is_backward = rule.outputs[1] != Sharded(2, groups) or len(rule.outputs) == 3
    key = rule.inputs[2 if is_backward else 1]
    return rule.outputs[0] == Sharded(2, groups) and key == (Sharded(2, groups) if ring else REPLICATED)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("ring", [False, True])
def test_tokens_see_those_before_them(num_ranks: int, groups: int, ring: bool) -> None:
    targets, num_calls = shared(Attention(causal=True), num_ranks, groups, ring=ring)
    assert (shift_values in targets) == ring
    # A call for each part of the queries, and for each rank's keys where these are handed around.
    assert num_calls == 2 * groups * (num_ranks if ring else 1)


@pytest.mark.parametrize("ring", [False, True])
def test_tokens_see_all(ring: bool) -> None:
    targets, num_calls = shared(Attention(causal=False), 2, 1, ring=ring)
    assert num_calls == 2 * (2 if ring else 1)
    assert ring or shift_values not in targets


def test_what_a_mask_says_is_kept() -> None:
    shared(Attention(causal=False, masked=True), 4, 1, ring=False)


def test_other_numbers_of_keys_are_gathered() -> None:
    shared(Attention(causal=False, num_keys=24), 2, 1, ring=False)
    with pytest.raises(StopIteration):
        shared(Attention(causal=False, num_keys=24), 2, 1, ring=True)
