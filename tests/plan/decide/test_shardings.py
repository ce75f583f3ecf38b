"""How ranks share a computation: as cheap as any way that can be counted out, and the layouts that people write."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from tests.lib.models.huggingface import gpt2, llama, mixtral
from zerofx import Machine, PlanError
from zerofx.capture.trace import Batch, capture
from zerofx.ir.facts import Role, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.ir.sharding.rule import Rule, read_tensors
from zerofx.passes.prepare.partition import partition
from zerofx.passes.prepare.simplify import simplify
from zerofx.scheduler.analysis.sharding_ways import ShardingWays, sharding_ways
from zerofx.scheduler.cost.machine import Link
from zerofx.scheduler.cost.sharding_seconds import Prices, conversion_seconds, seconds_of_share
from zerofx.scheduler.decide.shardings import _Nodes, _Program, decide_shardings
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.placements import REPLICATED, SUM, Partial, Placement, Sharded, placement_of

FAST = replace(Machine.named("h100-sxm"), intra_node=Link(bandwidth=1e12, latency=1e-9))


def captured(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> StepGraph:
    step = capture(model, Batch.from_call(args, kwargs))
    simplify(step)
    return step


def placements_of(step: StepGraph, ways: ShardingWays, **prices: float) -> dict[str, str]:
    """How parameters lie, by name, where any of them is shared."""
    decisions = decide_shardings(ways, Mesh(model=ways.num_ranks), FAST, Prices(**prices))
    decided = {decision.node: decision.outputs[0] or "R" for decision in decisions}
    return {placeholder(node).name: decided.get(node.name, "R") for node in step.placeholders(Role.PARAMETER)}


class Chain(nn.Module):
    """One matrix, and what random words say of its product."""

    def __init__(self, words: tuple[str, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.words = words

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        for word in self.words:
            x = torch.relu(x) if word == "relu" else x + x
        return x.sum()


def counted_out(ways: ShardingWays) -> float:
    """The least seconds of all combinations of rules, each value converted at once for all who ask alike."""
    menus = {node: [Rule((p,), ()) for p in placements] for node, placements in ways.placeholders.items()} | ways.rules
    nodes, mesh = [*menus], Mesh(model=ways.num_ranks)
    shared = [[seconds_of_share(n, rule, mesh, FAST, Prices()) for rule in menus[n]] for n in nodes]
    conversions = []  # of each value, by what is chosen for those that have a say in it
    for source in nodes:
        numbers = [number for number, node in enumerate(nodes) if node is source or node in _askers(ways, source)]
        menu = list(itertools.product(*(range(len(shared[number])) for number in numbers)))
        rules = [{nodes[n]: menus[nodes[n]][i] for n, i in zip(numbers, chosen, strict=True)} for chosen in menu]
        seconds = [_conversion(ways, source, entry, mesh) for entry in rules]
        conversions.append((numbers, dict(zip(menu, seconds, strict=True))))
    return min(
        sum(costs[i] for costs, i in zip(shared, chosen, strict=True))
        + sum(seconds[*(chosen[number] for number in numbers)] for numbers, seconds in conversions)
        for chosen in itertools.product(*(range(len(costs)) for costs in shared))
    )


def _askers(ways: ShardingWays, source: fx.Node) -> dict[fx.Node, list[int]]:
    """Who asks for a value, and the numbers of their inputs: what reads it; -1 for a parameter that it is of."""
    step, nodes = ways.step, (*ways.placeholders, *ways.rules)
    asked = {node: [i for i, read in enumerate(read_tensors(node)) if read is source] for node in nodes}
    for node in step.placeholders(Role.PARAMETER):
        if step.gradients[placeholder(node).name] is source:
            asked[node].append(-1)
    return {node: numbers for node, numbers in asked.items() if numbers}


def _conversion(ways: ShardingWays, source: fx.Node, rules: Mapping[fx.Node, Rule], mesh: Mesh) -> float:
    """Seconds in which what ``source`` gives is converted, once for each placement that is asked for."""
    asked = {REPLICATED} if source is ways.step.loss else set[Placement]()
    for node, numbers in _askers(ways, source).items():
        lies = rules[node].outputs[0]
        assert lies is not None
        asked |= {(SUM if lies == REPLICATED else lies) if i < 0 else rules[node].inputs[i] for i in numbers}
    given = rules[source].outputs[0]
    assert given is not None
    if isinstance(given, Partial) and any(isinstance(placement, Partial) for placement in asked - {given}):
        return float("inf")
    value = source.meta["val"]
    return sum(conversion_seconds(value, given, placement, mesh, FAST) for placement in asked - {given})


@pytest.mark.parametrize("words", [("relu",), ("double",)], ids=" ".join)
def test_nothing_that_can_be_counted_out_is_cheaper(words: tuple[str, ...]) -> None:
    step = captured(Chain(words), torch.randn(4, 8))
    ways = sharding_ways(step, 2)
    mesh, rules = Mesh(model=2), dict[fx.Node, Rule]()
    decided = {d.node: d for d in decide_shardings(ways, mesh, FAST, Prices())}
    for node in (*ways.placeholders, *ways.rules):
        menu = [Rule((p,), ()) for p in ways.placeholders[node]] if node in ways.placeholders else ways.rules[node]
        if node.name not in decided:
            rules[node] = menu[0]
            continue
        decision = decided[node.name]
        outputs = tuple(placement_of(text) if text else None for text in decision.outputs)
        inputs = tuple(map(placement_of, decision.inputs))
        rules[node] = next(rule for rule in menu if (rule.outputs, rule.inputs) == (outputs, inputs))
    seconds = sum(seconds_of_share(node, rule, mesh, FAST, Prices()) for node, rule in rules.items())
    seconds += sum(_conversion(ways, node, rules, mesh) for node in rules)
    assert seconds <= counted_out(ways) * 1.001


class Sum(nn.Module):
    """Two matrices with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.one + self.other)).sum()


