from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zerofx
from tests.lib.graphs import (
    Tied,
    calls,
    captured,
    check_same_results,
    difference,
    joined,
    prepare,
    run_graph,
    token_ids,
)
from zerofx.choices import Tiling
from zerofx.errors import PlanError, UsageError
from zerofx.ir import ops
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.edit import consumers
from zerofx.ir.facts import Phase, origin, slice_of, tensor
from zerofx.ir.graph import StepGraph
from zerofx.passes.prepare.slice import slice_parameters
from zerofx.passes.verify import verify
from zerofx.scheduler.analysis.slices import slice_rungs, slices_of_names
from zerofx.scheduler.analysis.tile_chains import find_chains
from zerofx.scheduler.plan.decisions import TileDecision

aten = torch.ops.aten


class Reading(nn.Module):
    """Every way to read a matrix: a lookup, a linear layer, a factor on the right and on the left, and their biases."""

    def __init__(self, vocabulary: int = 11, dim: int = 6, inner: int = 10, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim, padding_idx=3)
        self.up = nn.Linear(dim, inner, bias=bias)
        self.right = nn.Parameter(torch.randn(inner, dim))
        self.bias = nn.Parameter(torch.randn(dim)) if bias else None
        self.left = nn.Parameter(torch.randn(inner, dim))
        self.turned = nn.Parameter(torch.randn(inner, 7))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.relu(self.up(self.embed(ids)))
        x = x @ self.right if self.bias is None else torch.addmm(self.bias, x, self.right)
        x = self.left @ x.t()
        return (self.turned.t() @ x).square().mean()


NAMES = ("embed.weight", "up.weight", "right", "left", "turned")


def sliced(step: StepGraph, asked: dict[str, int]) -> StepGraph:
    found = step.clone()
    slice_parameters(found, slices_of_names(found, asked))
    verify(found, "slice", None)
    return found


def test_each_slice_has_a_part_of_every_product(golden: Callable[..., None]) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1, bias=False))

    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x).square().mean()
            return found

    step = captured(Squared(), torch.randn(3, 4, requires_grad=True))
    golden(difference(step.text(), sliced(step, {"inner.0.weight": 2}).text()))


@pytest.mark.days(3)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    counts=st.lists(st.integers(1, 6), min_size=len(NAMES), max_size=len(NAMES)),
    num_ids=st.integers(1, 9),
    bias=st.booleans(),
)
def test_slices_give_the_loss_and_gradients_of_the_whole(counts: list[int], num_ids: int, bias: bool) -> None:
    torch.manual_seed(0)
    model, ids = Reading(bias=bias), torch.randint(11, (num_ids,))
    step = captured(model, ids)
    after = sliced(step, {name: count for name, count in zip(NAMES, counts, strict=True) if count > 1})
    check_same_results(step, after, model, (ids,), rtol=1e-4, share=1e-5)


def test_lookups_and_their_gradients_keep_their_bits() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6, padding_idx=3, scale_grad_by_freq=True)

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.embed(ids).square().mean()
            return found

    model, ids = Looking(), torch.randint(11, (4, 9))
    step = captured(model, ids)
    loss, gradients = run_graph(step, model, (ids,))
    for count in (2, 3, 11):
        after = sliced(step, {"embed.weight": count})
        again, split = run_graph(after, model, (ids,))
        assert torch.equal(again, loss)
        assert torch.equal(joined(after, split)["embed.weight"], gradients["embed.weight"])


@pytest.mark.parametrize("wrong", [-1, 11])
def test_an_index_outside_of_all_slices_fails_as_in_the_whole(wrong: int) -> None:
    model, ids = Reading(), torch.randint(11, (5,))
    after = sliced(captured(model, ids), {"embed.weight": 4})
    with pytest.raises(IndexError):
        run_graph(after, model, (torch.tensor([0, 1, wrong, 3, 4]),))


def test_a_weights_gradient_is_computed_while_its_slice_is_there() -> None:
    step = sliced(captured(Reading(), torch.randint(11, (5,))), {"up.weight": 5})
    backward = [str(slice_of(n)) for n in step.calls() if slice_of(n) and origin(n).phase is Phase.BACKWARD]
    assert list(dict.fromkeys(backward)) == [f"up.weight[{2 * n}:{2 * n + 2}]" for n in range(5)]
    assert backward == sorted(backward), "no slice comes back"


