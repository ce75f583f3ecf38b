"""A small classifier that Lightning trains, by its own strategy or by zerofx's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

lightning: Any = pytest.importorskip("lightning")


class Classifier(lightning.LightningModule):  # type: ignore[misc]  # it may be absent
    """It logs in methods of its own, and returns more than its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
        self.loss_fn = nn.CrossEntropyLoss()

    def _loss(self, batch: Any, kind: str) -> Tensor:
        images, target = batch
        output = self.net(images)
        self.log(f"{kind}_accuracy", (output.argmax(-1) == target).float().mean(), prog_bar=True)
        loss: Tensor = self.loss_fn(output, target)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch, "train")
        self.log_dict({"train_loss": loss}, on_step=True)
        return {"loss": loss, "twice": 2 * loss.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch, "val"))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Record(lightning.Callback):  # type: ignore[misc]  # it may be absent
    """Notes what a callback sees."""

    def __init__(self) -> None:
        self.numbers: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            logged = [trainer.logged_metrics[name] for name in ("train_loss", "train_accuracy")]
            alone = trainer.accumulate_grad_batches == 1
            self.numbers += map(float, [*logged, outputs["loss"], outputs["twice"]] if alone else ())

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.numbers += [float(trainer.callback_metrics[name]) for name in ("val_loss", "val_accuracy")]


def fit(strategy: Any, folder: Path, *, epochs: int = 2, module: Any = None, **options: Any) -> tuple[Any, list[float]]:
    """The state of a module after a training, and all numbers that were seen in it."""
    module, record, has_group = module or Classifier(), Record(), torch.distributed.is_initialized()
    draws = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(96, 8, generator=draws), torch.randint(3, (96,), generator=draws))
    train, test = DataLoader(data, options.pop("samples", 16)), DataLoader(data, 32)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_last=True)
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=options.pop("devices", 1), max_epochs=epochs, logger=False,
        callbacks=[record, saving, *options.pop("callbacks", ())], enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=0.5,
        val_check_interval=0.5, log_every_n_steps=1, accumulate_grad_batches=options.pop("accumulate", 1),
    )  # fmt: skip
    try:
        with mock.patch.dict(os.environ):  # Lightning leaves variables that say who is in its group
            trainer.fit(module, train, test, **options)
    finally:
        if torch.distributed.is_initialized() and not has_group:
            torch.distributed.destroy_process_group()
    return module.state_dict(), record.numbers


def ours(**options: Any) -> Any:
    """A strategy of zerofx."""
    from zerofx.integrations.lightning import ZeroFXStrategy

    return ZeroFXStrategy(**{"backend": "eager", **options})


def apart_at_most(mine: tuple[Any, list[float]], theirs: tuple[Any, list[float]]) -> float:
    """How far two trainings are apart, in what was seen and in what they end with."""
    assert len(mine[1]) == len(theirs[1]) > 0
    numbers = max(abs(a - b) for a, b in zip(mine[1], theirs[1], strict=True))
    tensors = zip(mine[0].values(), theirs[0].values(), strict=True)
    return max(numbers, *(float((a - b).abs().max()) for a, b in tensors))
