from __future__ import annotations

import copy
import operator
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.graphs import difference, prepare, run_graph
from zerofx.capture import Batch, capture
from zerofx.codegen.regions import Region, cut
from zerofx.errors import MemoryBudgetError, PlanError, UsageError
from zerofx.graph import StepGraph
from zerofx.node_facts import Phase, tensor, tile_of
from zerofx.options import Tiling
from zerofx.passes.simplify import simplify
from zerofx.passes.tile import tile
from zerofx.scheduler.budget import BudgetMissedError
from zerofx.scheduler.chains import find_chains
from zerofx.scheduler.decisions import TileDecision
from zerofx.scheduler.liveness import liveness
from zerofx.scheduler.policy import PolicyOptions, decide
from zerofx.scheduler.storage import is_view
from zerofx.scheduler.tiling import named_tiles
from zerofx.verify import verify

aten = torch.ops.aten


class MLP(nn.Module):
    """Wide inside; ``gated`` multiplies two projections."""

    def __init__(self, dim: int, inner: int, gated: bool, bias: bool, activation: str) -> None:
        super().__init__()
        self.up = nn.Linear(dim, inner, bias=bias)
        self.gate = nn.Linear(dim, inner, bias=bias) if gated else None
        self.out = nn.Linear(inner, dim, bias=bias)
        self.activation: Callable[[Tensor], Tensor] = getattr(F, activation)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.activation(self.up(x))
        result: Tensor = self.out(inner if self.gate is None else inner * self.gate(x))
        return result


class Attention(nn.Module):
    """``fused``: torch's kernel; or logits, softmax and values one after the other, with a causal mask."""

    def __init__(self, dim: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            logits = q @ k.transpose(-2, -1) / (dim // self.heads) ** 0.5
            allowed = torch.ones(time, time, dtype=torch.bool).tril()
            y = logits.masked_fill(~allowed, float("-inf")).softmax(-1) @ v
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, dim))
        return result