def test_sums_in_bf16_are_added_up_in_float32() -> None:
    model, ids = Reading(), torch.randint(11, (5,))
    step = captured(model, ids, precision=torch.bfloat16)
    after = sliced(step, {"right": 4})
    sums = [n for n in calls(after, aten.add.Tensor) if tensor(n).dtype is torch.float32]
    assert len(sums) == 3
    check_same_results(step, after, model, (ids,), rtol=2**-5, share=2**-6)


def test_tied_weights_are_sliced_in_both_uses() -> None:
    model, (ids,) = Tied(), token_ids()
    step = captured(model, ids)
    after = sliced(step, {"head.weight": 2})  # either name
    assert [decision.value for decision in after.slices] == ["embed.weight"]
    check_same_results(step, after, model, (ids,))


def test_a_frozen_parameter_has_slices_without_gradients() -> None:
    model = Reading()
    model.up.weight.requires_grad_(False)
    after = sliced(captured(model, torch.randint(11, (5,))), {"up.weight": 2})
    assert not any("up.weight" in name for name in after.gradients)
    assert {"up.weight[0:5]", "up.weight[5:10]"} < {info.name for info in after.parameters}


class Scaling(nn.Module):
    """Reads a weight as something else than a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.linear.weight / self.linear.weight.norm(), self.linear.bias).square().mean()


class TwiceMultiplied(nn.Module):
    """Has a weight's gradient go through a product with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight @ self.weight).square().mean()


def test_a_weight_that_is_used_twice_sums_its_slices_gradients() -> None:
    model, x = TwiceMultiplied(), torch.randn(3, 6)
    step = captured(model, x)
    check_same_results(step, sliced(step, {"weight": 4}), model, (x,))


def test_what_cannot_be_sliced_is_refused_with_the_reason() -> None:
    step = captured(Scaling(), torch.randn(3, 4))
    with pytest.raises(UsageError, match=r"found that linear.weight is read by aten\.\S+ \(.*\): leave it out"):
        slices_of_names(step, {"linear.weight": 2})
    with pytest.raises(UsageError, match=r"linear.bias has 1 dimensions"):
        slices_of_names(step, {"linear.bias": 2})


def test_more_slices_than_rows_are_refused() -> None:
    step = captured(Reading(), torch.randint(11, (5,)))
    with pytest.raises(UsageError, match=r"up to 10 slices of up.weight.* found 11"):
        slices_of_names(step, {"up.weight": 11})
    with pytest.raises(PlanError, match=r"up.weight has 10 rows for 11 slices"):
        slice_parameters(step, [TileDecision("up.weight", 11, 0, "by hand")])
    with pytest.raises(PlanError, match=r"down.weight is no parameter of this model"):
        slice_parameters(step, [TileDecision("down.weight", 2, 0, "by hand")])


def test_two_numbers_for_one_tied_parameter_are_refused() -> None:
    with pytest.raises(UsageError, match=r"same parameter as head.weight, found 2 and 3"):
        slices_of_names(captured(Tied(), *token_ids()), {"embed.weight": 2, "head.weight": 3})


def test_a_name_that_is_neither_is_refused_before_anything_is_changed() -> None:
    model = Reading()
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), machine="cpu", backend="eager",
                          tile={"up.wieght": 2})  # fmt: skip
    with pytest.raises(UsageError, match="expected tile to name parameters, or modules"):
        step(torch.randint(11, (5,)))
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name][0] and torch.equal(parameter, before[name][1])


