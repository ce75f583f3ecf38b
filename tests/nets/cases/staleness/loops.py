"""What training steps read within loops of others: Lightning's, and the trainers of transformers and of TRL."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from tests.nets.cases.staleness.script import CHANGED, CLASSES, FEATURES, SAMPLES, STEPS, Case, Small, Trained, number

Loop = Callable[[str | None, int], Trained]
_PER_EPOCH = 4


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _changes(step: int, most: int) -> int:
    """How many changes there have been when step ``step`` begins, of which ``most`` are done."""
    return min(sum(1 for changed in CHANGED if changed <= step), most)


# ---------------------------------------------------------------------------------------------------- Lightning


def _lightning(weight: Callable[[Any], float], backend: str | None, most: int) -> Trained:
    """Three epochs of four steps, with a loss that ``weight`` of the module weighs."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]  # untyped where it is skipped
        def __init__(self) -> None:
            super().__init__()
            self.small, self.beta = Small(), 1.0
            self.save_hyperparameters({"beta": 1.0})

        def training_step(self, batch: Any) -> Tensor:
            return F.mse_loss(self.small(batch[0]), batch[1]) * weight(self)

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            self.beta = self.hparams.beta = number(_changes(self.global_step + 1, most))

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            trained.losses.append(outputs["loss"].detach().clone())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, foreach=False)

    trained, module = Trained(), Module()
    strategy: Any = "ddp" if dist.is_initialized() else "auto"
    if backend is not None:
        from zerofx.integrations.lightning import ZeroFXStrategy

        strategy = ZeroFXStrategy(backend=backend)
    draws = torch.Generator().manual_seed(3)
    size = SAMPLES * _PER_EPOCH * _num_ranks()
    data = TensorDataset(
        torch.randn(size, FEATURES, generator=draws), torch.randn(size, CLASSES, generator=draws)
    )  # fmt: skip
    shares: Any = {"num_replicas": _num_ranks(), "rank": dist.get_rank() if dist.is_initialized() else 0}
    sampler: Any = DistributedSampler(data, shuffle=False, **shares)
    trainer = lightning.Trainer(
        max_epochs=STEPS // _PER_EPOCH, accelerator="cpu", devices=_num_ranks(), strategy=strategy, logger=False,
        use_distributed_sampler=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    alone = not dist.is_initialized()
    try:
        trainer.fit(module, DataLoader(data, batch_size=SAMPLES, sampler=sampler))
    except Exception as error:  # noqa: BLE001  # what it is, is the outcome
        trained.error = error
    else:
        trained.states.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
    finally:
        if alone and dist.is_initialized():
            dist.destroy_process_group()
    return trained


# ---------------------------------------------------------------------------------------------------- transformers


class _Rows(Dataset[dict[str, Tensor]]):
    """Made-up rows for a regression."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(3)
        size = SAMPLES * STEPS * _num_ranks()
        self._x, self._y = (torch.randn(size, width, generator=draws) for width in (FEATURES, CLASSES))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self._x[index], "labels": self._y[index]}


class _Regression(Small):
    """A model as the Trainer has it: a dictionary with the loss."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]  # with the targets
        return {"loss": F.mse_loss(self.outputs(x), labels)}


def _fitted(kind: Any, most: int, settings: Any, change: Callable[[Any, int], None], **options: Any) -> Trained:
    """What a trainer of class ``kind`` trains; ``change`` is given it before each step with the changes so far."""
    from transformers import PrinterCallback, TrainerCallback

    trained = Trained()

    class Noting(kind):  # type: ignore[misc]  # a class that is given
        def training_step(self, *args: Any, **others: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **others)
            trained.losses.append(loss.detach().clone())
            return loss

    class Changing(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            change(trainer, _changes(state.global_step + 1, most))

    trainer: Any = Noting(args=settings, callbacks=[Changing()], **options)
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train()
    except Exception as error:  # noqa: BLE001  # what it is, is the outcome
        trained.error = error
        return trained
    step = getattr(trainer, "step", None)
    state = trainer.model.state_dict() if step is None else step.full_state_dict()
    trained.states.append({name: tensor.clone() for name, tensor in state.items()})
    if step is not None:
        step.close()
    return trained


def _settings(kind: Any, folder: str, **given: Any) -> Any:
    return kind(
        output_dir=folder, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
        per_device_train_batch_size=SAMPLES, max_steps=STEPS, learning_rate=0.01, lr_scheduler_type="constant",
        optim="sgd", max_grad_norm=0.0, **given,
    )  # fmt: skip


def _trainer(
    weight: Callable[[Any], float], change: Callable[[Any, int], None], backend: str | None, most: int
) -> Trained:
    """Twelve steps of the Trainer of transformers, whose ``compute_loss`` weighs by ``weight`` of the trainer."""
    from transformers import Trainer, TrainingArguments

    kind: Any = Trainer
    if backend is not None:
        from zerofx.integrations.transformers import ZeroFXTrainer as kind  # noqa: N813  # one of two classes

    class Weighing(kind):  # type: ignore[misc]  # a class that is given
        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **others: Any) -> Tensor:
            loss: Tensor = model(inputs["x"], inputs["labels"])["loss"]
            return loss * weight(self)

    options = {} if backend is None else {"backend": backend}
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(TrainingArguments, folder, remove_unused_columns=False)
        settings.beta = 1.0
        return _fitted(Weighing, most, settings, change, model=_Regression(), train_dataset=_Rows(), **options)


def _set_beta(trainer: Any, count: int) -> None:
    trainer.args.beta = number(count)


def _set_weight(trainer: Any, count: int) -> None:
    trainer.weight = number(count)


def _leave(trainer: Any, count: int) -> None:
    """The trainer goes on counting by itself."""


# ---------------------------------------------------------------------------------------------------- TRL


def _sft(change: Callable[[Any, int], None], backend: str | None, most: int) -> Trained:
    """Twelve steps of the SFTTrainer of TRL."""
    import datasets
    import tokenizers
    import trl
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words, length = {f"w{index}": index for index in range(13)}, 6
    words |= {"<pad>": 13, "<eos>": 14, "<unk>": 15}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
    )  # fmt: skip
    draws = torch.Generator().manual_seed(3)
    rows = [torch.randint(13, (length,), generator=draws).tolist() for _ in range(SAMPLES * STEPS * _num_ranks())]
    table = datasets.table.InMemoryTable.from_pydict({"input_ids": rows, "labels": rows})
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=length, initializer_range=0.5,
        )
    )  # fmt: skip
    kind, options = trl.SFTTrainer, {}
    if backend is not None:
        from zerofx.integrations.trl import ZeroFXSFTTrainer

        kind, options = ZeroFXSFTTrainer, {"backend": backend}
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(
            trl.SFTConfig, folder, bf16=False, max_length=length, dataset_kwargs={"skip_prepare_dataset": True},
            gradient_checkpointing=False,
        )  # fmt: skip
        return _fitted(
            kind, most, settings, change, model=model, processing_class=tokenizer,
            train_dataset=datasets.Dataset(table, fingerprint="rows"), **options,
        )  # fmt: skip