class Block(nn.Module):
    def __init__(self, attention: nn.Module | None, mlp: nn.Module | None, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        for norm, inner in zip(self.norms, (self.attention, self.mlp), strict=True):
            x = x if inner is None else x + inner(norm(x))
        return x


class Stack(nn.Module):
    """Blocks and the mean of squares of what they give."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def mlps(num_layers: int = 1, dim: int = 4, inner: int = 16) -> nn.Module:
    return Stack(
        *(Block(None, MLP(dim, inner, gated=False, bias=True, activation="gelu"), dim) for _ in range(num_layers))
    )


def captured(model: nn.Module, *batch: Tensor, precision: torch.dtype | None = None) -> StepGraph:
    step = capture(model, Batch.of(batch, {}), compute_dtype=precision)
    simplify(step)
    return step


def tiled(step: StepGraph, num_tiles: int) -> StepGraph:
    """A copy with every chain in so many tiles, or one for each row."""
    found = step.clone()
    chains = find_chains(found)
    tile(found, [TileDecision(c.product.name, min(num_tiles, c.num_rows), c.num_bytes, "asked") for c in chains])
    verify(found, "tile", None)
    return found


def test_backward_computes_a_tiles_forward_again(golden: Callable[..., None]) -> None:
    step = captured(Stack(MLP(4, 16, gated=False, bias=True, activation="gelu")), torch.randn(6, 4))
    golden(difference(step.text(), tiled(step, 2).text()))


def test_a_gated_mlp_is_one_chain() -> None:
    step = captured(Stack(MLP(4, 16, gated=True, bias=False, activation="silu")), torch.randn(2, 3, 4))
    (chain,) = find_chains(step)
    assert chain.num_rows == 6
    assert len([n for n in chain.forward.nodes if n.target is aten.mm.default]) == 3


def test_unfused_logits_are_tiled_by_heads_and_fused_attention_by_samples() -> None:
    x = torch.randn(3, 32, 8)
    (unfused,) = find_chains(captured(Stack(Attention(8, 2, fused=False)), x))
    assert unfused.product.target is aten.bmm.default and unfused.num_rows == 6
    (fused,) = find_chains(captured(Stack(Attention(8, 2, fused=True)), x))
    assert fused.product.target is aten.addmm.default and fused.num_rows == 3


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_of_cuda_is_tiled_by_samples_with_a_generator_state_for_each_tile(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = getattr(aten, f"_scaled_dot_product_{kind}_attention").default
    own = {"flash": (), "efficient": (None, True), "cudnn": (None, True)}[kind]

    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        result: Tensor = kernel(q, k, v, *own, 0.0, is_causal)[0]
        return result

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    step = captured(Stack(Attention(8, 2, fused=True)), torch.randn(3, 32, 8))
    (chain,) = find_chains(step)
    assert chain.num_rows == 3
    found = [n for n in tiled(step, 3).calls() if "scaled_dot_product" in str(n.target)]
    backward = [n for n in found if "backward" in str(n.target)]
    assert len(found) == 9 and len(backward) == 3  # backward's tiles compute their forward again
    for node in found:
        assert node.meta["val"][0].shape[0] == 1
    for node in backward:
        made_by = {source.args[0] for source in node.all_input_nodes if source.target is operator.getitem}
        assert len(made_by & set(found)) == 1  # result, statistics and generator are of one tile


@pytest.mark.parametrize("num_tiles", [2, 3, 4])
def test_no_value_is_larger_than_a_tile(num_tiles: int) -> None:
    model, x = mlps(dim=8, inner=256), torch.randn(96, 8)
    step = captured(model, x)
    after = tiled(step, num_tiles)
    largest = [
        max(tensor(n).numel() for n in one.calls() if isinstance(n.meta["val"], Tensor)) for one in (step, after)
    ]
    assert largest[1] <= -(-96 // num_tiles) * 256 < largest[0]


def test_random_operators_are_not_tiled() -> None:
    class Dropping(MLP):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.out(F.dropout(F.relu(self.up(x)), 0.5))
            return result

    assert find_chains(captured(Stack(Dropping(4, 16, False, True, "relu")), torch.randn(8, 4))) == []


def test_a_large_value_that_something_needs_whole_is_left_alone() -> None:
    class Leaking(MLP):
        def forward(self, x: Tensor) -> Tensor:
            inner = F.relu(self.up(x))
            result: Tensor = self.out(inner) + inner.cumsum(0).mean()
            return result

    assert find_chains(captured(Stack(Leaking(4, 16, False, True, "relu")), torch.randn(8, 4))) == []


def test_too_many_tiles_are_refused() -> None:
    step = captured(mlps(), torch.randn(8, 4))
    (chain,) = find_chains(step)
    with pytest.raises(PlanError, match=f"large values between operators \\({chain.product.name}\\)"):
        tile(step, [TileDecision(chain.product.name, 9, 0, "asked")])


@dataclass(frozen=True)
class _Sample:
    mlp: tuple[bool, bool, str]
    attention: bool | None
    shape: tuple[int, int]
    num_layers: int
    num_tiles: int

    def model(self) -> nn.Module:
        def block() -> nn.Module:
            attention = None if self.attention is None else Attention(8, 2, self.attention)
            return Block(attention, MLP(8, 32, *self.mlp), 8)

        return Stack(*(block() for _ in range(self.num_layers)))


_SAMPLES = st.builds(
    _Sample,
    mlp=st.tuples(st.booleans(), st.booleans(), st.sampled_from(["gelu", "silu", "relu", "tanh"])),
    attention=st.none() | st.booleans(),
    shape=st.tuples(st.integers(2, 4), st.sampled_from([5, 16, 24])),
    num_layers=st.integers(1, 2),
    num_tiles=st.integers(2, 5),
)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(sample=_SAMPLES)
def test_tiles_give_the_loss_and_gradients_of_the_whole(sample: _Sample) -> None:
    model, x = sample.model(), torch.randn(*sample.shape, 8)
    step = captured(model, x)
    loss, gradients = run_graph(step, model, (x,))
    again, split = run_graph(tiled(step, sample.num_tiles), model, (x,))
    torch.testing.assert_close(again, loss)
    for name, gradient in gradients.items():
        assert split[name].stride() == gradient.stride()
        torch.testing.assert_close(split[name], gradient, rtol=1e-4, atol=1e-6)


def test_rows_keep_their_bits_and_sums_are_equal_within_rounding() -> None:
    model, x = mlps(2, dim=32, inner=128), torch.randn(256, 32)
    step = captured(model, x)
    loss, gradients = run_graph(step, model, (x,))
    again, split = run_graph(tiled(step, 4), model, (x,))
    assert torch.equal(again, loss)
    # Layer 0's norms see only rows; the weights' gradients are sums over them.
    assert torch.equal(split["layers.0.norms.1.weight"], gradients["layers.0.norms.1.weight"])
    torch.testing.assert_close(split["layers.0.mlp.up.weight"], gradients["layers.0.mlp.up.weight"])


def test_parts_in_bf16_are_added_up_in_float32() -> None:
    model, x = mlps(dim=32, inner=128), torch.randn(256, 32, dtype=torch.bfloat16)
    step = captured(model, x, precision=torch.bfloat16)
    after = tiled(step, 8)
    sums = [n for n in after.calls() if n.target is aten.add.Tensor and tensor(n).dtype is torch.float32]
    assert len(sums) == 7 * 3  # two weights and the bias of the larger
    _, gradients = run_graph(step, model, (x,))
    _, split = run_graph(after, model, (x,))
    for name, gradient in gradients.items():
        torch.testing.assert_close(split[name], gradient, rtol=2**-6, atol=2**-7 * float(gradient.abs().max()))


@pytest.mark.parametrize("num_tiles", [2, 4, 8])
def test_working_memory_falls_with_the_number_of_tiles(num_tiles: int) -> None:
    # The inner values are 256 times as large as what enters and leaves: nothing else counts.
    step = captured(mlps(dim=4, inner=1024), torch.randn(4096, 4))

    def working_bytes(one: StepGraph) -> int:
        live = liveness(one, on_cpu=True)
        return live.peak_bytes - live.persistent_bytes

    ratio = working_bytes(tiled(step, num_tiles)) / working_bytes(step)
    assert 1 / num_tiles / 1.15 <= ratio <= 1.15 / num_tiles


def least_of(model: nn.Module, x: Tensor, tiling: Tiling) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BudgetMissedError) as refused:
        zerofx.plan(model, optimizer, (x,), machine="cpu", memory_budget=1, backend="eager", tile=tiling)
    return refused.value.least_bytes


def test_a_hidden_size_eight_times_as_large_trains_in_the_same_budget() -> None:
    x = torch.randn(2048, 8)
    small, large = (mlps(2, dim=8, inner=inner) for inner in (64, 512))
    budget = least_of(small, x, "none")
    untiled = copy.deepcopy(large)
    with pytest.raises(MemoryBudgetError, match="tile='auto'"):
        zerofx.plan(untiled, torch.optim.SGD(untiled.parameters(), lr=0.1), (x,), machine="cpu", memory_budget=budget,
                    backend="eager", tile="none")  # fmt: skip
    reference = copy.deepcopy(large)
    step = zerofx.compile(large, torch.optim.SGD(large.parameters(), lr=0.1, foreach=False), machine="cpu",
                          memory_budget=budget, backend="eager")  # fmt: skip
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, foreach=False)
    check_training(step, reference, optimizer, x, 2)
    assert step.plan.tiles
    measured = step.measure(x).peak_bytes["device"]
    assert measured <= budget
    assert measured == pytest.approx(step.plan.peak_bytes["device"], rel=0.02)


def check_training(
    step: zerofx.Step, reference: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, num_steps: int
) -> None:
    """The step's losses are those of ``reference`` trained in eager mode, within tolerance."""
    for _ in range(num_steps):
        loss = reference(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(step(x), loss.detach())


def test_peaks_fall_with_the_budget_through_all_ways_to_tile() -> None:
    model, x = mlps(2, dim=8, inner=64), torch.randn(1024, 8)
    least, most = (least_of(model, x, tiling) for tiling in ("auto", "none"))
    peaks, numbers = [], []
    for share in (1.0, 0.5, 0.25, 0.1, 0.0):
        made = zerofx.plan(
            model, torch.optim.SGD(model.parameters(), lr=0.1), (x,), machine="cpu", backend="eager",
            memory_budget=least + int(share * (most - least)),
        ).plan  # fmt: skip
        peaks.append(made.peak_bytes["device"])
        numbers.append(max((tiled.num_tiles for tiled in made.tiles), default=1))
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] == least < most
    assert numbers == sorted(numbers) and numbers[0] == 1 < numbers[-1]


def test_modules_are_tiled_by_name_without_a_budget() -> None:
    model, x = mlps(3, dim=8, inner=64), torch.randn(64, 8)
    reference = copy.deepcopy(model)
    step = zerofx.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), machine="cpu", backend="eager",
        tile={"layers.1.mlp": 4, "layers.2": 2},
    )  # fmt: skip
    torch.testing.assert_close(step(x), reference(x).detach())
    assert [(tiled.layer, tiled.num_tiles) for tiled in step.plan.tiles] == [
        ("layers.1.mlp.up", 4),
        ("layers.2.mlp.up", 2),
    ]
    assert "as asked for layers.2" in step.plan.why("layers.2")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # importing Inductor warns
