"""TRL's trainers on top of a compiled step: ``zerofx_trainer(trl.DPOTrainer)``, and ``ZeroFXSFTTrainer``.

What TRL logs from a loss, it reads from tensors while the loss is computed: ``capture/values/logged.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from trl import KTOTrainer, SFTTrainer

from zerofx.errors import UsageError
from zerofx.integrations.transformers import Inputs, ZeroFXTrainer

_IGNORED = -100  # the label of a token that does not count


def zerofx_trainer(kind: type[Trainer]) -> Any:
    """The class of TRL's trainers of this ``kind`` that train by a compiled step.

    Its arguments are TRL's, and the keywords of ``zerofx.compile``::

        trainer = zerofx_trainer(trl.DPOTrainer)(model, ref_model=reference, args=..., memory_budget="24GiB")

    Losses and metrics are those of TRL. Each pattern of labels in a batch of ``KTOTrainer`` is a shape of its own, its
    samples in the order of labels.

    Raises:
        UsageError: it is no trainer of transformers.
    """
    if not (isinstance(kind, type) and issubclass(kind, Trainer)):
        raise UsageError(f"expected a class of trainers, such as trl.DPOTrainer, found {kind!r}: give the class itself")
    bases = (_LabelsInOrder, _TRLTrainer, kind) if issubclass(kind, KTOTrainer) else (_TRLTrainer, kind)
    return type(f"ZeroFX{kind.__name__}", bases, {"__module__": __name__})


class _TRLTrainer(ZeroFXTrainer):
    """Keeps what TRL's trainers log while they make data, as they generate, from what they log of a loss.

    A step would depend on the former, which is other in each step, as it depends on all that a loss may read.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._of_data = dict[str, defaultdict[str, list[float]]]()
        super().__init__(*args, **options)

    def _prepare_inputs(self, inputs: Any) -> Any:
        of_loss: Any = getattr(self, "_metrics", None)
        if of_loss is None:
            return super()._prepare_inputs(inputs)
        self._metrics = self._of_data = self._of_data or {mode: defaultdict(list) for mode in of_loss}
        try:
            return super()._prepare_inputs(inputs)
        finally:
            self._metrics = of_loss

    def log(self, logs: dict[str, float], *args: Any) -> None:
        mode = "train" if self._own_model.training else "eval"
        if of_mode := self._of_data.get(mode):
            self._metrics[mode].update(of_mode)
            of_mode.clear()
        super().log(logs, *args)


class _LabelsInOrder(_TRLTrainer):
    """Chooses samples by labels that are constants of the step, of sorted samples, so that there are few such steps."""

    def _move_inputs(self, inputs: Mapping[str, Any]) -> Inputs:
        moved = super()._move_inputs(inputs)
        labels = moved["label"]
        if isinstance(labels, torch.Tensor):
            order = labels.int().argsort(descending=True, stable=True)
            for name, value in moved.items():
                if isinstance(value, torch.Tensor) and len(value) == len(labels):
                    moved[name] = value[order]
            moved["label"] = tuple(moved["label"].tolist())
        return moved

    def step_loss(self, model: nn.Module, inputs: Inputs, num_items: torch.Tensor | None) -> Any:
        inputs["label"] = torch.tensor(inputs["label"], device=self.args.device)
        return super().step_loss(model, inputs, num_items)


class ZeroFXSFTTrainer(ZeroFXTrainer, SFTTrainer):
    """A ``trl.SFTTrainer`` that trains by a compiled step, with the keywords of ``zerofx.compile`` besides its own.

    The captured loss is the model's own, which is that of ``loss_type="nll"``, with the sums for entropy and token
    accuracy, which take the logits whole: ``log_token_metrics=False`` omits these two, so that a budget may have the
    logits in tiles.

    Raises:
        UsageError: an argument cannot be honoured; says what to give instead.
    """

    def __init__(self, *args: Any, log_token_metrics: bool = True, **options: Any) -> None:
        self._logs_tokens, self._num_tokens = log_token_metrics, 0
        self._of_mode = {trains: defaultdict[str, list[float]](list) for trains in (True, False)}
        super().__init__(*args, **options)
        given: Any = self.args
        refused = {
            "loss_type": given.loss_type != "nll" and "write a step_loss() of your own",
            "padding_free": self.padding_free and "packing_strategy='wrapped' packs to one length",
            "compute_loss_func": self.compute_loss_func is not None and "write a step_loss() of your own",
            "router_aux_loss_coef": self.aux_loss_enabled and "train mixtures without output_router_logits",
        }
        for name, instead in refused.items():
            if instead:
                raise UsageError(f"expected arguments that a compiled step can honour, found {name}: {instead}")

    def step_loss(self, model: nn.Module, inputs: Inputs, num_items: torch.Tensor | None) -> Any:
        inputs["use_cache"] = False
        labels = inputs["labels"][..., 1:]
        loss, outputs = Trainer.compute_loss(
            self, model, inputs, return_outputs=True, num_items_in_batch=num_items
        )  # fmt: skip
        if not self._logs_tokens:
            return loss
        with torch.no_grad():
            logits, counts = outputs.logits[:, :-1].float(), labels != _IGNORED
            log_probabilities = logits.log_softmax(-1)
            entropies = -(log_probabilities.exp() * log_probabilities).sum(-1)
            correct = (logits.argmax(-1) == labels) & counts
            return loss, {
                "entropy": (entropies * counts).sum(), "correct": correct.sum(), "valid": counts.sum()
            }  # fmt: skip

    def note_numbers(self, numbers: list[dict[str, torch.Tensor]]) -> None:
        noted = self._current_metrics()
        for each in numbers:
            entropy, correct, valid = self.accelerator.reduce(
                torch.stack([each[name].double() for name in ("entropy", "correct", "valid")])
            ).tolist()
            noted["entropy"].append(entropy / valid if valid else 0.0)
            noted["mean_token_accuracy"].append(correct / valid if valid else 0.0)
        noted["num_tokens"] = [self._num_tokens]  # so far, also where an evaluation is logged

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None) -> torch.Tensor:
        tokens = inputs["attention_mask"].sum() if "attention_mask" in inputs else inputs["input_ids"].numel()
        counted = torch.as_tensor(tokens, device=self.args.device)
        self._num_tokens += int(self.accelerator.gather_for_metrics(counted).sum())
        self._current_metrics()["num_tokens"] = [self._num_tokens]
        return super().training_step(model, inputs, num_items_in_batch)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        prefix, noted = "" if self._own_model.training else "eval_", self._current_metrics()
        logs |= {prefix + name: sum(values) / len(values) for name, values in noted.items()}
        noted.clear()
        super().log(logs, start_time)

    def _current_metrics(self) -> defaultdict[str, list[float]]:
        """The metrics collected since the last log, in training or in evaluations."""
        return self._of_mode[self._own_model.training]
