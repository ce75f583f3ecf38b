"""What users say of how modules lie: the plans that people have written, and what cannot be, with the operator that is
in the way."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.lib.models.huggingface import gpt2, llama
from tests.plan.decide.test_shardings import FAST, captured, placements_of
from zerofx import UsageError
from zerofx.ir.facts import Phase, origin
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.analysis.sharding_pins import apply_pins, pins_of
from zerofx.scheduler.analysis.sharding_ways import ShardingWays, sharding_ways
from zerofx.scheduler.cost.sharding_seconds import Prices
from zerofx.scheduler.decide.shardings import decide_shardings
from zerofx.scheduler.plan.mesh import Mesh

MEGATRON = {
    "*.c_attn": "column", "*.attn.c_proj": "row", "*.c_fc": "column", "*.mlp.c_proj": "row",
    "*.q_proj": "column", "*.k_proj": "column", "*.v_proj": "column", "*.o_proj": "row",
    "*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row",
}  # fmt: skip


@functools.cache
def language_model(make: Callable[[], nn.Module] = llama) -> StepGraph:
    """A captured model, which nobody changes."""
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    return captured(make(), input_ids=tokens, labels=tokens)


def half_llama() -> nn.Module:
    return llama().to(torch.bfloat16)


def left(step: StepGraph, asked: dict[str, str], num_ranks: int = 2) -> ShardingWays:
    """The ways that ``asked`` leaves."""
    pins = pins_of(step, asked)
    return apply_pins(sharding_ways(step, num_ranks, pins.marks), pins)


def of_layers(placements: dict[str, str]) -> dict[str, str]:
    """Those of matrices in layers."""
    return {name: lies for name, lies in placements.items() if "_proj.weight" in name or ".c_" in name}


@pytest.mark.days(3)
def test_the_plan_of_transformers_is_the_one_that_is_found_unasked() -> None:
    step = language_model(half_llama)
    pins = pins_of(step, dict(half_llama().tp_plan))  # type: ignore[arg-type]  # a property of its class
    assert pins.ignored == ()
    asked = placements_of(step, apply_pins(sharding_ways(step, 2, pins.marks), pins))
    unasked = placements_of(step, sharding_ways(step, 2))
    assert of_layers(asked) == of_layers(unasked)
    assert len(of_layers(asked)) == 2 * 7
    assert (asked["model.embed_tokens.weight"], asked["lm_head.weight"]) == ("S0", "S0")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
def test_words_are_about_what_products_give(make: Callable[[], nn.Module]) -> None:
    """A column is one of what is given: ``nn.Linear`` keeps it as a row, ``Conv1D`` does not, and a fused one in
    groups."""
    step = language_model(make)
    words = {pattern: word for pattern, word in MEGATRON.items() if ("c_" in pattern) == (make is gpt2)}
    lies = {
        name.partition(".h.0.")[2] or name.partition(".layers.0.")[2]: placement
        for name, placement in of_layers(placements_of(step, left(step, words))).items()
    }
    expected = {
        "attn.c_attn.weight": "S1/3", "attn.c_attn.bias": "S0/3", "attn.c_proj.weight": "S0", "attn.c_proj.bias": "R",
        "mlp.c_fc.weight": "S1", "mlp.c_fc.bias": "S0", "mlp.c_proj.weight": "S0", "mlp.c_proj.bias": "R",
        "self_attn.q_proj.weight": "S0", "self_attn.k_proj.weight": "S0", "self_attn.v_proj.weight": "S0",
        "self_attn.o_proj.weight": "S1", "mlp.gate_proj.weight": "S0", "mlp.up_proj.weight": "S0",
        "mlp.down_proj.weight": "S1",
    }  # fmt: skip
    assert {name: placement for name, placement in lies.items() if name} == {
        name: placement for name, placement in expected.items() if ("c_" in name) == (make is gpt2)
    }


@pytest.mark.days(3)
def test_norms_by_sequence_have_their_parameters_whole_and_give_parts_of_tokens() -> None:
    step = language_model()
    pins = pins_of(step, {"*norm": "sequence"})
    ways = apply_pins(sharding_ways(step, 2, pins.marks), pins)
    decisions = {d.node: d for d in decide_shardings(ways, Mesh(model=2), FAST, Prices())}
    assert {decisions[node.name].outputs for node in pins.results} == {("S1",)}
    assert all(lies == "R" for name, lies in placements_of(step, ways).items() if name.endswith("norm.weight"))


@pytest.mark.days(3)
def test_what_is_replicated_every_rank_does_whole() -> None:
    """Its results too, of which the last entry that names a module says where they lie."""
    step = language_model()
    pins = pins_of(step, {"*norm": "sequence", "*input_layernorm": "replicated", "model.layers.?": "replicated"})
    ways = apply_pins(sharding_ways(step, 2, pins.marks), pins)
    outputs = {d.node: d.outputs for d in decide_shardings(ways, Mesh(model=2), FAST, Prices())}
    lie = {pin.module.rpartition(".")[2]: outputs.get(node.name, ("R",)) for node, pin in pins.results.items()}
    whole, in_parts = ("0", "1", "input_layernorm"), ("post_attention_layernorm", "norm")
    assert lie == dict.fromkeys(whole, ("R",)) | dict.fromkeys(in_parts, ("S1",))
    parameters = placements_of(step, ways)
    assert all(parameters[f"model.layers.0.self_attn.{n}_proj.weight"] != "R" for n in "qkvo")


@pytest.mark.slow
def test_one_of_two_layers_that_are_alike() -> None:
    step = language_model()
    up = "model.layers.{}.mlp.up_proj.weight"
    lies = placements_of(step, left(step, {"*.up_proj": "column", up.format(1): "replicated"}))
    assert (lies[up.format(0)], lies[up.format(1)]) == ("S0", "R")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(x))
        return logits.square().sum()


def test_a_tied_parameter_does_as_each_of_its_names_says() -> None:
    step = captured(Tied(), torch.zeros(4, dtype=torch.int64))
    assert placements_of(step, left(step, {"head": "column"}))["embed.weight"] == "S0"
    assert placements_of(step, left(step, {"head": "column", "embed": "row"}))["embed.weight"] == "S0"
    with pytest.raises(UsageError, match=r"{'embed': 'row'} and shardings={'head': 'row'}, which do not go together"):
        left(step, {"embed": "row", "head": "row"})


def test_styles_that_say_nothing_here_are_told() -> None:
    step = captured(Tied(), torch.zeros(4, dtype=torch.int64))
    ignored = pins_of(step, {"embed": "all_reduce", "mlp.*.up": "colwise"}).ignored
    assert ignored == (
        "'embed': 'all_reduce' (it says how a module's forward is written)",
        "'mlp.*.up': 'colwise' (it names nothing in this model)",
    )


@pytest.mark.parametrize(
    ("asked", "num_ranks", "message"),
    [
        ({"*.q_proj": "column"}, 3, r"q_proj.weight, \[16, 16\], to lie on 3 ranks .* 'column'} asks, found mm \(aten"),
        ({"*.q_proj": "colwise"}, 3, r"found mm \(aten.mm.default of .* in the way, with which it can lie R"),
        ({"*norm": "sequence"}, 3, r"input_layernorm gives, \[1, 16, 16\], in parts along dimension 1 .* found mul"),
        ({"*.q_prj": "column"}, 2, r"found '\*.q_prj': 'column', which names none"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(asked: dict[str, str], num_ranks: int, message: str) -> None:
    step = language_model()
    with pytest.raises(UsageError, match=message):
        left(step, asked, num_ranks)


@pytest.mark.days(3)
def test_products_read_what_is_pinned_as_it_lies() -> None:
    step = language_model()
    pins = pins_of(step, {"*.up_proj": "column", "*.down_proj": "row"})
    ways = apply_pins(sharding_ways(step, 2, pins.marks), pins)
    decisions = {d.node: d for d in decide_shardings(ways, Mesh(model=2), FAST, Prices())}
    for node in pins.parameters:
        is_up, (transposed,) = "up_proj" in node.name, [n for n in node.users if n.target is torch.ops.aten.t.default]
        (product,) = (user for user in transposed.users if origin(user).phase is Phase.FORWARD)
        weight, result = ("S1", "S1") if is_up else ("S0", "P")
        assert (decisions[product.name].inputs[1], decisions[product.name].outputs) == (weight, (result,))
        assert not decisions[node.name].has_no_way