def test_compiled_tiles_train_like_the_whole() -> None:
    block = Block(Attention(16, 2, fused=True), MLP(16, 64, gated=False, bias=True, activation="gelu"), 16)
    model, x = Stack(block, copy.deepcopy(block)), torch.randn(4, 32, 16)
    reference = copy.deepcopy(model)
    step = zerofx.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), machine="cpu", tile={"": 4}
    )
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, foreach=False)
    check_training(step, reference, optimizer, x, 3)
    assert len(step.plan.tiles) == 4
    assert step.num_regions > 4 * 2 * 4 > step.num_distinct_regions
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(("stage", "num_ranks"), [(0, 1), (2, 2), (3, 2)])
def test_other_passes_take_tiles_as_they_are(stage: int, num_ranks: int, num_micro_batches: int) -> None:
    prepared = prepare(
        mlps(2), (torch.randn(8, 4),), stage=stage, num_ranks=num_ranks, num_micro_batches=num_micro_batches
    )
    plan = decide(
        prepared.step, prepared.layout, stage=stage, precision=None, machine="cpu", options=PolicyOptions(),
        tiles=named_tiles(prepared.step, {"": 2}),
    )  # fmt: skip
    assert len(plan.tiles) == 2 * num_micro_batches
    lowered = replace(prepared, plan=plan)
    lowered.run_pipeline()  # verifies after every pass
    regions = [one for one in cut(lowered.step) if isinstance(one, Region)]
    for region in regions:
        assert len({tile_of(node) for node in region.own if not is_view(node)}) == 1
    backward = [r for r in regions if tile_of(r.own[-1]) and r.origin.phase is Phase.BACKWARD]
    assert len(backward) == 4 * num_micro_batches
    assert len({region.key for region in backward}) == 2  # the first of a chain, and the others


