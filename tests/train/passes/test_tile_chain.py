from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.lib.chains import MLP, Attention, Block, Stack, mlps
from tests.lib.deciding import decided
from tests.lib.graphs import captured, check_same_results, difference, prepare, run_graph
from zerofx.codegen.regions import Region, cut
from zerofx.errors import PlanError
from zerofx.ir.aliasing import is_view
from zerofx.ir.facts import Phase, tensor, tile_of
from zerofx.ir.graph import StepGraph
from zerofx.passes.tile import tile
from zerofx.passes.verify import verify
from zerofx.scheduler.analysis.tile_chains import find_chains
from zerofx.scheduler.cost.liveness import liveness
from zerofx.scheduler.decide.tiling import tiles_of_modules
from zerofx.scheduler.decide.undecided import undecided
from zerofx.scheduler.plan.decisions import TileDecision

aten = torch.ops.aten


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


@pytest.mark.parametrize("mask", ["shared", "own"])
def test_masked_attention_is_tiled_by_samples(mask: str) -> None:
    model, x = Stack(Attention(8, 2, fused=True, mask=mask)), torch.randn(3, 32, 8)
    step = captured(model, x)
    (chain,) = find_chains(step)
    assert chain.num_rows == 3
    check_same_results(step, tiled(step, 3), model, (x,))


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
    check_same_results(step, after, model, (x,), rtol=2**-6, share=2**-7)


@pytest.mark.parametrize("num_tiles", [2, 4, 8])
def test_working_memory_falls_with_the_number_of_tiles(num_tiles: int) -> None:
    # The inner values are 256 times as large as what enters and leaves: nothing else counts.
    step = captured(mlps(dim=4, inner=1024), torch.randn(4096, 4))

    def working_bytes(one: StepGraph) -> int:
        live = liveness(one, on_cpu=True)
        return live.peak_bytes - live.persistent_bytes

    ratio = working_bytes(tiled(step, num_tiles)) / working_bytes(step)
    assert 1 / num_tiles / 1.15 <= ratio <= 1.15 / num_tiles


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(("stage", "num_ranks"), [(0, 1), (2, 2), (3, 2)])
def test_other_passes_take_tiles_as_they_are(stage: int, num_ranks: int, num_micro_batches: int) -> None:
    prepared = prepare(
        mlps(2), (torch.randn(8, 4),), stage=stage, num_ranks=num_ranks, num_micro_batches=num_micro_batches
    )
    plan = undecided(prepared.step, prepared.layout, stage, None, "cpu")
    plan = decided(prepared.step, prepared.layout, replace(plan, tiles=tiles_of_modules(prepared.step, {"": 2})))
    assert len(plan.tiles) == 2 * num_micro_batches
    lowered = replace(prepared, plan=plan)
    lowered.run_pipeline()  # verifies after every pass
    regions = [one for one in cut(lowered.step) if isinstance(one, Region)]
    for region in regions:
        assert len({tile_of(node) for node in region.own if not is_view(node)}) == 1
    backward = [r for r in regions if tile_of(r.own[-1]) and r.origin.phase is Phase.BACKWARD]
    assert len(backward) == 4 * num_micro_batches
    assert len({region.key for region in backward}) == 2  # the first of a chain, and the others
