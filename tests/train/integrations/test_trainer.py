"""``ZeroFXTrainer`` trains, logs, evaluates, saves and resumes as the ``Trainer`` does."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, EvalPrediction, Trainer

from tests.lib.runs.trainers import apart, arguments, bert, history, llama, shapes_may_differ, trainer
from zerofx import LossScale, Precision
from zerofx.integrations.transformers import ZeroFXTrainer

LOGGED = ("loss", "learning_rate", "eval_loss", "train_loss")


def trained(
    kind: type[Trainer], model: nn.Module, folder: Path, *, own: dict[str, Any] | None = None, **given: Any
) -> Any:
    """A trainer that has trained. ``own`` are its keywords, ``given`` its arguments."""
    one = trainer(kind, model, arguments(folder / kind.__name__, **given), **(own or {}))  # which seeds what follows
    with shapes_may_differ():
        one.train()
    return one


ENDS_EARLY: dict[str, Any] = {"max_steps": 7, "eval_strategy": "no"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """The Trainer of transformers that has trained on some number of samples, once for all tests; to be read only."""

    @functools.cache
    def plain_of(size: int) -> Any:
        return trained(Trainer, llama(1), tmp_path_factory.mktemp("plain"), own={"size": size}, **ENDS_EARLY)

    return plain_of


def different(mine: Any, plain: Any) -> list[str]:
    """Where two trainers differ in what they have logged."""
    norms = apart(history(mine, "grad_norm"), history(plain, "grad_norm"), bound=1e-4)
    return apart(history(mine, *LOGGED), history(plain, *LOGGED)) + norms


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("model", [llama, bert])
def test_thirty_steps_are_those_of_the_trainer(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    plain, mine = (trained(kind, model(), tmp_path) for kind in (Trainer, ZeroFXTrainer))
    assert different(mine, plain) == []


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("size", [22, 20, 18], ids="samples {}".format)
def test_an_epoch_may_end_within_an_update_and_a_batch(size: int, plain: Callable[[int], Any], tmp_path: Path) -> None:
    # Micro-batches of an epoch's updates: 4 4, 4 4, and 4 2, or 4, or 2.
    mine = trained(ZeroFXTrainer, llama(1), tmp_path, own={"size": size}, **ENDS_EARLY)
    assert different(mine, plain(size)) == []


# All batches of 20 have as many samples, and with 18 too an update ends with its first batch.
@pytest.mark.sweep(1)
@pytest.mark.parametrize("size", [22, 18, pytest.param(20, marks=pytest.mark.slow)], ids="samples {}".format)
def test_with_lengths_what_an_epoch_ends_with_is_padded(size: int, plain: Callable[[int], Any], tmp_path: Path) -> None:
    mine = trained(ZeroFXTrainer, llama(1), tmp_path, own={"size": size, "lengths": (16,)}, **ENDS_EARLY)
    assert apart(history(mine, *LOGGED), history(plain(size), *LOGGED)) == []
    assert {rung.length for rung in mine.step.rungs if rung.num_steps} == {16}


def _accuracy(outcome: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(np.asarray(outcome.predictions).argmax(-1) == outcome.label_ids))}


@pytest.mark.days(3)
def test_evaluations_come_before_between_and_after_steps(tmp_path: Path) -> None:
    seen = []
    for kind in (Trainer, ZeroFXTrainer):
        args = arguments(tmp_path, max_steps=4, eval_steps=2, eval_on_start=True, label_smoothing_factor=0.1)
        one = trainer(kind, bert(), args, compute_metrics=_accuracy)
        before = one.evaluate()["eval_loss"]
        with shapes_may_differ():
            one.train()
            outcome = one.predict(one.eval_dataset)
        logged = history(one, "loss", "eval_loss", "eval_accuracy")
        seen.append({**logged, "before": [before], "logits": outcome.predictions.ravel().tolist()})
    assert apart(seen[1], seen[0]) == []


@pytest.mark.days(3)
def test_the_best_model_is_found_saved_and_trained_on(tmp_path: Path) -> None:
    seen: list[dict[str, list[float]]] = []
    for kind in (Trainer, ZeroFXTrainer):
        one = trained(
            kind, llama(1), tmp_path, own={"callbacks": [EarlyStoppingCallback(1)]}, eval_steps=2, learning_rate=0.3,
            save_strategy="steps", save_steps=2, save_total_limit=2, load_best_model_at_end=True, warmup_steps=0,
        )  # fmt: skip
        stopped, best = one.state.global_step, str(one.state.best_model_checkpoint)
        assert stopped < 30 and best.endswith(f"checkpoint-{stopped - 2}")
        with shapes_may_differ():
            found = one.evaluate()["eval_loss"]
        assert found == pytest.approx(min(history(one, "eval_loss")["eval_loss"]), rel=1e-6)
        one.args.max_steps = 2
        one.args.load_best_model_at_end = False
        with shapes_may_differ():
            one.train()
        one.save_model(str(tmp_path / "final"))
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "final").state_dict()
        whole = one.step.full_state_dict() if kind is ZeroFXTrainer else one.model.state_dict()
        assert saved.keys() == whole.keys() and all(torch.equal(saved[name], whole[name]) for name in whole)
        seen.append(history(one, "loss", "eval_loss"))
    assert apart(seen[1], seen[0], bound=1e-4) == []  # at a learning rate at which rounding grows


def test_a_checkpoint_of_the_trainer_is_gone_on_from(tmp_path: Path) -> None:
    plain = trained(Trainer, llama(1), tmp_path, max_steps=6, eval_steps=3, save_strategy="steps", save_steps=3)
    args = arguments(tmp_path, max_steps=6, eval_steps=3)
    one = trainer(ZeroFXTrainer, llama(1), args)
    one.train(resume_from_checkpoint=os.path.join(tmp_path, "Trainer", "checkpoint-3"))
    assert apart(history(one, "loss", "eval_loss"), history(plain, "loss", "eval_loss")) == []


class _Distilled:
    """A loss with weights and a teacher of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.weights = torch.tensor([1.0, 2.0, 3.0])
        torch.manual_seed(7)
        self.teacher: Any = nn.Sequential(nn.Embedding(48, 3)).requires_grad_(False)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        wanted = self.teacher(inputs["input_ids"]).mean(1)
        loss = F.cross_entropy(outputs.logits, inputs["labels"], weight=self.weights) + F.mse_loss(
            outputs.logits, wanted
        )
        return (loss, outputs) if return_outputs else loss


