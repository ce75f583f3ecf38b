"""Ranks that share one computation: the values of one process, whatever else is planned."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, batches
from tests.lib.runs.offloads import check_measured
from tests.lib.runs.sharing import SHARING, one_process
from tests.lib.runs.training import Trained, build, differences, plan_of, without_key_biases, world
from zerofx import RankMismatchError
from zerofx.scheduler.plan.decisions import ShardingDecision
from zerofx.scheduler.search.problem import BudgetMissedError


def shared(name: str, mesh: dict[str, int], stage: int, steps: int, **options: Any) -> tuple[Trained, list[str]]:
    """Training with zerofx, and the placements that the plan gives to parameters and other values."""
    case, (rank, _) = CASES[name], world()
    model = build(case)
    options = {"backend": "eager", "machine": SHARING, **options}
    step = zerofx.compile(model, case.optimizer(model), stage, loss_fn=case.loss_fn, mesh=mesh, **options)
    losses = [step(*args, **kwargs).clone() for args, kwargs in batches(case, rank // mesh.get("model", 1), steps)]
    placements = {text for sharding in step.plan.shardings for text in sharding.outputs if text is not None}
    trained = Trained(losses, step.full_state_dict())
    step.close()
    return trained, sorted(placements)


def compared(names: list[str], mesh: dict[str, int], runs: dict[str, dict[str, Any]], steps: int) -> dict[str, Any]:
    """What is unlike one process, what unlike the first run to the bit, and where nothing was shared."""
    num_data = world()[1] // mesh.get("model", 1)
    wrong: dict[str, Any] = {}
    for name in names:
        expected, first = _without_noise(one_process(CASES[name], num_data, steps)), list[Trained]()
        for label, options in runs.items():
            trained, placements = shared(name, mesh, steps=steps, **options)
            first = first or [trained]
            wrong[f"{name}, {label}, far off"] = differences(expected, _without_noise(trained), 2e-5)
            wrong[f"{name}, {label}, another bit"] = differences(first[0], trained)
            wrong[f"{name}, {label}, not shared"] = [] if {"S0", "S1"} <= set(placements) else placements
    return {what: lines for what, lines in wrong.items() if lines}


def _without_noise(trained: Trained) -> Trained:
    """Without what has no gradient but rounding, which Adam divides by itself: biases of keys, and before norms."""
    trained = without_key_biases(trained)
    noise = ("key.bias", "k_proj.bias", "c_attn.bias", "qkv.bias", "in_proj_bias")
    return replace(trained, state={name: t for name, t in trained.state.items() if not name.endswith(noise)})


RUNS: dict[str, dict[str, Any]] = {f"stage {stage}": {"stage": stage} for stage in range(4)}


WAYS: dict[str, dict[str, Any]] = {
    "nothing again": {"stage": 3},
    "all again": {"stage": 3, "recompute": "full"},
    "nothing ahead": {"stage": 3, "prefetch": 0},
}


@pytest.mark.days(3)
def test_two_ranks_share_a_model() -> None:
    runs = {label: RUNS[label] for label in ("stage 0", "stage 3")}
    for rank, wrong in enumerate(run_ranks(compared, 2, ["llama"], {"model": 2}, runs, 3)):
        assert wrong == {}, f"rank {rank}"


@pytest.mark.days(3)
def test_plans_that_move_and_compute_again_have_the_same_bits() -> None:
    for rank, wrong in enumerate(run_ranks(compared, 2, ["gpt"], {"model": 2}, WAYS, 2)):
        assert wrong == {}, f"rank {rank}"


def _offloaded(drive: str) -> list[str]:
    """What a plan changes that sends values away, among them what ranks have exchanged."""
    os.environ["ZEROFX_NVME_DIR"] = drive
    case = CASES["gpt"]
    ((args, keywords),) = batches(case, 0, 1)
    model = build(case)
    free = zerofx.compile(model, case.optimizer(model), 0, backend="eager", machine=SHARING, mesh={"model": 2})
    free.prepare(*args, **keywords)
    options: dict[str, Any] = {
        "memory_budget": int(0.9 * free.plan.peak_bytes["device"]),
        "offload": "nvme",
        "recompute": "none",
    }
    expected = [free(*args, **keywords).clone() for _ in range(2)]
    model = build(case)
    step = zerofx.compile(
        model, case.optimizer(model), 0, backend="eager", machine=SHARING, mesh={"model": 2}, **options
    )  # fmt: skip
    step.prepare(*args, **keywords)
    assert step.plan.offloads
    losses = [step(*args, **keywords).clone() for _ in range(2)]
    wrong = differences(Trained(expected, free.full_state_dict()), Trained(losses, step.full_state_dict()))
    check_measured(step.measure(*args, **keywords), step.plan, 4096, share=0.01)
    step.close()
    free.close()
    return wrong


def _clipped() -> list[str]:
    """What is unlike one process where gradients are clipped: each is counted once, wherever it lies."""
    trained, _ = shared("stack", {"model": 2}, 3, 3, max_grad_norm=0.1)
    return differences(one_process(CASES["stack"], 1, 3, max_grad_norm=0.1), trained, 2e-5)


def test_a_plan_says_what_lies_in_parts() -> None:
    planned = plan_of("gpt", machine=SHARING, mesh={"model": 2})
    plan = planned.plan
    assert "shared by 2 ranks of the model axis" in str(plan)
    assert "  layers.*.mlp.out.weight x 3: in parts along dimension 1" in str(plan)
    assert "lies in parts along dimension 1 on 2 ranks of the model axis" in plan.why("layers.1.mlp.out.weight")
    assert zerofx.Plan.from_json(plan.to_json()) == plan
    assert any(row.op == "gather_values" for row in planned.schedule().rows)


def _refused() -> list[str]:
    """What is said where ranks that share a computation are given other batches: in the first step, and in a later."""
    case, (rank, _) = CASES["stack"], world()
    said = []
    for num_alike in (0, 1):
        model = build(case)
        step = zerofx.compile(model, case.optimizer(model), mesh={"model": 2}, backend="eager", machine=SHARING)
        for args, _ in batches(case, 0, num_alike):
            step(*args)
        before = step.full_state_dict()
        ((x, y), _), *_ = batches(case, 0, 1)
        with pytest.raises(RankMismatchError) as raised:
            step(x, y + rank)
        said.append(str(raised.value))
        assert all(torch.equal(value, before[name]) for name, value in step.full_state_dict().items())
        step.close()
    return said


class Mixing(nn.Module):
    """A weight that is read as it is, or by an operator that ranks cannot share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16) + torch.rand(16, 16) / 16)

    def forward(self, x: Tensor, as_is: bool) -> Tensor:
        return torch.tanh(x @ (self.weight if as_is else torch.linalg.inv(self.weight)))


