"""Models without repeated layers, and stems before layers: divided into pieces that are decided about as layers are."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zerofx
from tests.lib.budgets import least_bytes, planned, same_bits, small_machine, trained, trained_by_torch
from tests.lib.graphs import captured, prepare
from zerofx.codegen.regions import cut, regions_of
from zerofx.ir.aliasing import is_view, storage_source
from zerofx.ir.facts import Phase, origin, piece_of
from zerofx.ir.graph import StepGraph
from zerofx.passes.divide import divide
from zerofx.scheduler.analysis.pieces import forward_runs, pieces
from zerofx.scheduler.analysis.saved_values import saved_storages, storage_size
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.decide.activations import segments
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.plan.text.reasons import reasons
from zerofx.scheduler.search.graph_facts import GraphFacts

MACHINE = Machine.named("cpu")
SHARES = (1.0, 0.5, 0.0)  # of what lies between the least possible and keeping everything
SCALARS_BYTES = 256  # numbers on the way to a kernel are tensors for a moment


class Unlike(nn.Module):
    """Linear layers no two of which are alike, as plain attributes; each is followed by the operators named."""

    def __init__(self, widths: tuple[int, ...], names: tuple[str, ...] = ("sigmoid", "tanh")) -> None:
        super().__init__()
        self.names, self.depth = names, len(widths) - 1
        for number, (before, after) in enumerate(itertools.pairwise(widths)):
            setattr(self, f"fc{number}", nn.Linear(before, after))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.depth):
            x = getattr(self, f"fc{number}")(x)
            for name in self.names:
                x = F.dropout(x, 0.5, self.training) if name == "dropout" else getattr(torch, name)(x)
        return x.square().mean()


class SavesSlope(torch.autograd.Function):
    """tanh; what its backward reads is computed last, and read by nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(1 - y.square())
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        slope: Tensor = ctx.saved_tensors[0]
        return gradient * slope


class SavingSlopes(Unlike):
    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.depth):
            x = SavesSlope.apply(getattr(self, f"fc{number}")(x))  # type: ignore[no-untyped-call]  # torch's
        return x.square().mean()


