"""Find the loss in what a model returns, and divide a batch between a model and its loss function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from zerofx.batch import Batch
from zerofx.errors import CaptureError

LossFunction = Callable[..., Any]


def find_loss(outputs: Any, *, from_loss_fn: bool = False) -> torch.Tensor:
    """The scalar that training minimises.

    It is ``outputs`` itself, or its ``.loss`` or ``["loss"]``, or the only scalar with a gradient in a tuple or list.

    Raises:
        CaptureError: there is none, or more than one; the message lists what was returned.
    """
    source = "loss_fn" if from_loss_fn else "the model"
    found = _candidate(outputs)
    if isinstance(found, torch.Tensor) and found.numel() == 1 and found.dtype.is_floating_point:
        if not found.requires_grad:
            raise CaptureError(
                f"expected a loss that depends on a trainable parameter, found a scalar from {source} without a "
                f"gradient: check that some parameter has requires_grad=True and that nothing detaches the loss"
            )
        return found if found.dim() == 0 else found.reshape(())
    raise CaptureError(
        f"expected a scalar loss from {source}, found {_describe(outputs)}: return a scalar, an object with .loss, a "
        f'dict with "loss", or give loss_fn=lambda outputs, *batch: ...'
    )


class LossModule(nn.Module):
    """The model followed by its loss, called with the batch's tensors alone.

    ``loss_scope`` opens a context that ``loss_fn`` runs in.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        loss_fn: LossFunction | None,
        num_micro_batches: int,
        loss_scope: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self.model = model
        self._batch = batch
        # In a tuple, a loss that is a module is none of this one's: its buffers are constants of the step.
        self._loss_fn = () if loss_fn is None else (loss_fn,)
        self._num_micro_batches = num_micro_batches
        self._loss_scope = loss_scope

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        loss = self._loss(*self._batch.rebuild(tensors))
        return loss if self._num_micro_batches == 1 else loss / self._num_micro_batches

    def _loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if not self._loss_fn:
            return find_loss(self.model(*args, **kwargs))
        model_args, model_kwargs = split_batch(self.model, args, kwargs)
        outputs = self.model(*model_args, **model_kwargs)
        with self._loss_scope():
            return find_loss(self._loss_fn[0](outputs, *args, **kwargs), from_loss_fn=True)


def split_batch(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The part of a batch that ``model.forward`` accepts: leading positional arguments, and keywords it names.

    With a ``loss_fn`` the batch also holds what only the loss needs, such as targets.
    """
    parameters = list(inspect.signature(model.forward).parameters.values())
    kinds = [p.kind for p in parameters]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    num_args = len(args) if inspect.Parameter.VAR_POSITIONAL in kinds else sum(kind in positional for kind in kinds)
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return tuple(args[:num_args]), dict(kwargs)
    names = {p.name for p in parameters[min(num_args, len(args)) :]}
    return tuple(args[:num_args]), {name: leaf for name, leaf in kwargs.items() if name in names}


def _candidate(outputs: Any) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    if getattr(outputs, "loss", None) is not None:
        return outputs.loss
    if isinstance(outputs, tuple | list):
        scalars = [o for o in outputs if isinstance(o, torch.Tensor) and o.numel() == 1 and o.requires_grad]
        if len(scalars) == 1:
            return scalars[0]
    return None


def _describe(outputs: Any) -> str:
    if isinstance(outputs, torch.Tensor):
        return f"a tensor of shape {list(outputs.shape)} and dtype {outputs.dtype}"
    if isinstance(outputs, Mapping):
        return f"a {type(outputs).__name__} with keys {list(outputs)}"
    if is_dataclass(outputs):
        return f"a {type(outputs).__name__} with fields {[f.name for f in fields(outputs)]}"
    if isinstance(outputs, tuple | list):
        return f"a {type(outputs).__name__} of {[_describe(item) for item in outputs]}"
    return f"a {type(outputs).__name__}"
