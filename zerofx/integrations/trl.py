"""``ZeroFXSFTTrainer``: the ``SFTTrainer`` of TRL, whose training steps and evaluations are planned and sharded."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from trl import SFTTrainer

from zerofx.errors import UsageError
from zerofx.integrations.transformers import Inputs, ZeroFXTrainer

_IGNORED = -100  # the label of a token that does not count


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
            "activation_offloading": given.activation_offloading and "offload= and memory_budget= do that",
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
