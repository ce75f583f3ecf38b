"""One rank's graph: whatever way each call is shared in, ranks together compute what the whole graph does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from tests.lib.models.cases import CASES, Case, batches
from tests.lib.models.huggingface import gpt_oss
from tests.lib.virtual_ranks import Drawn, assembled, feeds_of, part_of, run
from zerofx.capture.trace import Batch, capture
from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.facts import Phase, Role, origin, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.own_rows import own_rows, whole_rows
from zerofx.ir.op_kernels.row_routes import pack_rows, row_routes
from zerofx.ir.ops import gather_values
from zerofx.ir.sharding.attention import is_attention
from zerofx.ir.sharding.rule import Rule
from zerofx.passes.lib.placement_check import check_placements, whole_calls
from zerofx.passes.prepare.partition import partition
from zerofx.passes.prepare.simplify import simplify
from zerofx.passes.verify import verify
from zerofx.scheduler.analysis.sharding_ways import ShardingWays, sharding_ways, slot_of
from zerofx.scheduler.plan.decisions import ShardingDecision
from zerofx.scheduler.plan.placements import (
    LOSS_OF_OVERFLOW,
    REPLICATED,
    Partial,
    Placement,
    Ragged,
    placement_of,
)

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
MODELS = (
    "gpt",
    "llama",
    "gpt2",
    "bert",
    "t5",
    "vit",
    "qwen3 next",
    "mixtral",
    "llama masked",
    "image layers",
    "torch layers",
)
DRAWING = ("dropout", "gpt2 dropout", "bert dropout")
GPT_OSS = replace(CASES["mixtral"], model=gpt_oss)


def captured(of: str | Case, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Batch, StepGraph]:
    case = CASES[of] if isinstance(of, str) else of
    torch.manual_seed(0)
    model = case.model().to(dtype)
    batch = Batch.from_call(*next(batches(case, 0, 1)))
    step = capture(model, batch, loss_fn=case.loss_fn)
    simplify(step)
    return model, batch, step


def drawn(step: StepGraph, num_ranks: int, draw: random.Random) -> tuple[ShardingDecision, ...]:
    """Any placement for each parameter, and any rule for each call."""
    ways = sharding_ways(step, num_ranks)
    decisions: list[ShardingDecision] = []
    for node, placements in ways.placeholders.items():
        placement = draw.choice(placements)
        decisions += [decision(ways, member, Rule((placement,), ())) for member in ways.classes.members[node]]
    for node, rules in ways.rules.items():
        # What parts add up to is no largest element of others: such parts are only made, and then reduced.
        rule = draw.choice([rule for rule in rules if not any(_is_extreme(p) for p in rule.inputs)])
        decisions += [decision(ways, member, rule) for member in ways.classes.members[node]]
    return tuple(decisions)


def _is_extreme(placement: Placement) -> bool:
    return isinstance(placement, Partial) and placement.reduction != "sum"


def decision(ways: ShardingWays, node: fx.Node, rule: Rule) -> ShardingDecision:
    outputs = tuple(
        None if placement is None else str(ways.member_placement(node, placement)) for placement in rule.outputs
    )
    return ShardingDecision(node.name, outputs, tuple(str(ways.member_placement(node, p)) for p in rule.inputs))


def compare(
    model: nn.Module, batch: Batch, step: StepGraph, decisions: Iterable[ShardingDecision], num_ranks: int
) -> None:
    """Partition ``step``, run it on all ranks, and compare what each gives with its part of the whole graph's.

    The whole graph is given the random numbers that ranks have drawn, put together.
    """
    feeds, placements = feeds_of(step, model, batch), {d.node: placement_of(d.outputs[0] or "R") for d in decisions}
    graph, drawn = step.graph, Drawn()
    nodes = {placeholder(node).name: node.name for node in step.placeholders(Role.PARAMETER)}
    gradients = [placements.get(nodes[name], REPLICATED) for name in step.gradient_names]
    whole_graph = whole_calls(step)
    partition(step, tuple(decisions), num_ranks)
    step.graph.lint()
    verify(step, "partition")
    unknown = check_placements(step, whole_graph, num_ranks)
    # What is attended to a run of tokens at a time is no part of any value, and nothing is known of what is made of it.
    by_tokens = [node for node in step.calls() if is_attention(node.target) and node.name not in whole_graph]
    assert by_tokens or unknown == []
    results = run(step.graph, [of_rank(feeds, placements, rank, num_ranks) for rank in range(num_ranks)], drawn)
    together = {name: [assembled(parts, placements.get(name, REPLICATED))] for name, parts in drawn.items()}
    (whole,) = run(graph, [feeds], together)
    num_values = len(whole) - len(gradients)
    for index, expected in enumerate(whole[:num_values]):
        for result in results:
            torch.testing.assert_close(result[index], expected, rtol=1e-4, atol=1e-5)
    for index, placement in enumerate(gradients, num_values):
        parts = [result[index] for result in results]
        if placement == REPLICATED:  # left as parts that add up
            torch.testing.assert_close(sum(parts), whole[index], rtol=1e-3, atol=1e-5)
            continue
        for rank, part in enumerate(parts):
            torch.testing.assert_close(part, part_of(whole[index], placement, rank, num_ranks), rtol=1e-3, atol=1e-5)


def of_rank(
    feeds: Mapping[str, Tensor], placements: Mapping[str, Placement], rank: int, num_ranks: int
) -> dict[str, Tensor]:
    parts = {n: part_of(t, placements.get(n, REPLICATED), rank, num_ranks).contiguous() for n, t in feeds.items()}
    return {**parts, "model_rank": torch.tensor([rank]), "model_rank_on_host": torch.tensor(rank)}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [*MODELS[:3], DRAWING[0]])
def test_any_way_to_share_each_call_gives_the_whole_graphs_values(name: str) -> None:
    model, batch, step = captured(name)
    compare(model, batch, step, drawn(step, 2, random.Random(name)), 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", [*MODELS, *DRAWING])
def test_many_ways_to_share_each_call_give_the_whole_graphs_values(name: str, num_ranks: int, seed: int) -> None:
    model, batch, step = captured(name)
    compare(model, batch, step, drawn(step, num_ranks, random.Random(seed)), num_ranks)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, torch.float32), (4, torch.float32), (2, torch.bfloat16)])
def test_each_rank_has_the_tokens_of_its_experts(num_ranks: int, dtype: torch.dtype) -> None:
    """Products of tokens with their experts' matrices, and all that follows them and treats each row for itself.

    In bfloat16 they are ATen's operator, of rows with matrices and of rows with rows.
    """
    model, batch, step = captured("mixtral", dtype)
    ways, decisions = sharding_ways(step, num_ranks), list[ShardingDecision]()
    for node, rules in ways.rules.items():
        by_rows = [rule for rule in rules if any(isinstance(p, Ragged) for p in (*rule.outputs, *rule.inputs))]
        for rule in by_rows[:1]:
            decisions += [decision(ways, member, rule) for member in ways.classes.members[node]]
    experts = [node.name for node in step.placeholders(Role.PARAMETER) if "experts" in placeholder(node).name]
    decisions += [ShardingDecision(name, ("S0",)) for name in experts]
    compare(model, batch, step, decisions, num_ranks)
    rows_of = Counter(node.target for node in step.calls() if node.target in (own_rows, whole_rows))
    # Of each layer: tokens, their weights and the gradient of results go in; results and two gradients come out.
    assert rows_of == {own_rows: 3 * 2, whole_rows: 3 * 2}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("capacity", [1.0, 1.5, 2.0, 16.0])
@pytest.mark.parametrize(
    ("case", "num_ranks", "dtype"),
    [
        (CASES["mixtral"], 2, torch.float32),
        (CASES["mixtral"], 4, torch.float32),
        (CASES["mixtral"], 2, torch.bfloat16),
        (GPT_OSS, 2, torch.bfloat16),
        (GPT_OSS, 4, torch.bfloat16),
    ],
)
def test_rows_are_exchanged_with_the_ranks_of_their_experts(
    case: Case, num_ranks: int, dtype: torch.dtype, capacity: float
) -> None:
    """All four ways of a layer, and of weights: with room for all, what the whole graph gives, in bf16 to the bit.

    Where rows have found no room, the loss says so. Rows of biases need none: they are sent where no other way is known
    to be the same, with room for all.
    """
    model, batch, step = captured(case, dtype)
    ways, decisions = sharding_ways(step, num_ranks, capacity=capacity), list[ShardingDecision]()
    for node, rules in ways.rules.items():
        by_rows = [rule for rule in rules if rule.is_bounded]
        for rule in by_rows[:1]:
            decisions += [decision(ways, member, rule) for member in ways.classes.members[node]]
    experts = [node.name for node in step.placeholders(Role.PARAMETER) if "experts" in placeholder(node).name]
    decisions += [ShardingDecision(name, ("S0",)) for name in experts]
    feeds, placements = feeds_of(step, model, batch), {d.node: placement_of(d.outputs[0] or "R") for d in decisions}
    (whole,) = run(step.graph, [feeds])
    names, whole_graph = step.gradient_names, whole_calls(step)
    partition(step, tuple(decisions), num_ranks)
    step.graph.lint()
    verify(step, "partition")
    assert check_placements(step, whole_graph, num_ranks) == []
    calls = Counter(node.target for node in step.calls())
    # Of each layer: tokens and their weights go to experts, results come back; likewise the other way round.
    num_biases = 4 if case is GPT_OSS and capacity == 16.0 else 0  # and their gradients
    assert calls[row_routes] == calls[pack_rows] == calls[ops.exchange_values] == (6 + num_biases) * 2
    outcomes = run(step.graph, [of_rank(feeds, placements, rank, num_ranks) for rank in range(num_ranks)])
    results = [(loss, *gradients) for loss, _, *gradients in outcomes]  # and the most rows that a rank has for another
    assert all(torch.equal(result[0], results[0][0]) for result in results)
    if results[0][0] == LOSS_OF_OVERFLOW:
        assert capacity < num_ranks**2
        return
    # How a product of fp32 rounds may depend on its number of rows, which processors differ in.
    bound = 1e-6 if dtype == torch.float32 else 0.0
    torch.testing.assert_close(results[0][0], whole[0], rtol=bound, atol=bound)
    nodes = {placeholder(node).name: node.name for node in step.placeholders(Role.PARAMETER)}
    for number, name in enumerate(names, 1):
        lies = placements.get(nodes[name], REPLICATED)
        for rank, result in enumerate(results):
            terms = torch.stack([each[number] for each in results])
            gradient = terms.sum(0) if lies == REPLICATED else result[number]
            expected = part_of(whole[number], lies, rank, num_ranks)
            torch.testing.assert_close(gradient, expected, rtol=bound, atol=bound)


def test_nothing_is_shared_without_decisions() -> None:
    model, batch, step = captured("gpt")
    before = [node.name for node in step.calls()]
    compare(model, batch, step, (), 2)
    added = [node for node in step.calls() if node.name not in before]
    assert not [node for node in step.calls() if node.target is ops.wait]
    # Gradients of whole parameters are left as parts that add up: here the first rank has them.
    assert {str(node.target) for node in added} <= {"aten.ne.Scalar", "aten.masked_fill.Scalar"}


def test_gradients_lie_as_their_parameters_where_their_layer_is_done() -> None:
    """Not where the step ends: buckets are reduced, updated and dropped one after the other."""
    _, _, step = captured("gpt")
    bias = next(n for n in step.placeholders(Role.PARAMETER) if placeholder(n).name == "layers.2.mlp.out.bias")
    partition(step, (ShardingDecision(bias.name, ("S0",)),), 2)
    order = step.positions()
    complete = {name: order[node] for name, node in step.gradients.items()}
    assert complete["layers.2.mlp.out.bias"] < min(at for name, at in complete.items() if "layers.1." in name)


def test_a_parameter_is_this_ranks_part_of_it() -> None:
    _, _, step = captured("gpt")
    node = next(node for node in step.placeholders(Role.PARAMETER) if node.meta["val"].shape[0] % 2 == 0)
    rows = node.meta["val"].shape[0]
    info = next(info for info in step.parameters if info.name == placeholder(node).name)
    partition(step, (ShardingDecision(node.name, ("S0",)),), 2)
    part = next(part for part in step.parameters if part.name == info.name)
    assert part.shape == (rows // 2, *info.shape[1:])
    assert (part.part, part.num_parts) == (placement_of("S0"), 2)


def test_a_decision_about_a_node_that_there_is_not_is_refused() -> None:
    _, _, step = captured("gpt")
    with pytest.raises(PlanError, match="shards nowhere, which this graph has not"):
        partition(step, (ShardingDecision("nowhere", ("S0",), ("S0",)),), 2)


def test_a_way_that_an_operator_has_not_is_refused() -> None:
    _, _, step = captured("gpt")
    product = next(node for node in step.calls() if node.target is torch.ops.aten.mm.default)
    with pytest.raises(PlanError, match="expected a way to share"):
        partition(step, (ShardingDecision(product.name, ("S0",), ("S1", "S1")),), 2)


@pytest.mark.parametrize("again", [(), ("R",)])
def test_a_value_that_is_not_kept_whole_is_gathered_once_more_for_backward(again: tuple[str, ...]) -> None:
    model, batch, step = captured("gpt")
    attention = next(node for node in step.calls() if node.target is ATTENTION)
    ways = sharding_ways(step, 2)
    rule = next(rule for rule in ways.rules[attention] if rule.outputs[0] == placement_of("S1"))
    shared = replace(decision(ways, attention, rule), again=again)
    compare(model, batch, step, (shared,), 2)
    gathers = [(slot_of(node.all_input_nodes[0]), node) for node in step.calls() if node.target is gather_values]
    of_result = [node for (source, index), node in gathers if (source.name, index) == (attention.name, 0)]
    # It is read by the projection in forward and, whole, by attention's own backward.
    assert [origin(node).phase for node in of_result] == [Phase.FORWARD, *([Phase.BACKWARD] if again else [])]


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight).t().exp().mean()


def test_what_is_copied_to_be_sent_is_held_until_it_is_there() -> None:
    torch.manual_seed(0)
    model, batch = Transposed(), Batch.from_call((torch.randn(4, 8),), {})
    step = capture(model, batch)
    (weight,) = step.placeholders(Role.PARAMETER)
    product = next(node for node in step.calls() if node.target is torch.ops.aten.mm.default)
    transposed = next(node for node in product.users if node.target is torch.ops.aten.t.default)
    terms = (
        ShardingDecision(weight.name, ("S0",)),
        ShardingDecision(product.name, ("P",), ("S1", "S0")),
        ShardingDecision(transposed.name, ("P",), ("P",)),
    )
    compare(model, batch, step, terms, 2)


class NormedInGroups(nn.Module):
    """A product whose input lies by columns, so that the gradient which group norm is given back does, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.GroupNorm(4, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(x).transpose(1, 2))
        return out.square().mean()


class Masked(nn.Module):
    """One value is put where a mask of two dimensions is true."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = self.up(x).square()
        values[self.gate(x) > 0] = 0.5
        return values.exp().mean()


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("make", "shape"), [(NormedInGroups, (1, 8, 16)), (Masked, (4, 8))], ids=["norm", "mask"])
@pytest.mark.parametrize("seed", range(8))
def test_what_kernels_take_for_granted_is_so_on_each_rank(
    make: Callable[[], nn.Module], shape: tuple[int, ...], seed: int
) -> None:
    torch.manual_seed(0)
    model, batch = make(), Batch.from_call((torch.randn(shape),), {})
    step = capture(model, batch)
    simplify(step)
    compare(model, batch, step, drawn(step, 2, random.Random(seed)), 2)