@pytest.mark.parametrize("tile", [{"layers.9": 2}, {"layers.0": 65}])
def test_names_without_anything_to_tile_are_refused(tile: dict[str, int]) -> None:
    model, x = mlps(1, dim=8, inner=64), torch.randn(64, 8)
    with pytest.raises(UsageError, match=r"layers\.0\.mlp\.up \(up to 64\)"):
        zerofx.plan(model, torch.optim.SGD(model.parameters(), lr=0.1), (x,), tile=tile)


def test_a_single_tile_is_refused() -> None:
    model = mlps()
    with pytest.raises(UsageError, match="2 or more"):
        zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), tile={"layers.0": 1})


def test_a_gpts_least_peak_falls_with_chains_in_tiles() -> None:
    model = GPT(64, 32, 2, 4, 128)
    ids = torch.randint(64, (4, 129))
    batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    with pytest.raises(BudgetMissedError) as refused:
        zerofx.plan(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, machine="cpu", memory_budget=1,
                    backend="eager")  # fmt: skip
    budget = refused.value.least_bytes
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), machine="cpu",
                          memory_budget=budget, backend="eager")  # fmt: skip
    first = float(step(*batch))
    assert float(step(*batch)) < first
    assert any("addmm" in decision.value for decision in step.plan.tiles)
    assert step.measure(*batch).peak_bytes["device"] == pytest.approx(step.plan.peak_bytes["device"], rel=0.02)
