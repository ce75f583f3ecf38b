"""The tensors that a step is called with, by the names of its placeholders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerofx.capture.free_tensors.free_tensors import FreeTensors
from zerofx.capture.free_tensors.shared_model import SharedModel
from zerofx.ir.batch import Batch, micro_batch
from zerofx.ir.casts import cast_of
from zerofx.ir.facts import Placeholder, Role, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import micro_batches_of
from zerofx.ir.tensor_parts import named_buffers, named_parameters
from zerofx.precision import dtype_named
from zerofx.runtime.state.bucket_state import BucketState
from zerofx.runtime.state.loss_scaler import LossScaler
from zerofx.runtime.state.state import TrainingState


@dataclass(frozen=True)
class StepArguments:
    """The arguments of a step: what its placeholders stand for, by name, and its constants by theirs."""

    placeholders: Mapping[str, Placeholder]
    constants: Mapping[str, torch.Tensor]
    num_micro_batches: int
    num_before: int = 1  # bodies of the graph before its loop

    @staticmethod
    def of(step: StepGraph) -> StepArguments:
        """Those of a step after all passes."""
        named = {node.name: placeholder(node) for node in step.placeholders()}
        return StepArguments(named, step.constants, step.num_micro_batches, step.num_before)


@dataclass(frozen=True)
class Loans:
    """State that a step reads of models which other steps train: their tensors, and the states of those taken over."""

    lent: tuple[SharedModel, ...]
    states: tuple[TrainingState, ...]

    @property
    def buckets(self) -> Iterator[BucketState]:
        """Those after the step's own."""
        return (bucket for state in self.states for bucket in state.buckets)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers, and parameters where no bucket has them, by their names in the step that reads them."""
        for lent in self.lent:
            for name, buffer in named_buffers(lent.model):
                yield lent.full_name(name), buffer
            for name, parameter in () if lent.in_buckets else named_parameters(lent.model):
                held = parameter.detach().to(cast_of(parameter, lent.held_in))
                yield lent.full_name(name), held.to(cast_of(parameter, lent.compute_dtype))


def state_tensors(
    step: StepArguments,
    model: nn.Module,
    state: TrainingState,
    outside: FreeTensors,
    scaler: LossScaler | None,
    loans: Loans,
) -> dict[str, Any]:
    """Parameters, optimizer states, buffers, constants, the loss's scale, and what is used outside of the model as it
    is now: what stays between steps. ``loans``: what other steps have of it."""
    lent = dict(loans.tensors())
    buffers, buckets = dict(named_buffers(model)) | lent, [*state.buckets, *loans.buckets]
    tensors: dict[str, Any] = {}
    for name, facts in step.placeholders.items():
        if facts.role is Role.BUFFER:
            tensors[name] = buffers[facts.name]
        elif facts.role is Role.CONSTANT:
            constant = step.constants[facts.name]
            # What another rank has captured is on that rank's device.
            tensors[name] = constant if constant.device.type == "cpu" else constant.to(state.device)
        elif facts.role is Role.OUTSIDE:
            tensors[name] = lent[facts.name] if facts.name in lent else outside.tensor(facts.name)
        elif facts.role is Role.RANK:
            tensors[name] = torch.full((1,), state.number_along(facts.name), device=state.device)
        elif facts.role is Role.HOST_RANK:
            tensors[name] = torch.tensor(state.number_along(facts.name), device="cpu")
        elif facts.role is Role.LOSS_SCALE:
            assert scaler is not None, "a step whose loss is scaled has a scale"
            tensors[name] = scaler.tensor(dtype_named(facts.name), state.device)
        elif facts.bucket is not None:
            tensors[name] = buckets[facts.bucket].value(facts.role, facts.name)
    return tensors


def batch_tensors(step: StepArguments, batch: Batch, compute_dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The batch's tensors, or the parts of them that are micro-batches; floating-point ones cast to ``compute_dtype``
    if there is one. Of a loop over micro-batches each round has its own, whose number is part of the key."""
    by_name = dict(zip(batch.names, batch.tensors, strict=True))
    tensors = {}
    for name, facts in step.placeholders.items():
        if facts.role is not Role.INPUT:
            continue
        whole = by_name[facts.name].detach()
        cast = compute_dtype is not None and whole.is_floating_point()
        for key, part in _parts(name, facts.part, step):
            tensor = whole if part is None else micro_batch(whole, part, step.num_micro_batches)
            tensors[key] = tensor.to(compute_dtype) if cast else tensor
    return tensors


def _parts(name: str, body: int | None, step: StepArguments) -> Iterator[tuple[str, int | None]]:
    """Keys of the batch tensor that a placeholder in a body stands for, each with its micro-batch."""
    of_body = [None] if body is None else micro_batches_of(body, step.num_micro_batches, step.num_before)
    for turn, part in enumerate(of_body):
        yield f"{name}[{turn}]" if len(of_body) > 1 else name, part
