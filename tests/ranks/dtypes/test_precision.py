"""Training in bfloat16 with fp32 masters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES
from tests.lib.runs.scaling import train_by_hand
from tests.lib.runs.training import Trained, differences, train_compiled

STEPS = 30


def _train_by_hand(name: str) -> Trained:
    """bf16 parameters cast from fp32 masters after every update: what `precision="bf16"` means, on one rank."""
    return train_by_hand(name, STEPS, low=torch.bfloat16, scaling={"enabled": False}).trained


def test_one_process_trains_in_bf16_as_by_hand() -> None:
    for name in ("gpt", "stack"):
        for stage in (0, 3):
            assert differences(_train_by_hand(name), train_compiled(CASES[name], stage, STEPS, precision="bf16")) == []


class _LowNorm(nn.BatchNorm2d):
    """A batch norm that computes in the dtype of its statistics, whatever its weights are in."""

    def forward(self, x: Tensor) -> Tensor:
        found = F.batch_norm(
            x.float(), self.running_mean, self.running_var, self.weight.float(), self.bias.float(),
            self.training, 0.1, self.eps,
        )  # fmt: skip
        return found.to(x.dtype)


def _convolutions(norm: type[nn.BatchNorm2d], *, training: bool) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 4)).train(training)


def _squares(outputs: Tensor, _images: Tensor) -> Tensor:
    return outputs.float().square().mean()


@pytest.mark.parametrize("training", [True, False])
def test_batch_norms_of_low_weights_keep_their_statistics_in_float32(training: bool) -> None:
    images = torch.randn(4, 3, 8, 8)
    found, expected = (
        zerofx.compile(
            model, torch.optim.SGD(model.parameters(), lr=0.1), 3, loss_fn=_squares, precision="bf16", backend="eager"
        )
        for model in (_convolutions(norm, training=training) for norm in (nn.BatchNorm2d, _LowNorm))
    )
    for _ in range(4):
        assert torch.equal(found(images), expected(images))
    state = found.full_state_dict()
    for name, value in expected.full_state_dict().items():
        if "num_batches" not in name:
            assert torch.equal(state[name], value), name
    assert state["1.running_mean"].dtype is torch.float32
    assert bool(state["1.running_mean"].any()) is training


def _compare_stages(name: str) -> tuple[list[list[str]], list[float]]:
    first, *others = (train_compiled(CASES[name], stage, STEPS, precision="bf16") for stage in range(4))
    return [differences(first, other) for other in others], [float(loss) for loss in first.losses]


@pytest.mark.days(3)
def test_bf16_training_is_the_same_at_every_stage_and_its_loss_falls() -> None:
    for wrong, losses in run_ranks(_compare_stages, 2, "gpt"):
        assert wrong == [[], [], []]
        assert sum(losses[-5:]) < sum(losses[:5])