class Convolutions(nn.Module):
    """Convolutions with batch normalisation in one flat list: each module in it is a unit with next to no values."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        blocks = [
            (nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
            for before, after in itertools.pairwise(channels)
        ]
        self.body = nn.Sequential(*itertools.chain.from_iterable(blocks))
        self.head = nn.Linear(channels[-1], 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x).mean((2, 3))), y)


class Skips(nn.Module):
    """A small U-Net: values of the way down are read again on the way up, so that several cross most borders."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(12, 16, 3)
        self.d, self.e = nn.Conv2d(28, 10, 3, padding=1), nn.Conv2d(18, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.tanh(torch.sigmoid(self.a(x)))
        two = torch.tanh(torch.sigmoid(self.b(F.avg_pool2d(one, 2))))
        low = F.interpolate(torch.tanh(torch.sigmoid(self.c(two))), size=two.shape[-2:])
        up = F.interpolate(torch.tanh(self.d(torch.cat([low, two], 1))), scale_factor=2.0)
        return torch.sigmoid(self.e(torch.cat([up, one], 1))).square().mean()


class Stem(nn.Module):
    """A long run of unlike operators in front of equal layers, that makes more than they do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(8, 48), nn.Linear(48, 40), nn.Linear(40, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for inner in (self.up, self.middle, self.down):
            x = torch.tanh(torch.sigmoid(torch.sin(inner(x))))
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def unlike() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Unlike((8, 12, 16, 20, 24, 28, 32)), (torch.randn(256, 8),)


def convolutions() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Convolutions((3, 8, 9, 10, 11, 12, 13)), (torch.randn(8, 3, 12, 12), torch.randint(5, (8,)))


def skips() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Skips(), (torch.randn(4, 3, 16, 16),)


def stem() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Stem(), (torch.randn(128, 8),)


def _captured(made: tuple[nn.Module, tuple[Tensor, ...]]) -> StepGraph:
    return captured(made[0], *made[1])


def _least_and_most(model: nn.Module, batch: tuple[Tensor, ...], **options: Any) -> tuple[int, int]:
    """The least peak that a budget may ask for, without tiles, and that of keeping everything."""
    return least_bytes(model, batch, tile="none", **options), planned(model, batch, **options).peak_bytes["device"]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("make", "share"),
    [
        pytest.param(unlike, 0.7, id="unlike"),
        pytest.param(convolutions, 0.7, id="convolutions"),
        pytest.param(skips, 0.9, id="skips", marks=pytest.mark.slow),
        pytest.param(stem, 0.9, id="stem", marks=pytest.mark.slow),
    ],
)
def test_at_every_budget_it_fits_and_trains_the_bits_of_plain_torch(
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], share: float
) -> None:
    model, batch = make()
    least, most = _least_and_most(model, batch)
    assert least < share * most
    expected = trained_by_torch(model, batch, 2)
    peaks = []
    for part in SHARES:
        budget = least + int(part * (most - least))
        # Running statistics are among the buffers: they change once a step, however often batch norm is computed.
        step, found = trained(model, batch, 2, machine="cpu", memory_budget=budget, tile="none")
        assert same_bits(found, expected)
        predicted, measured = step.plan.peak_bytes["device"], step.measure(*batch).peak_bytes["device"]
        assert measured == pytest.approx(predicted, rel=0.01) and measured <= budget + SCALARS_BYTES
        peaks.append(predicted)
        step.close()
    assert peaks == sorted(peaks, reverse=True)


OPERATORS = st.lists(st.sampled_from(["tanh", "sigmoid", "sin", "dropout"]), min_size=1, max_size=3)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(names=OPERATORS, widths=st.lists(st.integers(4, 24), min_size=3, max_size=6), share=st.floats(0, 1))
def test_random_chains_of_unlike_layers_fit_their_budget_and_train_the_same_bits(
    names: list[str], widths: list[int], share: float
) -> None:
    torch.manual_seed(0)
    model, batch = Unlike(tuple(widths), tuple(names)), (torch.randn(64, widths[0]),)
    least, most = _least_and_most(model, batch)
    results = []
    for limit in (None, least + int(share * (most - least))):
        torch.manual_seed(1)
        step, found = trained(model, batch, 2, machine="cpu", memory_budget=limit, tile="none")
        results.append(found)
        assert limit is None or step.plan.peak_bytes["device"] <= limit
    assert same_bits(*results)


@pytest.mark.parametrize("make", [unlike, convolutions, skips, stem])
def test_every_operator_is_in_one_run_and_pieces_make_more_inside_than_they_hand_on(
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]],
) -> None:
    step = _captured(make())
    crossing = saved_storages(step)
    runs = forward_runs(step, crossing)
    forward = [n for n in step.calls() if origin(n).phase is Phase.FORWARD and not is_view(n)]
    assert [node for run in runs for node in run.nodes] == forward
    assert len({run.name for run in runs if run.name}) == sum(run.name != "" for run in runs) > 2
    assert [run.ends for run in runs] == [False] * (len(runs) - 1) + [True]
    made = sum(map(storage_size, crossing))
    handed_on = {v for part in segments(step, runs) for i, v in enumerate(part.values) if i in part.fixed}
    assert sum(map(storage_size, handed_on)) < made / 2


def test_borders_of_equal_operators_are_those_of_the_square_root() -> None:
    """Of n equal values, k borders hold k + n / (k + 1) of them and two gradients; the best k is near sqrt(n)."""
    step = captured(Unlike((8,) * 37, ("tanh",)), torch.randn(64, 8))
    runs = forward_runs(step, saved_storages(step))
    lengths = [sum("tanh" in node.name for node in run.nodes) for run in runs]
    assert sum(lengths) == 36
    held = [sum(n > 0 for n in lengths[:i]) + n for i, n in enumerate(lengths)]
    assert max(held) <= 9  # 8 pieces of 8, 7, 6, ... with all borders before them; equal ones of 6 take 6 + 5


def test_a_layer_that_makes_more_than_it_hands_on_stays_whole() -> None:
    step = _captured(stem())
    runs = forward_runs(step, saved_storages(step))
    assert [run.unit for run in runs if run.unit] == ["layers.0", "layers.1", "layers.2"]
    whole = forward_runs(step, saved_storages(step), divides=False)
    assert not any(run.name for run in whole) and len(whole) < len(runs)


def test_backward_of_a_piece_reads_its_values_and_those_before_it_alone() -> None:
    step = _captured(unlike())
    divided = pieces(step, forward_runs(step, saved_storages(step)))
    divide(step, divided)
    names = [piece.name for piece in divided]
    found = [piece_of(node) for node in step.calls() if origin(node).phase is Phase.BACKWARD and not is_view(node)]
    assert list(dict.fromkeys(found)) == names[::-1]
    for node in step.calls():
        if origin(node).phase is Phase.BACKWARD:
            sources = [storage_source(source)[0] for source in node.all_input_nodes]
            made = [piece_of(source) for source in sources if origin(source).phase is Phase.FORWARD]
            piece = piece_of(node)
            assert piece is None or all(names.index(one) <= names.index(piece) for one in made if one is not None)


def test_regions_end_only_at_pieces_whose_values_do_not_stay() -> None:
    step = _captured(unlike())
    whole = GraphFacts(step, MACHINE)
    before = [region.key for region in regions_of(cut(step))]
    assert [region.key for region in regions_of(cut(whole.piece_graph))] == before
    dropped = next(node.name for node in step.calls() if "sigmoid_1" in node.name)
    away = whole.pieces_without({dropped})
    assert [piece.values for piece in away if piece.values] == [(dropped,)]
    divide(step, away)
    first = next(piece.name for piece in away if piece.values)
    regions = regions_of(cut(step))
    inside = [{piece_of(node) == first for node in region.own if not is_view(node)} for region in regions]
    assert all(len(found) == 1 for found in inside) and sum(found == {True} for found in inside) == 2


def test_a_piece_begins_with_what_only_backward_computes_in_the_end() -> None:
    torch.manual_seed(0)
    model, batch = SavingSlopes((24, 40, 32, 48, 28, 44, 36, 52)), (torch.randn(64, 24),)
    step, found = trained(model, batch, 2, machine="cpu", recompute="full")
    slopes = {decision.value for decision in step.plan.recomputes if decision.value.startswith("rsub")}
    assert any(piece.first.startswith("pow") and slopes.intersection(piece.values) for piece in step.plan.pieces)
    assert same_bits(found, trained_by_torch(model, batch, 2))
    assert step.measure(*batch).peak_bytes["device"] == step.plan.peak_bytes["device"]
    step.close()


def test_without_a_budget_nothing_is_divided() -> None:
    model, batch = unlike()
    assert planned(model, batch).pieces == ()
    most = planned(model, batch).peak_bytes["device"]
    assert planned(model, batch, most).pieces == ()


def test_a_plan_names_its_pieces_and_says_why() -> None:
    model, batch = unlike()
    least, _ = _least_and_most(model, batch)
    made = planned(model, batch, least, tile="none")
    again = Plan.from_json(made.to_json())
    assert again == made and again.decisions_hash() == made.decisions_hash()
    piece = next(piece for piece in made.pieces if len(piece.values) > 1)
    assert f"  {piece.name}: {len(piece.values)} values" in str(made)
    assert "fc0" in made.pieces[0].name
    assert piece.name in [name for reason in reasons(made)["recomputed"] for name in reason.names]
    told = made.why(piece.name)
    assert all(value in told for value in piece.values) and "level" in told
    assert f"for the piece {piece.name}: the last move frees" in made.why(piece.values[0])


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_sharded_plans_of_unlike_layers_are_monotonic(stage: int) -> None:
    model, batch = unlike()
    options: dict[str, Any] = {"world_size": 2, "stage": stage}
    least, most = _least_and_most(model, batch, **options)
    shares = (1.0, 0.5, 0.0)
    budgets = [least + int(part * (most - least)) for part in shares]
    peaks = [planned(model, batch, budget, tile="none", **options).peak_bytes["device"] for budget in budgets]
    assert least < 0.8 * most
    assert peaks == sorted(peaks, reverse=True) and all(p <= b for p, b in zip(peaks, budgets, strict=True))


def test_micro_batches_have_pieces_of_their_own() -> None:
    model, batch = unlike()
    step = prepare(model, batch, num_micro_batches=2).step
    runs = forward_runs(step, saved_storages(step))
    assert len(runs) % 2 == 0 and [run.ends for run in runs].count(True) == 2
    half = len(runs) // 2
    assert [len(run.nodes) for run in runs[: half - 1]] == [len(run.nodes) for run in runs[half:-1]]
    parts = segments(step, runs)
    assert [part.key for part in parts[: half - 1]] == [part.key for part in parts[half - 1 :]]


def test_values_of_pieces_are_offloaded_or_computed_again_with_the_same_bits() -> None:
    model, batch = unlike()
    budget = int(0.75 * planned(model, batch).peak_bytes["device"])
    step, found = trained(
        model, batch, 2, machine=small_machine(1e9), memory_budget=budget, tile="none", offload="host"
    )
    assert same_bits(found, trained_by_torch(model, batch, 2))
    away = {decision.value for decision in step.plan.offloads}
    assert away and sum(bool(away.intersection(piece.values)) for piece in step.plan.pieces) > 1
    assert step.plan.peak_bytes["device"] <= budget
    step.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [unlike, convolutions])
def test_compiled_pieces_hold_what_is_predicted(make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]) -> None:
    model, batch = make()
    peaks: list[int] = []
    for share in (None, 0.85, 0.72):
        budget = None if share is None else int(share * peaks[0])
        trained = copy.deepcopy(model)
        step = zerofx.compile(
            trained, torch.optim.AdamW(trained.parameters()), machine="cpu", memory_budget=budget, tile="none"
        )
        step(*batch)
        predicted, measured = step.plan.peak_bytes["device"], step.measure(*batch).peak_bytes["device"]
        assert measured == pytest.approx(predicted, rel=0.03)
        assert budget is None or measured <= budget + SCALARS_BYTES
        peaks.append(measured)
        step.close()
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 0.73 * peaks[0]