class Mixed(nn.Module):
    """Layers alike in evaluation are unlike in training, and others the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, number > 0 if self.training else number < 2)
        return x.square().mean()


def _evaluated() -> list[str]:
    """How parameters lie in training; an evaluation that reads them in other ways gives what eager mode does."""
    torch.manual_seed(0)
    model, batch = Mixed(), torch.rand(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = zerofx.compile(model, optimizer, mesh={"model": 2}, backend="eager", machine=SHARING)
    step(batch)
    lie = {decision.parameter: str(decision.outputs[0]) for decision in step.plan.shardings if decision.parameter}
    loss = step.evaluate(batch)
    step.close()
    with torch.no_grad():
        torch.testing.assert_close(loss, model.eval()(batch))
    return [lie.get(f"layers.{number}.weight", "R") for number in range(3)]


def _waiting() -> int:
    """Measured bytes above the predicted peak, where the loss of a micro-batch, of which ranks have terms, waits."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)), torch.rand(8, 16)
    step = zerofx.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.1), mesh={"model": 2}, backend="eager", machine=SHARING,
        loss_fn=lambda y: y.square().mean(), accumulate=2,
    )  # fmt: skip
    step(batch)
    assert any(row.op == "all_reduce_values" for row in step.schedule().rows)
    above = step.measure(batch).peak_bytes["device"] - step.plan.peak_bytes["device"]
    step.close()
    return above