def test_slices_are_buckets_and_the_map_to_boxes_is_whole() -> None:
    prepared = prepare(Reading(), (torch.randint(11, (5,)),), slices={"up.weight": 3, "embed.weight": 2})
    layout: BucketLayout = prepared.layout
    covered = {"up.weight": 0, "embed.weight": 0}
    whole = {"up.weight": torch.arange(60).view(10, 6), "embed.weight": torch.arange(66).view(11, 6)}
    for bucket in layout.buckets:
        for slot in bucket.slots:
            if slot.whole is not None:
                assert len(bucket.slots) == 1 and bucket.name == slot.name
                assert slot.box(whole[slot.whole])[0, 0] == 6 * slot.first_row
                covered[slot.whole] += slot.numel
    assert covered == {"up.weight": 60, "embed.weight": 66}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(("stage", "num_ranks"), [(0, 1), (0, 2), (1, 2), (2, 2), (3, 2), (3, 3)])
def test_other_passes_take_slices_as_parameters(stage: int, num_ranks: int, num_micro_batches: int) -> None:
    prepared = prepare(
        Reading(), (torch.randint(11, (4,)),), stage=stage, num_ranks=num_ranks, slices=dict.fromkeys(NAMES, 3),
        num_micro_batches=num_micro_batches,
    )  # fmt: skip
    assert len(prepared.layout.buckets) >= 3 * len(NAMES)
    prepared.run_pipeline()  # verifies after every pass


def test_only_one_slice_is_gathered_at_a_time() -> None:
    prepared = prepare(Reading(), (torch.randint(11, (4,)),), prefetch=0, slices=dict.fromkeys(NAMES, 3)).run()
    slices = {bucket.index for bucket in prepared.layout.buckets if bucket.is_slice}
    gathers = [node for node in prepared.step.calls() if node.target is ops.all_gather and node.args[1] in slices]
    spans = []
    order = prepared.step.positions()
    for gather in gathers:
        (full,) = gather.users
        spans.append((order[gather], max(order[reader] for reader in consumers(full))))
    assert len(spans) >= 3 * len(NAMES)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(sorted(spans)))


def test_weights_in_slices_are_left_out_of_chains_of_tiles() -> None:
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.out = nn.Linear(4, 64), nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(F.gelu(self.up(x))).square().mean()
            return found

    step = captured(MLP(), torch.randn(64, 4))
    assert find_chains(step) and not find_chains(sliced(step, {"up.weight": 2}))
    # The values are larger than the weight: where a budget asks, rows are tiled rather than weights.
    assert slice_rungs(step, lambda: 1) == []


def test_rungs_slice_what_is_huge_as_finely_as_the_missing_bytes_ask() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.huge = nn.Linear(16, 64), nn.Linear(64, 1024)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.huge(self.small(x)).square().mean()
            return found

    step = captured(Wide(), torch.randn(2, 16))
    size = 64 * 1024 * 4
    assert [[(d.value, d.num_tiles) for d in rung] for rung in slice_rungs(step, lambda: size)] == [
        [("huge.weight", 4)],
        [("huge.weight", 16)],
    ]
    assert [rung[0].num_tiles for rung in slice_rungs(step, lambda: 5 * size)] == [16]
    # For what a refusal says is possible.
    assert slice_rungs(step, lambda: 7 * size) == slice_rungs(step, lambda: 5 * size)


class Product(nn.Module):
    """One matrix; next to it, nothing counts."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1024, bias=False)
        self.huge = nn.Parameter(torch.randn(1024, 1024))
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return (x @ self.huge if self.turned else F.linear(x, self.huge)).square().mean()


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.huge = nn.Parameter(torch.randn(4096, 64))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = F.embedding(ids, self.huge).square().mean()
        return found


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: Product(turned=False), torch.ones(1, 1)),
    "transposed": (lambda: Product(turned=True), torch.ones(1, 1)),
    "embedding": (Lookup, torch.arange(6)),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_working_memory_falls_with_the_number_of_slices(name: str, num_ranks: int) -> None:
    make, batch = MODELS[name]

    def working_bytes(tile: Tiling) -> int:
        model = make()
        planned = zerofx.plan(
            model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), (batch,), machine="cpu", backend="eager",
            world_size=num_ranks, prefetch=0, tile=tile,
        )  # fmt: skip
        live = planned.lowered.simulation.live
        return live.peak_bytes - live.persistent_bytes

    whole = working_bytes("none")
    for num_slices in (2, 4, 8):
        assert working_bytes({"huge": num_slices}) <= 1.15 / num_slices * whole