def _set_scaling(trainer: Any, count: int) -> None:
    trainer.model.model.layers[0].self_attn.scaling = number(count)


def _case(name: str, library: str, loop: Loop, *, bound: float = 1e-6, counts: bool = False, slow: bool = True) -> Case:
    """``counts``: whether what is read is what the loop counts by itself, which cannot be left out."""

    def train(backend: str | None, most: int) -> Trained:
        torch.manual_seed(0)
        with mock.patch.dict(os.environ):  # in which Lightning and accelerate look for the group, and leave more
            if dist.is_initialized():
                from tests.lib.runs.trainers import as_started_by_torchrun

                as_started_by_torchrun()
            return loop(backend, most)

    return Case(f"{name} ({library})", "number", train, bound=bound, library=library, tells=not counts, slow=slow)


def _in_lightning(name: str, weight: Callable[[Any], float], *, counts: bool = True, slow: bool = True) -> Case:
    return _case(name, "lightning", functools.partial(_lightning, weight), counts=counts, slow=slow)


def _in_trainer(
    name: str, weight: Callable[[Any], float], change: Callable[[Any, int], None] = _leave, *, slow: bool = True
) -> Case:
    return _case(name, "transformers", functools.partial(_trainer, weight, change), counts=change is _leave, slow=slow)


global_step = _in_lightning("self.global_step", lambda module: 1 + 0.1 * module.global_step, slow=False)
current_epoch = _in_lightning("self.current_epoch", lambda module: 1.0 + module.current_epoch)
step_of_trainer = _in_lightning("self.trainer.global_step", lambda module: 1 + 0.1 * module.trainer.global_step)
batches_of_loop = _in_lightning(
    "self.trainer.fit_loop.epoch_progress", lambda module: 1.0 + module.trainer.fit_loop.epoch_progress.current.started
)
own_beta = _in_lightning("attribute that on_train_batch_start sets", lambda module: module.beta, counts=False)
hparams = _in_lightning("self.hparams", lambda module: module.hparams.beta, counts=False)

state_step = _in_trainer("self.state.global_step", lambda trainer: 1 + 0.1 * trainer.state.global_step, slow=False)
state_epoch = _in_trainer("self.state.epoch", lambda trainer: 1 + trainer.state.epoch)
arguments = _in_trainer("self.args, which a callback sets", lambda trainer: trainer.args.beta, _set_beta)
own_weight = _in_trainer("attribute of the trainer, which a callback sets", lambda trainer: trainer.weight, _set_weight)

# TRL computes the output layer in pieces, which rounds otherwise.
scaling = _case(
    "scaling of attention, which a callback sets", "trl", functools.partial(_sft, _set_scaling), bound=3e-5
)  # fmt: skip
