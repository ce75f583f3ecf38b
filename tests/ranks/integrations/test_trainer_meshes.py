"""``ZeroFXTrainer`` on meshes whose ranks share one computation: the losses of one process, batches given alike."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import EvalPrediction, Trainer

from tests.lib.distributed import run_ranks
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.trainers import (
    Sentences,
    apart,
    arguments,
    as_started_by_torchrun,
    history,
    llama,
    shapes_may_differ,
    trainer,
)
from zerofx.integrations.transformers import ZeroFXTrainer
from zerofx.scheduler.cost.machine import Link

LOGGED = ("loss", "grad_norm", "num_input_tokens_seen", "eval_even_loss", "eval_odd_samples", "eval_odd_sum")
TIMED = ("eval_even_steps_per_second", "eval_even_runtime")
GIVEN = {"max_steps": 6, "eval_steps": 3, "include_num_input_tokens_seen": "all"}
# Parameters are slow to send, so that two ranks are fastest on one sample together.
SLOW_LINKS = replace(SHARING, intra_node=Link(bandwidth=1e6, latency=1e-13))


class _Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        sentences = Sentences(96)
        return map(sentences.__getitem__, range(len(sentences)))


@dataclass(frozen=True)
class _Given:
    """A mesh of ``num_data`` groups of two, and what they train on: ``samples`` a micro-batch, of all groups."""

    mesh: Any
    num_data: int = 1
    samples: int = 4
    num_micro_batches: int = 2
    streams: bool = False
    num_layers: int = 2
    options: dict[str, Any] = field(default_factory=lambda: {"machine": SHARING})


def _sums(evaluated: EvalPrediction) -> dict[str, float]:
    """How many samples were evaluated, and a number that tells whether each was so once."""
    logits: Any = evaluated.predictions
    return {"samples": len(logits), "sum": float(abs(logits).sum())}


def _trainer(kind: type[Trainer], folder: str, given: _Given, num_data: int, **options: Any) -> Any:
    each = given.samples // num_data
    args = arguments(
        folder, per_device_train_batch_size=each, per_device_eval_batch_size=each,
        gradient_accumulation_steps=given.num_micro_batches, **GIVEN,
    )  # fmt: skip
    if given.streams:
        options["train_dataset"] = _Stream()
    # 14 samples are not divided by the ranks' batches: what fills the last one is not to be counted.
    evaluated = {"even": Sentences(16, 1), "odd": Sentences(14, 1)}
    return trainer(kind, llama(given.num_layers), args, eval_dataset=evaluated, compute_metrics=_sums, **options)


def _train(folder: str, given: _Given) -> tuple[dict[str, list[float]], list[int], int, int, int, list[int]]:
    """What a rank has logged, the steps of evaluations, the samples of an update, ranks that share a batch, parameters
    that lie in parts, and the objects that each group of ranks has."""
    as_started_by_torchrun()
    one = _trainer(ZeroFXTrainer, folder, given, given.num_data, mesh=given.mesh, **given.options)
    with shapes_may_differ():
        one.train()
    plan = one.step.plan
    num_parted = sum(choice.outputs[0] != "R" for choice in plan.shardings if choice.parameter)
    objects = one.accelerator.gather_for_metrics([one.accelerator.process_index], use_gather_object=True)
    predicted = one.predict(Sentences(16, 1), metric_key_prefix="eval_even").metrics
    timed = history(one, *TIMED)
    pairs = [*zip(*(timed[name] for name in TIMED), strict=True), tuple(predicted[name] for name in TIMED)]
    steps = [round(rate * seconds) for rate, seconds in pairs]
    return history(one, *LOGGED), steps, one.get_total_train_batch_size(one.args), plan.mesh.model, num_parted, objects


@pytest.mark.days(3)
@pytest.mark.parametrize(
    "given",
    [
        _Given({"model": 2}, num_layers=1),
        pytest.param(_Given({"model": 2}, streams=True), marks=pytest.mark.slow),
        pytest.param(
            _Given("auto", samples=1, num_micro_batches=1, options={"machine": SLOW_LINKS}), marks=pytest.mark.slow
        ),
        pytest.param(_Given({"shard": 2, "model": 2}, num_data=2), marks=pytest.mark.slow),
    ],
    ids=["model", "stream", "auto", "both"],
)
def test_ranks_that_share_a_computation_train_as_one_process(given: _Given, tmp_path: Path) -> None:
    plain = _trainer(Trainer, str(tmp_path / "plain"), given, 1)
    plain.train()
    for found, *others in run_ranks(_train, 2 * given.num_data, str(tmp_path), given):
        steps, samples, num_sharing, num_parted, objects = others
        assert steps == 3 * [16 // given.samples]
        assert samples == given.samples * given.num_micro_batches
        assert num_sharing == 2
        assert num_parted
        assert objects == list(range(given.num_data))
        assert all(found.values())
        assert apart(found, history(plain, *LOGGED)) == []
