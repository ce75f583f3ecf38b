"""``ZeroFXTrainer`` trains, logs and evaluates as the ``Trainer`` does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import Trainer

from tests.lib.trainers import apart, arguments, bert, history, llama, shapes_may_differ, trainer
from zerofx.integrations.transformers import ZeroFXTrainer

LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss")


def both(model: Callable[[], nn.Module], folder: Path, *, size: int = 96, **given: Any) -> list[str]:
    """Where the two trainers differ in what they log."""
    logged = []
    for kind in (Trainer, ZeroFXTrainer):
        trained = trainer(kind, model(), arguments(folder, **given), size=size)  # which seeds what follows
        with shapes_may_differ():
            trained.train()
        logged.append(history(trained, *LOGGED))
    plain, mine = logged
    assert len(plain["loss"]) == 30 and len(plain["eval_loss"]) == 3
    return apart(mine, plain)


@pytest.mark.parametrize("model", [llama, bert])
def test_thirty_steps_are_those_of_the_trainer(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    assert both(model, tmp_path) == []


def test_an_epoch_may_end_within_an_update_and_a_batch(tmp_path: Path) -> None:
    # 27 micro-batches of 4, and one of 2: the last update is of 4 and 2 samples; with 25, of one micro-batch.
    assert both(llama, tmp_path, size=110) == []
    assert both(llama, tmp_path, size=100) == []
