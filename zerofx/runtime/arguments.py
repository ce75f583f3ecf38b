"""The tensors that a step is called with, by the names of its placeholders."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zerofx.batch import Batch, micro_batch
from zerofx.graph import StepGraph
from zerofx.node_facts import Role, placeholder
from zerofx.runtime.state import TrainingState


def state_tensors(step: StepGraph, model: nn.Module, state: TrainingState) -> dict[str, Any]:
    """Parameters, optimizer states, buffers and constants: what stays between steps."""
    buffers = dict(model.named_buffers())
    tensors: dict[str, Any] = {}
    for node in step.placeholders():
        what = placeholder(node)
        if what.role is Role.BUFFER:
            tensors[node.name] = buffers[what.name]
        elif what.role is Role.CONSTANT:
            tensors[node.name] = step.constants[what.name]
        elif what.bucket is not None:
            tensors[node.name] = state.buckets[what.bucket].value(what.role, what.name)
    return tensors


def batch_tensors(step: StepGraph, batch: Batch, compute_dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The batch's tensors, or the parts of them that are micro-batches; floating-point ones cast to ``compute_dtype``
    if there is one."""
    by_name = dict(zip(batch.names, batch.tensors, strict=True))
    found = {}
    for node in step.placeholders(Role.INPUT):
        what = placeholder(node)
        given = by_name[what.name].detach()
        if what.part is not None:
            given = micro_batch(given, what.part, step.num_micro_batches)
        cast = compute_dtype is not None and given.is_floating_point()
        found[node.name] = given.to(compute_dtype) if cast else given
    return found
