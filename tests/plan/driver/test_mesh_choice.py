"""The best mesh: what a few layers say of all of them, and what is chosen of that."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx import MemoryBudgetError, UsageError, ZeroFXWarning
from zerofx.driver.meshes.choice import candidates
from zerofx.driver.meshes.estimates import Estimates
from zerofx.driver.plan_only import capture_for_plans
from zerofx.optimizers import Optimizers, ShadowOptimizer
from zerofx.options import check_options
from zerofx.report.meshes import MeshComparison, MeshOutcome
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.search.rehearsal import Rehearsal
from zerofx.torch_private.versions import TORCH

pytestmark = [
    pytest.mark.captures,
    pytest.mark.skipif(TORCH < (2, 13), reason="DTensor has no rules for the axis model"),
]

WIDTH, DEPTH = 1024, 7  # more layers than the four and five that are simulated
DEEPER = 9  # than the eight, too, that are planned within a budget


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + y


class Tower(nn.Module):
    """Layers that are alike, or of two kinds in turn."""

    def __init__(self, depth: int = DEPTH, *, in_turn: bool = False) -> None:
        super().__init__()
        inner = [2 * WIDTH if in_turn and number % 2 else 4 * WIDTH for number in range(depth)]
        self.layers = nn.ModuleList(Block(WIDTH, size) for size in inner)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y.square().mean()


def planned(mesh: Any, model: Callable[[], nn.Module] = Tower, samples: int = 32, **options: Any) -> zerofx.PlannedStep:
    with torch.device("meta"):
        tower = model()
        x = torch.empty(samples, 64, WIDTH)
    options = {"machine": "h100-sxm", "backend": "eager", **options}
    return zerofx.plan(tower, torch.optim.Adam(tower.parameters()), (x,), mesh=mesh, **options)


@functools.cache
def best_of_eight() -> zerofx.PlannedStep:
    """Of layers that are alike, on eight ranks; nobody changes it."""
    return planned("auto", world_size=8)


def estimated(model: Callable[[], nn.Module], num_ranks: int, samples: int = 32, **options: Any) -> Estimates:
    with torch.device("meta"):
        tower = model()
        x = torch.empty(samples, 64, WIDTH)
    checked = check_options(**{"stage": 3, "machine": "h100-sxm", "backend": "eager", **options})
    optimizers = Optimizers((torch.optim.Adam(tower.parameters()),))
    captured = capture_for_plans(tower, optimizers, (x,), checked, verbose=False)
    return Estimates(captured.request, captured.captures, num_ranks, on_cpu=False)


def compared(planned: zerofx.PlannedStep) -> dict[Mesh, MeshOutcome]:
    assert planned.comparison is not None
    return {outcome.mesh: outcome for outcome in planned.comparison.outcomes}


@pytest.mark.days(3)
@pytest.mark.parametrize(
    "in_turn", [pytest.param(False, id="alike"), pytest.param(True, id="in turn", marks=pytest.mark.slow)]
)
def test_a_few_layers_say_what_all_of_them_take(in_turn: bool) -> None:
    """Where nothing is searched, the estimate from four and five layers is the simulation of all, to rounding, of the
    layout that the program finds first."""

    def model() -> nn.Module:
        return Tower(14 if in_turn else DEPTH, in_turn=in_turn)

    estimates = estimated(model, 8)
    for mesh in (Mesh(shard=8), Mesh(2, 4), Mesh(2, 2, 2), Mesh(shard=2, model=4)):
        with mock.patch("zerofx.driver.shardings.best_prices", side_effect=lambda *args: args[-1]):
            estimate, whole = estimates.estimate(mesh), planned(mesh, model)
        simulation = whole.lowered.simulation
        assert (estimate.step_seconds, estimate.exposed_seconds, estimate.peak_bytes) == pytest.approx(
            (simulation.step_seconds, simulation.exposed_seconds, simulation.live.peaks["device"]), rel=1e-9
        )
        assert estimate.wire_bytes == simulation.node_wire_bytes


@functools.cache
def peak_of_four() -> int:
    """On four ranks with 128 samples each, without a budget."""
    return estimated(functools.partial(Tower, DEEPER), 4, 128).estimate(Mesh(shard=4)).peak_bytes


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("offload", ["none", "auto"])
def test_a_few_layers_say_what_all_of_them_take_within_a_budget(offload: str) -> None:
    """Each gives up its share of what is missing, in the way that a search finds; so does a mesh that is like it."""
    model = functools.partial(Tower, DEEPER)
    budget = peak_of_four() * 7 // 10
    estimates = estimated(model, 4, 128, memory_budget=budget, offload=offload)
    for mesh in (Mesh(shard=4), Mesh(2, 2)):
        estimate = estimates.estimate(mesh)
        whole = planned(mesh, model, 128, memory_budget=budget, offload=offload).plan
        assert estimate.fits and estimate.peak_bytes <= budget < peak_of_four()
        assert estimate.step_seconds == pytest.approx(whole.step_seconds, rel=0.02)
        assert estimate.step_seconds > estimates._simulate_unlimited(estimates._request_on(mesh)).all.step_seconds


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("samples", [pytest.param(2, id="states weigh most"), pytest.param(32, id="activations do")])
def test_no_mesh_takes_less_than_its_bound(samples: int) -> None:
    """What leaves a mesh out holds for what it takes when it is simulated; none that is left out could win."""
    estimates = estimated(Tower, 8, samples)
    for mesh in candidates(8, 8, 3):
        shown = estimates.least_seconds(mesh, 0.0)  # by fewer ranks that share, where it is the second to be asked for
        least, taken = estimates.estimate(mesh, max(shown, 1e-12)), estimates.estimate(mesh)
        assert least.is_least and not taken.is_least
        assert least.peak_bytes <= taken.peak_bytes and 0 < least.step_seconds <= taken.step_seconds
        closer = estimates.least_seconds(mesh, math.inf)
        assert shown <= closer * (1 + 1e-9) and closer <= taken.seconds_per_sample
        assert estimates.estimate(mesh, taken.seconds_per_sample + 1e-12) == taken
        assert str(MeshComparison((least,), "")).splitlines()[2].endswith("slower")


def test_what_many_meshes_share_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer is traced once, and a plan that is simulated is not simulated again for its numbers."""
    traced, carried_out = 0, []
    trace, carry_out = ShadowOptimizer.programs, Rehearsal.carry_out

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal traced
        traced += 1
        return trace(*args, **named)

    def noted(rehearsal: Rehearsal, plan: zerofx.Plan) -> Any:
        carried_out.append((len(rehearsal.captured.units), plan.replicate, plan.model, plan.has_parts))
        return carry_out(rehearsal, plan)

    monkeypatch.setattr(ShadowOptimizer, "programs", counted)
    monkeypatch.setattr(Rehearsal, "carry_out", noted)
    estimates = estimated(Tower, 8)
    for mesh in (Mesh(shard=8), Mesh(2, 4), Mesh(8)):
        estimates.estimate(mesh)
    assert traced == 1
    assert len(carried_out) == len(set(carried_out)), "a plan is simulated once"


