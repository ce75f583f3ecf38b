"""``ZeroFXTrainer``: the ``Trainer`` of transformers, whose training steps and evaluations are planned and sharded.

The Trainer's own loop runs as it is. A ``SteppedModel`` replaces the model where the loop calls it, a
``SteppedOptimizer`` the optimizer where it is stepped, whose update has run by then. ``compute_loss`` is captured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PredictionOutput

from zerofx import api
from zerofx.errors import UsageError, warn
from zerofx.integrations.data_ranks import DataRanks, check_loading, first_batch, may_share, num_sharing, repeat
from zerofx.integrations.stand_ins import SteppedModel, SteppedOptimizer
from zerofx.integrations.trainer_arguments import check_arguments, check_keywords, precision_of, recompute_of
from zerofx.mesh_option import AUTO
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.session.step import Step
from zerofx.torch_private.operators import pytree

_STATE = "zerofx"  # the folder of a checkpoint that has all that training goes on from
_SCHEDULER = "scheduler.pt"  # as the Trainer calls it
_OLDEST = (5, 6)  # from then on it has the hooks, and divides gradients by their accumulation once

Inputs = dict[str, Any]


class ZeroFXTrainer(Trainer):
    """A ``transformers.Trainer`` that trains by a compiled step.

    Args:
        args: as those of the ``Trainer``, or of another class of trainers, listed before it among the bases of yours.
        options: the keywords of ``zerofx.compile`` besides, ``memory_budget="24GiB"`` say; those that arguments of the
            Trainer say (``accumulate``, ``max_grad_norm``, ``forward`` ...) are left to these.

    ``trainer.step`` is the compiled step, from ``train()`` on. It holds the model until ``trainer.step.close()``: what
    calls the model itself does so inside ``with trainer.step.full_parameters():``.

    Raises:
        UsageError: an argument cannot be honoured; says what to give instead.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        if tuple(map(int, transformers.__version__.split(".")[:2])) < _OLDEST:
            raise UsageError(
                f"expected transformers {'.'.join(map(str, _OLDEST))} or later, found {transformers.__version__}"
            )
        own, self._options = check_keywords(options, type(self))
        may_share(self._options.get("mesh"))  # which checks it
        self.step: Step | None = None
        self._asked: Any = None
        self._accelerator_args: dict[str, Any] = {}
        self._waiting: list[Inputs] = []
        self._weights: dict[str, torch.Tensor] | None = None
        super().__init__(*args, **own)

    # ------------------------------------------------------------------------------------------------ making the step

    def create_accelerator_and_postprocess(self) -> None:
        check_arguments(self.args)
        precision_of(self.args, self._options)
        check_loading(self.args, self._options.get("mesh"))
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise UsageError(
                "expected processes that accelerate does not shard, found DeepSpeed or FSDP in its configuration: "
                "start them with torchrun, or with a configuration without them"
            )
        self.accelerator = DataRanks(**self._accelerator_args)
        self._note_mesh()
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        if may_share(self._options.get("mesh")):  # else one process hands a part of what it reads to each
            kwargs["dataloader_config"].dispatch_batches = False
        # The step has the precision: accelerate is to wrap no forward, and to scale no loss.
        self._accelerator_args = super()._build_accelerator_args(**kwargs, mixed_precision="no")
        return self._accelerator_args

    def _note_mesh(self) -> None:
        """Give the ranks of each group that shares one computation the same batches."""
        accelerator = self.accelerator
        accelerator.num_sharing = num_sharing(self._options.get("mesh"), accelerator.state.num_processes)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return int(super().get_total_train_batch_size(args) // self.accelerator.num_sharing)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The Trainer's. With ``mesh="auto"`` the mesh, which decides who gets which data, is chosen first."""
        if self._options.get("mesh") == AUTO:
            self._options["mesh"] = self._fastest_mesh(super().get_train_dataloader())
            self._note_mesh()
        return super().get_train_dataloader()

    def _fastest_mesh(self, loader: DataLoader[Any]) -> Mesh:
        """The mesh on which a step is fastest for batches like a loader's. Collective."""
        self.create_optimizer()
        num, step = self.args.gradient_accumulation_steps, self._open_step()
        self._own_model.train()
        inputs = self._move_inputs(first_batch(loader, self.args.train_batch_size))
        num_items = self._get_num_items_in_batch([inputs] * num, self.args.device)
        mesh = step.choose_mesh(**repeat(inputs, num), num_items_of_update=num_items, num_micro_batches=num)
        step.close()  # the loss of the one that trains is of as many ranks as have batches of their own
        return mesh

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not any(parameter.is_meta for parameter in model.parameters()):  # the step gives those their values
            super()._move_model_to_device(model, device)

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        """The Trainer's optimizer, wrapped for its loop."""
        optimizer = super().create_optimizer(*args)
        if not isinstance(optimizer, SteppedOptimizer):
            if callable(getattr(optimizer, "eval", None)):
                raise UsageError(
                    f"expected an optimizer that leaves parameters as they are for an evaluation, found "
                    f"{type(optimizer).__name__} with eval(): give another optim="
                )
            optimizer = SteppedOptimizer(optimizer)
        self.optimizer = optimizer
        return optimizer

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if training:
            return SteppedModel(self._own_model, self._open_step())
        return self._own_model if self.step is None or self.step.is_closed else self.model_wrapped

    @property
    def _own_model(self) -> nn.Module:
        assert isinstance(self.model, nn.Module), "there is one from __init__ on"
        return self.model

    def _open_step(self) -> Step:
        """The open step for the current model and arguments."""
        norm = self.args.max_grad_norm
        options = {
            **self._options,
            **precision_of(self.args, self._options),
            **recompute_of(self.args, self._options),
            "accumulate": self.args.gradient_accumulation_steps,
            "max_grad_norm": norm if norm and norm > 0 else None,
        }
        asked = (self.model, self.optimizer, options)
        if self.step is not None and not self.step.is_closed:
            if asked == self._asked:
                return self.step
            self.step.close()
        optimizer = self.optimizer
        assert isinstance(optimizer, SteppedOptimizer), "create_optimizer() has made it"
        self.step = api.compile(self._own_model, optimizer.inner, forward=_loss_of(self), **options)
        self._asked = asked
        return self.step

    # ------------------------------------------------------------------------------------------------ training

    def get_batch_samples(self, *args: Any) -> tuple[list[Any], torch.Tensor | int | None]:
        if self._waiting:
            warn(
                f"{len(self._waiting)} micro-batches at the end of the data are left out: an update is of "
                f"gradient_accumulation_steps={self.args.gradient_accumulation_steps}, and data without a length does "
                f"not say where it ends"
            )
            self._waiting = []
        return super().get_batch_samples(*args)

    def _get_num_items_in_batch(self, *args: Any) -> torch.Tensor | None:
        """The number of items, at least 1 as a loss is divided by it; whole, so that no precision rounds it."""
        num_items = super()._get_num_items_in_batch(*args)
        if num_items is None:
            return None
        whole = torch.as_tensor(num_items, device=self.args.device).long()
        if not whole:
            warn("num_items_in_batch is 0, since every label is ignored: the loss and its gradients are 0 in this step")
        return whole.clamp(min=1)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The inputs of a step or an evaluation: the Trainer's, or what another class of trainers makes of data.

        Meanwhile ``self.model`` is what stands for the model, so that it can be called, and generate.
        """
        own, self.model = self._own_model, self.model_wrapped
        try:
            return super()._prepare_inputs(inputs)
        finally:
            self.model = own

    def training_step(
        self, model: nn.Module, inputs: Inputs, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """The training step of the other classes of trainers, for which the compiled step computes loss and gradients.

        All micro-batches of an update are kept until the last, which trains on them, and whose loss is that of all.
        """
        losses: list[torch.Tensor] = []

        def compute(model: nn.Module, inputs: Inputs, *_: Any, **__: Any) -> torch.Tensor:
            del vars(self)["compute_loss"]  # the step calls the class's
            losses.append(self._train_on(inputs, num_items_in_batch))
            return losses[0]

        vars(self)["compute_loss"] = compute
        try:
            super().training_step(model, inputs, num_items_in_batch)
        finally:
            vars(self).pop("compute_loss", None)
        return losses[0]

    def _train_on(self, inputs: Inputs, num_items: torch.Tensor | int | None) -> torch.Tensor:
        """Keep a micro-batch; the last of an update trains on all of them, and returns their loss."""
        step, optimizer = self.step, self.optimizer
        assert step is not None and isinstance(optimizer, SteppedOptimizer), "made before the loop"
        self._waiting.append(self._move_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        parts, self._waiting = self._waiting, []
        if self._options.get("lengths") is None and any(_form(part) != _form(parts[0]) for part in parts):
            # A smaller one at the end, as a rule: computed together, instead of one after the other.
            parts = [{"parts": parts}]
        of_all = {"num_items_of_update": num_items, "num_micro_batches": len(parts)}
        for part in parts:
            step.micro(**part, **of_all)
        skipped = step.num_skipped
        outcome = step.update(partial=True)
        optimizer.step_was_skipped = step.num_skipped > skipped
        return self._loss_alone(outcome)

    def step_loss(self, model: nn.Module, inputs: Inputs, num_items: torch.Tensor | None) -> Any:
        """The result of a step, or an evaluation, for a micro-batch: its loss, or a pair of that and a dict of numbers.

        It is captured: it may not read the values of tensors. ``note_numbers`` is given the dicts.
        """
        return self.compute_loss(model, inputs, num_items_in_batch=num_items)

    def note_numbers(self, numbers: list[dict[str, torch.Tensor]]) -> None:
        """Receive the numbers besides the losses of ``step_loss``, after a step or an evaluated batch."""

    def _loss_alone(self, outcome: Any) -> torch.Tensor:
        loss, numbers = outcome if isinstance(outcome, tuple) else (outcome, None)
        if numbers is not None:  # of each micro-batch a list, where there are several
            self.note_numbers(pytree.tree_leaves(numbers, is_leaf=lambda inner: isinstance(inner, dict)))
        assert isinstance(loss, torch.Tensor)
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        assert self.step is not None
        return self.step.grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor | None:
        return grad_norm  # with max_grad_norm=0 none is taken

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Evaluate by ``step.evaluate`` if the loss alone is asked for, otherwise as the Trainer does."""
        step, names = self.step, self.label_names
        has_labels = bool(names) and isinstance(inputs, Mapping) and all(inputs.get(n) is not None for n in names)
        if not (prediction_loss_only and has_labels and step is not None and step.is_prepared):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        inputs = self._move_inputs(inputs)
        num_items = self._get_num_items_in_batch([inputs], self.args.device)
        return self._loss_alone(step.evaluate(**inputs, num_items_of_update=num_items)), None, None

    def log(self, logs: dict[str, float], *args: Any) -> None:
        """Log as the Trainer does, with an evaluation's steps counted as in ``predict``."""
        self._count_steps(logs)
        super().log(logs, *args)

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Predict as the Trainer does, which counts every process as one with samples of its own."""
        output = super().predict(*args, **kwargs)
        self._count_steps(output.metrics or {})
        return output

    def _count_steps(self, metrics: dict[str, float]) -> None:
        """Correct step counts: ranks that share a computation take as many steps more for the same samples."""
        for name in metrics:
            if name.endswith("_steps_per_second") and name != "train_steps_per_second":
                metrics[name] *= self.accelerator.num_sharing

    def _move_inputs(self, inputs: Mapping[str, Any]) -> Inputs:
        moved: Inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.args.device), dict(inputs))
        return moved

    # ------------------------------------------------------------------------------------------------ saving, loading

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save what ``from_pretrained`` opens; a bucket at a time is gathered for it. Collective."""
        if self.step is not None and self.step.is_prepared:
            self._weights = self.step.full_state_dict(keep=self.args.should_save)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._weights = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        super()._save(output_dir, self._weights if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.step is None or not self.step.is_prepared:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self.step.save_checkpoint(Path(output_dir, _STATE), keep=1)
        if self.args.should_save and self.lr_scheduler is not None:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not _has_state(resume_from_checkpoint):  # else all of it is loaded once there is a step
            with self._whole():
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _has_state(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.step is not None and self.lr_scheduler is not None, "made before"
        self.step.load_checkpoint(Path(checkpoint, _STATE))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, _SCHEDULER), weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self.step is not None and self.step.is_prepared and best is not None and _has_state(best):
            self.step.load_checkpoint(Path(best, _STATE), weights_only=True)
            return
        with self._whole():
            super()._load_best_model()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """While open, the model may be written to as a whole one. Collective."""
        if self.step is None or self.step.is_closed:
            yield
            return
        with self.step.full_parameters(write_back=True):
            yield


class _Loss:
    """A trainer's ``compute_loss`` as a step calls it, for one micro-batch, or for several computed together."""

    def __init__(self, trainer: ZeroFXTrainer) -> None:
        self._trainer = trainer

    def __call__(
        self,
        model: nn.Module,
        *args: Any,
        parts: Sequence[Inputs] = (),
        num_items_of_update: torch.Tensor | None = None,
        num_micro_batches: int = 1,
        outputs: bool = False,
        reached: Mapping[str, Any],
        **inputs: Any,
    ) -> Any:
        """The loss, or the model's outputs. ``reached``: what ``compute_loss`` may use besides the model's tensors."""
        if outputs:
            return model(*args, **inputs)
        trainer = self._trainer
        outcomes = [trainer.step_loss(model, dict(part), num_items_of_update) for part in parts or [inputs]]
        losses: list[Any] = [outcome[0] if isinstance(outcome, tuple) else outcome for outcome in outcomes]
        numbers = [outcome[1] for outcome in outcomes if isinstance(outcome, tuple)]
        is_of_all = getattr(trainer, "loss_is_scaled_for_ga", None)  # which trainers may say since 5.20
        if is_of_all is None:
            is_counted = trainer.model_accepts_loss_kwargs and num_items_of_update is not None
            is_of_all = is_counted or trainer.compute_loss_func is not None
        # A step gives the mean over its micro-batches.
        loss = sum(losses) * num_micro_batches if is_of_all else sum(losses) / len(losses)
        return (loss, numbers) if numbers else loss


def _loss_of(trainer: ZeroFXTrainer) -> Callable[..., Any]:
    """The loss function of a step; tensors and modules of a user's own trainer are looked up in it."""
    own = (trainer.model, trainer.model_wrapped)
    reached = {
        name: value
        for name, value in vars(trainer).items()
        if name == "compute_loss_func" or (isinstance(value, torch.Tensor | nn.Module) and value not in own)
    }
    return partial(_Loss(trainer), reached=reached)


def _form(part: Inputs) -> list[tuple[str, Any]]:
    """The common properties of micro-batches that can be computed one after the other."""
    return [(name, _kind(value)) for name, value in part.items()]


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    return value if isinstance(value, tuple) else type(value)


def _has_state(checkpoint: str) -> bool:
    return os.path.isdir(Path(checkpoint, _STATE))