def test_all_who_are_given_one_value_say_how_it_lies() -> None:
    step = captured(Sum(), torch.randn(4, 8))
    (gradient,) = set(step.gradients.values())
    ways, program = sharding_ways(step, 2), _Program()
    nodes = _Nodes(ways, Mesh(model=2), FAST, Prices(), program, {"one": Sharded(0), "other": Sharded(1)})
    nodes.add_all()
    asked = [set(asked) for _, asked in nodes._readers()[ways.slot(gradient)]]
    assert asked == [{Sharded(0)}, {Sharded(1)}]


def test_a_transformer_is_shared_by_columns_then_rows() -> None:
    """Where parameters are pinned as Megatron has them, attention is by heads, with nothing exchanged around it."""
    torch.manual_seed(0)
    model = llama().to(torch.bfloat16)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    step = captured(model, input_ids=tokens, labels=tokens)
    ways = sharding_ways(step, 2)
    pins: dict[str, Placement] = {}
    for node in step.placeholders(Role.PARAMETER):
        name = placeholder(node).name
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            pins[name] = Sharded(0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            pins[name] = Sharded(1)
    decisions = {d.node: d for d in decide_shardings(ways, Mesh(model=2), FAST, Prices(), pins)}
    attention = [decisions[n] for n in decisions if n.startswith("_scaled_dot_product_flash_attention_for_cpu")]
    assert {d.outputs[0] for d in attention} == {"S1"}


def test_heads_of_a_fused_projection_are_three_groups() -> None:
    torch.manual_seed(0)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    step = captured(gpt2(), input_ids=tokens, labels=tokens)
    ways = sharding_ways(step, 2)
    weight = next(n for n in step.placeholders(Role.PARAMETER) if placeholder(n).name.endswith("attn.c_attn.weight"))
    assert Sharded(1, 3) in ways.placeholders[ways.classes.first[weight]]


@pytest.mark.days(3)
def test_layers_that_are_alike_are_decided_once() -> None:
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    counts = []
    for depth in (2, 6):
        torch.manual_seed(0)
        model = llama(num_hidden_layers=depth)
        counts.append(len(sharding_ways(captured(model, input_ids=tokens, labels=tokens), 2).rules))
    assert counts[0] == counts[1]


def test_a_pin_that_cannot_be_met_is_refused() -> None:
    step = captured(Chain(("relu",)), torch.randn(4, 8))
    with pytest.raises(PlanError, match=r"expected weight to lie in one of R, S0, S1 on 2 ranks .* found S1/3"):
        decide_shardings(sharding_ways(step, 2), Mesh(model=2), FAST, Prices(), {"weight": Sharded(1, 3)})


def test_sizes_that_ranks_do_not_divide_stay_whole() -> None:
    step = captured(Chain(("relu",)), torch.randn(4, 8))
    assert placements_of(step, sharding_ways(step, 3)) == {"weight": "R"}


def test_a_reason_says_what_the_next_best_costs() -> None:
    """No way to lay the weight out otherwise is cheaper than the reason says."""
    step = captured(Chain(("relu",)), torch.randn(4, 8))
    ways = sharding_ways(step, 2)
    (weight,) = (node for node in ways.placeholders if placeholder(node).role is Role.PARAMETER)
    (decision,) = (d for d in decide_shardings(ways, Mesh(model=2), FAST, Prices()) if d.parameter == "weight")
    match = re.fullmatch(r"as (R|S0|S1), the next best, a step takes ([\d.]+) (\S+) more, or longer", decision.reason)
    assert match is not None and match[1] != decision.outputs[0]
    least = counted_out(ways)
    others = [p for p in ways.placeholders[weight] if str(p) != decision.outputs[0]]
    second = counted_out(replace(ways, placeholders={**ways.placeholders, weight: others}))
    unit = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[match[3]]
    assert float(match[2]) * unit <= second - least + 1e-6


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.odd = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 7))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.renorm(x @ self.weight, 2, 0, 1.0) @ self.odd[:, :7]).square().sum()


def test_what_cannot_be_shared_is_said() -> None:
    step = captured(Renormed(), torch.randn(5, 8))
    decisions = decide_shardings(sharding_ways(step, 2), Mesh(model=2), FAST, Prices())
    whole = {decision.node: decision.reason for decision in decisions if decision.has_no_way}
    assert any("aten.renorm.default cannot be shared: every rank does it whole" in reason for reason in whole.values())
    partition(step, decisions, 2)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("width", "lies"), [(96, {"S1/2", "S2"}), (100, {"S0"})])
def test_experts_are_shared_by_columns_and_each_whole_where_these_do_not_divide(width: int, lies: set[str]) -> None:
    """Columns leave less to do between the two products, whichever experts the tokens have.

    Halves of 100 columns begin at no multiple of 16 bytes, as ``grouped_mm`` wants them to.
    """
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    step = captured(mixtral(hidden_size=64, intermediate_size=width), input_ids=tokens, labels=tokens)
    ways = sharding_ways(step, 2)
    decisions = decide_shardings(ways, Mesh(model=2), Machine.named("cpu"), Prices(), explained=False)
    assert {d.outputs[0] for d in decisions if "experts" in d.parameter} == lies
    ends = {d.node: d.inputs[0].partition("[")[2] for d in decisions if "grouped_mm" in d.node}
    assert len(ends) == 12  # forward's two products in each layer have two in backward each
    # Each layer's tokens are told from the other's.
    of_layers = {"cumsum]", "cumsum_1]"}
    assert (set(ends.values()) == of_layers) if lies == {"S0"} else of_layers.isdisjoint(ends.values())
