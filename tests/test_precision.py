"""Training in bfloat16 with fp32 masters."""

from __future__ import annotations

import torch

from tests.distributed import run_ranks
from tests.models import CASES, batches
from tests.training import Trained, build, differences, train_compiled, world

STEPS = 30


def _train_by_hand(name: str) -> Trained:
    """bf16 parameters cast from fp32 masters behind every update: what `precision="bf16"` means, on one rank."""
    case = CASES[name]
    masters = build(case)
    model = build(case).bfloat16()
    optimizer = case.optimizer(masters)
    losses = []
    for args, kwargs in batches(case, world()[0], STEPS):
        inputs = [a.bfloat16() if a.is_floating_point() else a for a in args]
        loss = case.loss(model(*inputs, **kwargs))
        loss.backward()
        for master, low in zip(masters.parameters(), model.parameters(), strict=True):
            assert low.grad is not None
            master.grad, low.grad = low.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, low in zip(masters.parameters(), model.parameters(), strict=True):
                low.copy_(master)
        losses.append(loss.detach())
    return Trained(losses, dict(masters.state_dict()))


def test_one_process_trains_in_bf16_as_by_hand() -> None:
    for name in ("gpt", "stack"):
        for stage in (0, 3):
            assert differences(_train_by_hand(name), train_compiled(CASES[name], stage, STEPS, precision="bf16")) == []


def _compare_stages(name: str) -> tuple[list[list[str]], list[float]]:
    first, *others = (train_compiled(CASES[name], stage, STEPS, precision="bf16") for stage in range(4))
    return [differences(first, other) for other in others], [float(loss) for loss in first.losses]


def test_bf16_training_is_the_same_at_every_stage_and_its_loss_falls() -> None:
    for wrong, losses in run_ranks(_compare_stages, 2, "gpt"):
        assert wrong == [[], [], []]
        assert sum(losses[-5:]) < sum(losses[:5])
