"""A Llama and a BERT classifier with made-up data, trained by the Trainer of transformers or by zerofx's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

pytest.importorskip("accelerate")
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from zerofx import ZeroFXWarning
from zerofx.integrations.transformers import ZeroFXTrainer

TOKENS, LENGTH, CLASSES = 48, 12, 3


class Sentences(Dataset[dict[str, Tensor]]):
    """Made-up sentences: of each some tokens do not count for the loss, or, with ``classes``, a class for all of it."""

    def __init__(self, size: int, seed: int = 0, classes: int = 0) -> None:
        draws = torch.Generator().manual_seed(seed)
        self._ids = torch.randint(TOKENS, (size, LENGTH), generator=draws)
        counts = torch.rand(size, LENGTH, generator=draws) < 0.7
        self._labels = torch.where(counts, self._ids, -100) if not classes else self._ids[:, 0] % classes

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "labels": self._labels[index]}


def llama(num_layers: int = 2, width: int = 16) -> nn.Module:
    """The same values every time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=num_layers,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=LENGTH, initializer_range=0.2,
        )
    )  # fmt: skip


def bert() -> nn.Module:
    """The same values every time; with dropout."""
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(  # type: ignore[call-arg]  # of all configurations
            vocab_size=TOKENS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=LENGTH, num_labels=CLASSES, initializer_range=0.2,
        )
    )  # fmt: skip


def arguments(folder: str | Path, **given: Any) -> TrainingArguments:
    """Thirty steps of two micro-batches, with warm-up, clipping, and evaluations."""
    settings: dict[str, Any] = {
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no",
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 30, "warmup_steps": 5,
        "learning_rate": 1e-2, "max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 10,
        "per_device_eval_batch_size": 4,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**settings, **given})


def trainer(kind: type[Trainer], model: nn.Module, args: TrainingArguments, *, size: int = 96, **options: Any) -> Any:
    """A trainer of some class over made-up data."""
    classes = CLASSES if isinstance(model, BertForSequenceClassification) else 0
    options.setdefault("train_dataset", Sentences(size, classes=classes))
    options.setdefault("eval_dataset", Sentences(16, 1, classes=classes))
    if issubclass(kind, ZeroFXTrainer):
        options.setdefault("backend", "eager")
    return kind(model=model, args=args, **options)


def history(trained: Any, *names: str) -> dict[str, list[float]]:
    """What a trainer has logged, by name."""
    entries = trained.state.log_history
    return {name: [entry[name] for entry in entries if name in entry] for name in names}


def apart(found: dict[str, list[float]], expected: dict[str, list[float]], bound: float = 1e-5) -> list[str]:
    """Where two histories are further apart than ``bound``, relative."""
    assert found.keys() == expected.keys()
    wrong = [
        f"{len(found[n])} of {n} in the place of {len(expected[n])}" for n in found if len(found[n]) != len(expected[n])
    ]
    return wrong or [
        f"{name} {index}: {mine} in the place of {theirs}"
        for name in found
        for index, (mine, theirs) in enumerate(zip(found[name], expected[name], strict=True))
        if not abs(mine - theirs) <= bound * max(abs(theirs), 0.1)
    ]


@contextmanager
def shapes_may_differ() -> Iterator[None]:
    """While open, a batch of another shape, such as the last of an epoch, may be captured anew."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a batch of another shape is captured", ZeroFXWarning)
        yield


def as_started_by_torchrun() -> None:
    """Tell accelerate, which looks into the environment, of the process group that there is."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
