"""What implementations of Muon over sharded parameters have got wrong, each held against the optimizer itself.

Once per micro-batch, partly reduced matrices, padding inside of a matrix and stage 0 are among the cases of
``test_whole_updates.py``; masters with a scaled loss are in ``test_owned_masters.py``.
"""

from __future__ import annotations

import pytest
import torch

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.training import world
from tests.lib.runs.whole_optimizers import TRAPS, Experts
from tests.lib.runs.whole_updates import WholeCase, compiled, differences_of, unlike

SUMMED = {"accumulate": 4, "reduce": "once"}
CASES = [WholeCase(name, {"stage": 3}) for name in TRAPS if "bfloat16" not in name]
IN_TURNS = [WholeCase("tied and fused", {"stage": 1, **SUMMED}), WholeCase("experts", {"stage": 0, **SUMMED})]
HALF = [WholeCase(name, {"stage": stage}) for name in TRAPS if "bfloat16" in name for stage in (1, 3)]


def _all_differences(cases: list[WholeCase]) -> list[str]:
    return [text for case in cases for text in differences_of(case)]


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_matrices_are_what_the_optimizer_takes_them_for(num_ranks: int) -> None:
    assert run_ranks(_all_differences, num_ranks, [*CASES, *IN_TURNS]) == [[]] * num_ranks


@pytest.mark.parametrize("case", HALF, ids=str)
def test_parameters_in_bfloat16_have_the_bits_of_the_installed_optimizer(case: WholeCase) -> None:
    # Without Nesterov torch 2.13 normalises the momentum itself, in place.
    assert differences_of(case) == []


def test_matrices_of_three_dimensions_are_refused_where_the_optimizer_refuses_them() -> None:
    with pytest.raises(ValueError, match="2D parameters"):
        torch.optim.Muon(Experts().parameters())


def _overflow(_: None) -> list[str]:
    """Train in fp16 with masters at owners, one step of which overflows on one rank alone: what that has changed."""
    case = WholeCase("Muon", {"stage": 3})
    rank, num_ranks = world()
    scale = zerofx.LossScale(256.0)
    step, optimizer = compiled(case, precision=zerofx.Precision("fp16", loss_scale=scale))
    first, second = case.batches(num_ranks)[:2]
    step(first[rank])
    before = step.full_state_dict(), optimizer.state_dict()
    step(torch.full_like(second[rank], torch.inf) if rank == 0 else second[rank])
    wrong = [] if step.num_skipped == 1 else [f"{step.num_skipped} skipped"]
    wrong += unlike(before, (step.full_state_dict(), optimizer.state_dict()))
    step(second[rank])
    moved = unlike(before, (step.full_state_dict(), optimizer.state_dict()))
    step.close()
    return [*wrong, *([] if moved else ["nothing has been trained after"])]


def test_an_overflow_on_one_rank_leaves_momentum_and_masters_of_all_owners_alone() -> None:
    assert run_ranks(_overflow, 2, None) == [[], []]