class _PlainDistilled(_Distilled, Trainer):
    pass


class _OwnDistilled(_Distilled, ZeroFXTrainer):
    pass


@pytest.mark.days(3)
def test_a_loss_of_ones_own_may_use_what_the_trainer_has(tmp_path: Path) -> None:
    plain, mine = (
        trained(kind, bert(), tmp_path, max_steps=4, eval_steps=4) for kind in (_PlainDistilled, _OwnDistilled)
    )
    assert apart(history(mine, *LOGGED), history(plain, *LOGGED)) == []
    # It is read where it is in each step, not kept as it was.
    with torch.no_grad():
        mine.teacher[0].weight.fill_(100.0)
    mine.train()
    assert history(mine, "loss")["loss"][-1] > 100.0


def test_what_calls_the_model_itself_does_so_with_whole_parameters(tmp_path: Path) -> None:
    one = trained(ZeroFXTrainer, llama(1), tmp_path, max_steps=2, eval_strategy="no")
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with one.step.full_parameters() as model:
        held = model.generate(ids, max_new_tokens=4, do_sample=False)
    one.step.close()
    assert torch.equal(one.model.generate(ids, max_new_tokens=4, do_sample=False), held)
    with shapes_may_differ():
        one.train()
    assert not one.step.is_closed


def test_a_step_that_is_left_out_leaves_the_schedule_where_it_is(tmp_path: Path) -> None:
    scale = LossScale(init_scale=2.0**60, backoff_factor=2.0**-20)
    one = trained(
        ZeroFXTrainer, llama(1), tmp_path, own={"precision": Precision("fp16", loss_scale=scale)},
        max_steps=6, warmup_steps=6, eval_strategy="no",
    )  # fmt: skip
    skipped, rates = one.step.num_skipped, history(one, "learning_rate")["learning_rate"]
    assert 0 < skipped < 6 and rates[:skipped] == [0.0] * skipped
    assert rates[skipped:] == pytest.approx([1e-2 * step / 6 for step in range(6 - skipped)])
