"""Find the loss in what a model returns, and divide a batch between a model and its loss function."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from zerofx.batch import Batch
from zerofx.errors import CaptureError, UsageError
from zerofx.watched_calls import Checks

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

    ``loss_scope`` opens a context that ``loss_fn`` runs in. Where the forward puts other tensors in the places of its
    buffers (``self.mean = 0.9 * self.mean + ...``), those come behind the loss, in the order of their names in
    ``rebound``; and behind them what it checks of values, as booleans, in the order of their texts in ``checked``.
    ``counts`` has the names of the numbers that a forward changes again when it runs again.
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
        self.rebound: tuple[str, ...] = ()
        self.checked: tuple[str, ...] = ()
        self.counts: tuple[str, ...] = ()
        self._has_run = False

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        held, numbers = _buffers(self.model), _numbers(self.model)
        with _tensors_kept(self.model), Checks() as checks:
            loss = self._loss(*self._batch.rebuild(tensors))
            now = _buffers(self.model)
        if self._has_run:
            self.counts = tuple(sorted(name for name, _ in _numbers(self.model).items() - numbers.items()))
        self._has_run = True
        loss = loss if self._num_micro_batches == 1 else loss / self._num_micro_batches
        rebound = _rebound(held, now)
        self.rebound, self.checked = tuple(rebound), tuple(text for _, text in checks.noted)
        # A copy each: what is put in a buffer's place may be another buffer, or a view.
        others = *(tensor.clone() for tensor in rebound.values()), *(holds for holds, _ in checks.noted)
        return (loss, *others) if others else loss

    def _loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if not self._loss_fn:
            return find_loss(self.model(*args, **kwargs))
        model_args, model_kwargs = split_batch(self.model, args, kwargs)
        outputs = self.model(*model_args, **model_kwargs)
        with self._loss_scope():
            return find_loss(self._loss_fn[0](outputs, *args, **kwargs), from_loss_fn=True)


@contextlib.contextmanager
def _tensors_kept(model: nn.Module) -> Iterator[None]:
    """Tensors that a forward leaves on its modules meanwhile go: they are those that it is traced with.

    All else stays, such as a note of hooks that the first call has registered.
    """
    tables = [table for module in model.modules() for table in (vars(module), module._buffers)]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            for name in [name for name, left in table.items() if isinstance(left, torch.Tensor)]:
                if name in entries:
                    table[name] = entries[name]
                else:
                    del table[name]
            table.update({name: one for name, one in entries.items() if isinstance(one, torch.Tensor)})


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers by all of their names."""
    return dict(model.named_buffers(remove_duplicate=False))


def _numbers(model: nn.Module) -> dict[str, int | float]:
    """The Python numbers that modules have as attributes."""
    return {
        f"{prefix}.{name}".removeprefix("."): number
        for prefix, module in model.named_modules()
        for name, number in vars(module).items()
        if type(number) in (int, float)
    }


def _rebound(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that a forward has put in the places of buffers, by name.

    Raises:
        CaptureError: one is not like the buffer that it stands in for.
    """
    changed = {name: after.get(name) for name, buffer in before.items() if after.get(name) is not buffer}
    found = {}
    for name, tensor in changed.items():
        buffer = before[name]
        if tensor is None or tensor.shape != buffer.shape or tensor.dtype != buffer.dtype or tensor.requires_grad:
            what = "nothing" if tensor is None else _describe(tensor)
            raise CaptureError(
                f"expected a forward that leaves each buffer its shape and dtype, and no gradient, found that it puts "
                f"{what}{' with a gradient' if tensor is not None and tensor.requires_grad else ''} in the place of "
                f"{name}, {_describe(buffer)}: detach() what a buffer is to hold, and give it its full size at first, "
                f"as a call of the model before zerofx.compile may do"
            )
        others = [other for other in before if other != name and before[other] is buffer]
        if others:
            raise CaptureError(
                f"expected a forward that leaves buffers that share a tensor as they are, found that it puts another "
                f"in the place of {name}, which is {', '.join(others)} too: change it in place, or give each its own"
            )
        found[name] = tensor
    return found


def split_batch(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The part of a batch that ``model.forward`` accepts: leading positional arguments, and keywords it names.

    With a ``loss_fn`` the batch also holds what only the loss needs, such as targets.

    Raises:
        UsageError: how many positional arguments are the model's cannot be told: behind those that it needs it takes
            others, such as a mask, in whose place targets would train something else without a word.
    """
    parameters = list(inspect.signature(model.forward).parameters.values())
    kinds = [p.kind for p in parameters]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = inspect.Parameter.VAR_POSITIONAL in kinds
    most = len(args) if takes_any else min(len(args), len(positional))
    needed = max(1, sum(p.default is p.empty and p.name not in kwargs for p in positional))
    if len(args) > needed and most > needed:
        further = [p.name for p in positional[needed:most]] or ["what *args takes"]
        raise UsageError(
            f"expected to know which arguments of step() are for the loss alone, found {len(args)} by position and a "
            f"{type(model).__name__}.forward that needs {needed} and also takes {', '.join(further)}: pass by name "
            f"what loss_fn alone is to get, step(inputs, targets=targets), under one that forward does not have; and "
            f"what forward is to get besides under the one that it has there"
        )
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return tuple(args[:most]), dict(kwargs)
    names = {p.name for p in parameters[most:]}
    return tuple(args[:most]), {name: leaf for name, leaf in kwargs.items() if name in names}


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
