"""Experts on ranks that share them: by the columns of all matrices, or each rank with some experts and their tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, Case, batches, sgd
from tests.lib.models.huggingface import mixtral
from tests.lib.runs.sharing import SHARING, one_process
from tests.lib.runs.training import Trained, build, differences, world

BY_EXPERT = {"*.experts.gate_up_proj": "grouped_gemm", "*.experts.down_proj": "grouped_gemm"}
BY_COLUMN = {"*.experts.gate_up_proj": "column", "*.experts.down_proj": "row"}
EXPERTS: dict[str, dict[str, Any]] = {
    "grouped_mm": {"shardings": BY_COLUMN},  # what transformers has unless told otherwise
    "batched_mm": {"shardings": BY_COLUMN},
    "by expert": {"shardings": BY_EXPERT},
}
BYTES_OF_STATES = 3 * 4  # of a number: parameter, gradient, momentum
TOLERANCE = 0.001  # small things that operators keep to themselves are not predicted
BOUNDARY = 16  # elements of 64 bytes, which a parameter and a rank's slice of a bucket begin at multiples of


def _case(ways: str, num_steps: int) -> Case:
    def model() -> nn.Module:
        made = mixtral(intermediate_size=32)  # whose quarters are of 32 bytes: grouped_mm takes multiples of 16
        made.set_experts_implementation(ways if ways == "batched_mm" else "grouped_mm")  # type: ignore[operator]
        return made

    return replace(CASES["mixtral"], model=model, optimizer=sgd, steps=num_steps)


def _trained(ways: str, num_steps: int, options: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """What is unlike one process, unlike the first stage to the bit, or not as the plan says; this rank's losses."""
    case, num_ranks, first = _case(ways, num_steps), world()[1], list[Trained]()
    given = {"backend": "eager", "machine": SHARING, "mesh": {"model": num_ranks}, **options, **EXPERTS[ways]}
    num_data = num_ranks // given["mesh"]["model"]
    data = list(batches(case, world()[0] // given["mesh"]["model"], num_steps))
    expected, wrong = one_process(case, num_data, num_steps), dict[str, Any]()
    for stage in (0, 3):
        model = build(case)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        step = zerofx.compile(model, case.optimizer(model), stage, **given)
        trained = Trained([step(*args, **keywords).clone() for args, keywords in data], step.full_state_dict())
        first, (args, keywords) = first or [trained], data[0]
        plan, measured = step.plan, step.measure(*args, **keywords, num_steps=2)
        lies = {d.parameter: d.outputs[0] for d in plan.shardings if d.parameter and d.outputs[0] != "R"}
        by_rows = any("[" in text for d in plan.shardings for text in d.inputs)
        own = [size // plan.model if name in lies else size for name, size in sizes.items()]
        held = sum(-(-size // BOUNDARY) * BOUNDARY for size in own)
        ends = sum((plan.num_slices(bucket) - 1) * BOUNDARY for bucket in plan.buckets)  # of buckets, at most
        wrong |= {
            f"stage {stage}, far off": differences(expected, trained, 1e-4 if "backend" in options else 1e-5),
            f"stage {stage}, another bit": differences(first[0], trained),
            f"stage {stage}, experts": [name for name in sizes if "experts" in name and name not in lies],
            f"stage {stage}, tokens of experts": by_rows != (ways == "by expert"),
            f"stage {stage}, peak": abs(measured.peak_bytes["device"] / plan.peak_bytes["device"] - 1) > TOLERANCE,
            f"stage {stage}, states": stage == 0
            and not 0 <= measured.model_state_bytes - held * BYTES_OF_STATES <= ends * BYTES_OF_STATES,
        }
        step.close()
    return {what: found for what, found in wrong.items() if found}, torch.stack(first[0].losses).tolist()


@pytest.mark.days(3)
@pytest.mark.parametrize(
    ("ways", "num_steps"), [("by expert", 5), *(pytest.param(ways, 20, marks=pytest.mark.slow) for ways in EXPERTS)]
)
def test_two_ranks_train_experts_as_one_process(ways: str, num_steps: int) -> None:
    (wrong, losses), (wrong_too, losses_too) = run_ranks(_trained, 2, ways, num_steps, {})
    assert wrong == wrong_too == {}
    assert losses == losses_too


@pytest.mark.slow
@pytest.mark.parametrize("ways", EXPERTS)
@pytest.mark.parametrize("options", [{}, {"mesh": {"shard": 2, "model": 2}}, {"recompute": "full"}], ids=str)
def test_four_ranks_train_experts_as_one_process(options: dict[str, Any], ways: str) -> None:
    assert [wrong for wrong, _ in run_ranks(_trained, 4, ways, 20, options)] == [{}] * 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("ways", EXPERTS)
def test_compiled_steps_share_experts(ways: str) -> None:
    assert [wrong for wrong, _ in run_ranks(_trained, 2, ways, 20, {"backend": "inductor"})] == [{}] * 2