def test_no_mesh_that_fits_takes_less_for_a_sample() -> None:
    best = best_of_eight()
    outcomes = compared(best)
    assert set(outcomes) == set(candidates(8, 8, 3))
    assert outcomes[best.plan.mesh].is_planned and outcomes[best.plan.mesh].num_samples == 32 * 8 // best.plan.model
    least = outcomes[best.plan.mesh].seconds_per_sample
    assert all(outcome.seconds_per_sample >= least for outcome in outcomes.values() if outcome.fits)
    lines = str(best).splitlines()
    assert lines[0].split() == "mesh peak step per sample exposed within nodes across nodes".split()  # noqa: SIM905
    assert len(lines) == 2 + len(outcomes) + 2 and lines[2].endswith("fits")
    assert lines[-2].startswith(f"{best.plan.mesh}: ") and "less than" in lines[-2]


@pytest.mark.slow
def test_memory_decides_where_the_fastest_mesh_does_not_fit() -> None:
    """Replicas are fastest, and hold all states: a budget below that leaves meshes that share something."""
    model = functools.partial(Tower, DEEPER)
    free = planned("auto", model, 2, world_size=2)
    budget = free.plan.peak_bytes["device"] * 6 // 10
    tight = planned("auto", model, 2, world_size=2, memory_budget=budget)
    assert tight.plan.mesh != free.plan.mesh
    assert tight.plan.peak_bytes["device"] <= budget
    with pytest.raises(MemoryBudgetError):
        planned("auto", lambda: Tower(6), samples=2, world_size=2, memory_budget="1MB", offload="none")


def test_pins_hold_on_all_meshes() -> None:
    with pytest.warns(ZeroFXWarning, match="shardings is ignored where the mesh has no axis 'model'"):
        best = planned("auto", world_size=3, shardings={"layers.*.up": "column"})
    outcomes = compared(best)
    assert "'column'} asks, found addmm (aten" in outcomes[Mesh(model=3)].trouble and not outcomes[Mesh(model=3)].fits
    assert outcomes[Mesh(shard=3)].fits
    assert "cannot be" in str(best.comparison) and "model 3: expected layers.0.up.weight" in str(best.comparison)
    with pytest.raises(UsageError, match=r"found 'layers\.\*\.upp': 'column', which names none"):
        planned("auto", world_size=3, shardings={"layers.*.upp": "column"})


def test_meshes_keep_what_sends_in_every_layer_near() -> None:
    assert candidates(6, 8, 3) == [
        Mesh(1, 6), Mesh(2, 3), Mesh(3, 2), Mesh(6, 1), Mesh(1, 3, 2), Mesh(3, 1, 2), Mesh(1, 2, 3), Mesh(2, 1, 3),
        Mesh(1, 1, 6),
    ]  # fmt: skip
    assert max(mesh.model for mesh in candidates(1024, 8, 3)) == 16
    assert {mesh.replicate for mesh in candidates(8, 8, 0)} == {1}


def test_what_meshes_are_not_compared_for_is_refused() -> None:
    with pytest.raises(UsageError, match="found 'best'"):
        planned("best", world_size=8)
