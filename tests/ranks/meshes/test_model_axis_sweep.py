"""Every model on ranks that share it: 20 steps as one process takes them, and one set of bits whatever is planned."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import zerofx
from tests.lib.distributed import PATIENCE_SECONDS, run_ranks
from tests.lib.models import CASES, Case, batches, sgd
from tests.lib.runs.sharing import SHARING, one_process
from tests.lib.runs.training import Trained, build, differences, world
from zerofx.scheduler.search.problem import BudgetMissedError

pytestmark = pytest.mark.slow

STEPS = 20
MODELS = (
    "gpt",
    "gpt2",
    "llama",
    "llama masked",
    "bert",
    "vit",
    "t5",
    "qwen3 next",
    "mixtral",
    "batchnorm",
    "image layers",
)
MESHES: list[dict[str, int]] = [{"model": 2}, {"model": 4}, {"shard": 2, "model": 2}, {"replicate": 2, "shard": 2}]
# All ranks of a mesh train the same bits at every stage, and whatever is computed again, moved or issued ahead. What is
# tiled rounds sums otherwise.
PLANS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "all again": {"stage": 3, "recompute": "full"},
    "nothing ahead": {"stage": 3, "prefetch": 0},
    "offloaded": {"stage": 2, "offload": "host", "recompute": "none", "tile": "none"},
    "offloaded to a drive": {"stage": 0, "offload": "nvme", "recompute": "none", "tile": "none"},
}
ROUNDING = 1e-6  # what has no gradient but rounding stays below, and nothing else does
BUDGET_SHARE = 0.9  # of the peak without a budget: what is offloaded
BUDGETS = 4  # that are tried
MANY = 3 * PATIENCE_SECONDS  # for all plans of a model: two are searched, of Qwen3 Next for minutes each


def case_of(name: str) -> Case:
    """The case with SGD: Adam divides a gradient that is truly zero, of a key's bias, by its own rounding errors."""
    return replace(CASES[name], optimizer=sgd, steps=STEPS)


def shared(case: Case, mesh: dict[str, int], stage: int, **options: Any) -> tuple[Trained, zerofx.Plan]:
    """Training with zerofx on ``mesh``, and the plan of the shape that takes most."""
    model, (rank, _) = build(case), world()
    given = {"backend": "eager", "machine": SHARING, "loss_fn": case.loss_fn, "mesh": mesh, **options}
    data = list(batches(case, rank // mesh.get("model", 1), case.steps))
    step = zerofx.compile(model, case.optimizer(model), stage, **given)
    losses, plans = list[Tensor](), list[zerofx.Plan]()
    for args, keywords in data:
        losses.append(step(*args, **keywords).clone())
        plans.append(step.plan)
    trained = Trained(losses, step.full_state_dict())
    step.close()
    return trained, max(plans, key=lambda plan: plan.peak_bytes["device"])


def _far_off(expected: Trained, found: Trained, tolerance: float) -> list[str]:
    """What differs by more than ``tolerance`` of the largest value of a tensor, or of zero by more than rounding: the
    bias of a key, say, has no gradient."""
    zeros = {name for name, value in expected.state.items() if value.numel() and value.abs().max() < ROUNDING}
    grown = [name for name in sorted(zeros & found.state.keys()) if found.state[name].abs().max() >= ROUNDING]

    def others(trained: Trained) -> Trained:
        return replace(trained, state={name: value for name, value in trained.state.items() if name not in zeros})

    return [f"{name} is not zero" for name in grown] + differences(others(expected), others(found), tolerance)


def _layout(plan: zerofx.Plan) -> set[tuple[object, ...]]:
    """How the ranks share each call."""
    return {(sharding.node, sharding.inputs, sharding.outputs) for sharding in plan.shardings}


def _within_less(
    case: Case, mesh: dict[str, int], alike: zerofx.Plan, peak: int, options: dict[str, Any]
) -> tuple[Trained, zerofx.Plan]:
    """Training within less than ``peak``, which ranks share as ``alike`` has it.

    Of a few layers, most is needed at the peak: what a first budget is refused with is the next. Where this layout has
    no plan, another is taken, which rounds sums otherwise: then it is half of what is left up to the peak.
    """
    budget = int(BUDGET_SHARE * peak)
    for _ in range(BUDGETS - 1):
        try:
            trained, plan = shared(case, mesh, memory_budget=budget, **options)
            if _layout(plan) == _layout(alike):
                return trained, plan
            budget = (budget + peak) // 2
        except BudgetMissedError as refusal:
            budget = refusal.least_bytes
    return shared(case, mesh, memory_budget=budget, **options)


def _compared(name: str, mesh: dict[str, int], drive: str) -> dict[str, Any]:
    """What is unlike one process, what unlike the first plan to the bit, and what was not planned as it should be."""
    os.environ["ZEROFX_NVME_DIR"] = drive
    case, num_data = case_of(name), world()[1] // mesh.get("model", 1)
    expected, first = one_process(case, num_data, case.steps), list[tuple[Trained, zerofx.Plan]]()
    wrong: dict[str, Any] = {}
    peaks: dict[int, int] = {}  # of a stage where all stays
    for label, options in PLANS.items():
        try:
            if "offload" in options:
                trained, plan = _within_less(case, mesh, first[0][1], peaks[options["stage"]], options)
            else:
                trained, plan = shared(case, mesh, **options)
        except zerofx.ZeroFXError as error:
            wrong[f"{label}, refused"] = [str(error)]
            continue
        peaks.setdefault(options["stage"], plan.peak_bytes["device"])
        first = first or [(trained, plan)]
        wrong[f"{label}, far off"] = _far_off(expected, trained, 1e-5)
        wrong[f"{label}, another bit"] = differences(first[0][0], trained)
        placements = {text for sharding in plan.shardings for text in sharding.outputs}
        wrong[f"{label}, nothing shared"] = (
            [] if mesh.get("model", 1) == 1 or placements & {"S0", "S1"} else ["nothing"]
        )
        if "offload" in options and not (plan.offloads or plan.states):
            wrong[f"{label}, nothing offloaded"] = ["nothing"]
    return {what: lines for what, lines in wrong.items() if lines}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_share_every_model(mesh: dict[str, int], name: str, tmp_path: Path) -> None:
    num_ranks = math.prod(mesh.values())
    for rank, wrong in enumerate(run_ranks(_compared, num_ranks, name, mesh, str(tmp_path), timeout=MANY)):
        assert wrong == {}, f"rank {rank}"


def _compiled(name: str, mesh: dict[str, int]) -> list[str]:
    case = case_of(name)
    trained, _ = shared(case, mesh, 3, backend="inductor")
    return _far_off(one_process(case, world()[1] // mesh.get("model", 1), case.steps), trained, 1e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", [{"model": 2}, {"shard": 2, "model": 2}], ids=str)
def test_compiled_steps_share_every_model(mesh: dict[str, int], name: str) -> None:
    assert run_ranks(_compiled, num_ranks := math.prod(mesh.values()), name, mesh) == [[]] * num_ranks