@dataclass(frozen=True)
class Found:
    """What one of two ranks has found out in one start."""

    offloaded: list[str]
    clipped: list[str]
    refused: list[str]
    evaluated: list[str]
    above_peak: int


def _found(drive: str) -> Found:
    return Found(_offloaded(drive), _clipped(), _refused(), _evaluated(), _waiting())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """By rank."""
    return run_ranks(_found, 2, str(tmp_path_factory.mktemp("drive")))


@pytest.mark.days(3)
def test_values_of_one_rank_are_offloaded_and_come_back(found: list[Found]) -> None:
    assert [rank.offloaded for rank in found] == [[], []]


@pytest.mark.days(3)
def test_the_norm_of_gradients_counts_each_once(found: list[Found]) -> None:
    assert [rank.clipped for rank in found] == [[], []]


def test_other_batches_are_refused_on_all_ranks_in_any_step(found: list[Found]) -> None:
    for rank in found:
        assert len(rank.refused) == 2
        for error in rank.refused:
            assert "expected the same batch on ranks 0, 1, which share one computation (mesh model 2)" in error
            assert "found other values of batch[1] on rank 1 than on rank 0" in error


def test_evaluations_read_parameters_where_training_has_them(found: list[Found]) -> None:
    for rank in found:
        assert [lies[0] for lies in rank.evaluated] == ["R", "S", "S"]


def test_what_a_reduced_value_is_padded_with_is_planned(found: list[Found]) -> None:
    assert [rank.above_peak for rank in found] == [0, 0]


def _skipped() -> list[str]:
    """What a step changes whose loss is not finite for the second of two pairs of ranks."""
    case, (rank, _) = CASES["gpt"], world()
    first, spoilt, last = (args for args, _ in batches(case, rank // 2, 3))
    if rank // 2 == 1:
        spoilt = spoilt[0], torch.full((2, 8), -100)[:, 1:]  # the mean of no target
    options: dict[str, Any] = {"mesh": {"shard": 2, "model": 2}, "backend": "eager", "machine": SHARING}

    def trained(data: list[tuple[Any, ...]], **given: Any) -> Trained:
        model = build(case)
        step = zerofx.compile(model, case.optimizer(model), 3, loss_fn=case.loss_fn, **options, **given)
        losses = [step(*args).clone() for args in data]
        assert (step.num_steps, step.num_skipped) == (2, len(data) - 2)
        check_measured(step.measure(*last), step.plan, 4096, share=0.01)
        step.close()
        return Trained([losses[0], losses[-1]], step.full_state_dict())

    with pytest.warns(zerofx.ZeroFXWarning, match="nothing has been updated"):
        found = trained([first, spoilt, last], on_nonfinite="skip")
    return differences(trained([first, last]), found)


@pytest.mark.days(3)
def test_a_loss_of_which_each_rank_has_a_term_is_known_before_the_first_update() -> None:
    assert run_ranks(_skipped, 4) == [[]] * 4


def test_two_ranks_share_each_of_two_slices() -> None:
    runs = {"stage 3": RUNS["stage 3"]}
    for rank, wrong in enumerate(run_ranks(compared, 4, ["gpt"], {"shard": 2, "model": 2}, runs, 3)):
        assert wrong == {}, f"rank {rank}"


def _least() -> list[str]:
    """How ranks share two steps within the least budget, where they do not alike: the second has another update."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    batch = torch.ones(200, 32)

    def shardings(budget: int) -> list[tuple[ShardingDecision, ...]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        step = zerofx.compile(
            model, optimizer, loss_fn=lambda y: y.square().mean(), mesh={"model": 2}, backend="eager", tile="none",
            memory_budget=budget,
        )  # fmt: skip
        try:
            shared = [step.plan.shardings for _ in range(2) if step(batch) is not None]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "a batch of another shape")
                step(batch[:-10])  # fits too
            return shared
        finally:
            step.close()

    with pytest.raises(BudgetMissedError) as refusal:
        shardings(100)
    first, second = shardings(refusal.value.least_bytes)
    return [] if first == second else [f"{first}, then {second}"]


@pytest.mark.days(3)
def test_later_steps_fit_the_budget_that_the_first_fits() -> None:
    assert run_ranks(_least, 2) == [[], []]
