"""``ZeroFXStrategy`` trains, validates, logs, saves and resumes as Lightning's own strategy does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler, StochasticWeightAveraging

import zerofx
from tests.lib.runs.lightning_runs import Classifier, apart_at_most, fit, ours
from zerofx import UsageError
from zerofx.errors import CaptureError

# Lightning warns of few workers, of short epochs and of torch.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_trains_as_lightnings_own_strategy(accumulate: int, tmp_path: Path) -> None:
    theirs = fit("ddp", tmp_path / "theirs", accumulate=accumulate)
    assert apart_at_most(fit(ours(), tmp_path / "ours", accumulate=accumulate), theirs) < 1e-6


def test_it_resumes_what_either_has_saved(tmp_path: Path) -> None:
    fit("ddp", tmp_path / "theirs", epochs=1)
    fit(ours(), tmp_path / "ours", epochs=1)
    ended = [
        fit(strategy, tmp_path / "end", ckpt_path=str(tmp_path / begun / "last.ckpt"))
        for strategy, begun in (("ddp", "theirs"), (ours(), "theirs"), ("ddp", "ours"), (ours(), "ours"))
    ]
    assert all(apart_at_most(other, ended[0]) < 1e-6 for other in ended[1:])


class _Numbered(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._loss(batch, "train") * (batch_idx + 1)


class _LogsANumber(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rate", 0.5)
        return self._loss(batch, "train")


class _Hooked(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (_Numbered, "found that it reads batch_idx"),
        (_LogsANumber, "to log tensors with one element.*found rate as float"),
        (_Hooked, "found on_before_optimizer_step"),
    ],
)
def test_what_a_step_cannot_honour_is_refused(module: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises((UsageError, CaptureError), match=text):
        fit(ours(), tmp_path, module=module())


@pytest.mark.parametrize("callback", [EMAWeightAveraging(), StochasticWeightAveraging(0.1)])
def test_what_averages_parameters_is_refused_by_name_before_training(callback: Any, tmp_path: Path) -> None:
    name = type(callback).__name__
    with pytest.raises(UsageError, match=rf"found {name} \(averages parameters.*average=zerofx\.EMA"):
        fit(ours(), tmp_path, callbacks=[callback])


def test_averages_of_weights_are_resumed(tmp_path: Path) -> None:
    options = {"average": zerofx.EMA(0.9), "stage": 3}
    fit(ours(**options), tmp_path / "whole")
    fit(ours(**options), tmp_path / "begun", epochs=1)
    fit(ours(**options), tmp_path / "resumed", ckpt_path=str(tmp_path / "begun" / "last.ckpt"))
    saved = [torch.load(tmp_path / name / "last.ckpt", weights_only=False) for name in ("whole", "resumed")]
    whole, resumed = (each["optimizer_states"][0]["state"] for each in saved)
    assert all(torch.equal(whole[index]["weight_average"], resumed[index]["weight_average"]) for index in whole)


def test_as_many_batches_are_accumulated_as_a_schedule_says(tmp_path: Path) -> None:
    mine, theirs = (
        fit(strategy, tmp_path / name, callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})])
        for strategy, name in ((ours(), "ours"), ("ddp", "theirs"))
    )
    assert apart_at_most(mine, theirs) < 1e-6


def test_what_the_trainers_arguments_say_is_not_said_twice() -> None:
    with pytest.raises(UsageError, match="max_grad_norm to be left to gradient_clip_val"):
        ours(max_grad_norm=1.0)
    with pytest.raises(TypeError, match="'memory_buget'"):
        ours(memory_buget="1GiB")
    with pytest.raises(UsageError, match="found 'auto'"):
        ours(mesh="auto")
