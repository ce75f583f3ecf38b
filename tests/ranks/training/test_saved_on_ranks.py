"""Activations in 8 bits on several ranks: bits of stage 0, nearly those of one rank, and the planned peak."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import zerofx
from gpt import GPT
from tests.lib.distributed import run_ranks
from tests.lib.runs.training import world

STEPS = 3


def _train(options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    """The mean of the ranks' losses, the state, and the peak that is measured beyond the planned one."""
    rank, num_ranks = world()
    torch.manual_seed(0)
    model = GPT(vocab=64, dim=64, depth=2, heads=4, block=64)
    generator = torch.Generator().manual_seed(1)
    given = {"backend": "eager", "machine": "cpu", "tile": "none", "saved": "int8", **options}
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)
    with contextlib.closing(step):
        batches = [torch.randint(64, (2, 4, 64), generator=generator) for _ in range(STEPS)]
        num_parts = num_ranks // options.get("mesh", {}).get("model", 1)
        parts = [batch.chunk(num_parts, 1)[rank * num_parts // num_ranks] for batch in batches]
        losses = [step(*part).detach().clone() for part in parts]
        measured = step.measure(*parts[0], num_steps=2).peak_bytes["device"]
        state = {name: value.clone() for name, value in step.full_state_dict().items()}
        return (
            [float(loss) for loss in losses],
            state,
            measured - step.plan.peak_bytes["device"],
            len(step.plan.compresses),
        )


@pytest.mark.parametrize("options", [{"stage": 3}, {"stage": 3, "precision": "bf16"}], ids=str)
def test_two_ranks_have_the_bits_of_stage_0_and_nearly_those_of_one(options: dict[str, Any]) -> None:
    two = run_ranks(_train, 2, options)
    replicated = run_ranks(_train, 2, {**options, "stage": 0})
    for (losses, state, off, num), (expected, same, _, _) in zip(two, replicated, strict=True):
        assert losses == expected and off == 0 and num > 10
        assert all(torch.equal(state[name], same[name]) for name in same)
    # Blocks of 256 values are of one sample: all are rounded alike wherever it is.
    (one,) = run_ranks(_train, 1, options)
    mean = [(first + second) / 2 for first, second in zip(two[0][0], two[1][0], strict=True)]
    assert mean == pytest.approx(one[0], abs=2e-5 if "precision" not in options else 0.1)


@pytest.mark.parametrize("mesh", [{"model": 2}, {"replicate": 2}], ids=str)
def test_ranks_of_other_axes_keep_theirs_in_8_bits(mesh: dict[str, int]) -> None:
    (one,) = run_ranks(_train, 1, {"stage": 3})
    for losses, _, off, num in run_ranks(_train, 2, {"stage": 3, "mesh": mesh}):
        assert abs(off) <= 1024 and num > 5
        if "model" in mesh:
            assert losses == pytest.approx(one[0], abs=1e-3)
