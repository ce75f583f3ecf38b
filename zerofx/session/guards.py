"""What stands between a compiled model and its user: guards and watches that turn misuse into a clear error."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from typing import Any

import torch
import xxhash
from torch import nn

from zerofx.capture.checks import check_hooks
from zerofx.capture.python_state.columns import Column, items_of_dicts
from zerofx.errors import ShardedParametersError, UsageError, warn
from zerofx.torch_private.dispatch import without_torch_functions
from zerofx.torch_private.modules import child_table, number_of_next_hook, parameter_table
from zerofx.units import first_few

_IS_TRAINING = operator.attrgetter("training")


class Guard:
    """A module hook that refuses while ``is_open()`` is false. In a copy of the module it lets everything pass."""

    def __init__(self, is_open: Callable[[], bool] | None, expected: str, instead: str) -> None:
        self._is_open, self._expected, self._instead = is_open, expected, instead

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self._refuse(self._expected.format(type(module).__name__))

    def _refuse(self, expected: str) -> None:
        if self._is_open is not None and not self._is_open():
            raise ShardedParametersError(
                f"expected {expected} where the parameters are whole, found them held by the compiled step: "
                f"{self._instead}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        self._refuse("a copy of the model to be made")
        return Guard(None, "", "")

    def __reduce__(self) -> tuple[Any, ...]:
        self._refuse("the model to be pickled")
        return Guard, (None, "", "")


def guard_model(model: nn.Module, is_open: Callable[[], bool], instead: str = "") -> list[Any]:
    """Refuse to call, save, load, copy or pickle a model whose own parameters hold no values; returns the handles.

    ``instead`` says what to do where no step has them any more.
    """
    whole = "inside `with step.full_parameters():` (on every rank)"
    forward = Guard(is_open, "{} to be called", instead or f"call it {whole}")
    save = Guard(is_open, "state_dict() to be called", instead or f"use step.full_state_dict(), or call it {whole}")
    load = Guard(
        is_open,
        "load_state_dict() to be called",
        instead or "call it inside `with step.full_parameters(write_back=True):`",
    )
    handles: list[Any] = []
    for module in model.modules():
        if module is model or parameter_table(module):
            handles += [
                module.register_forward_pre_hook(forward),
                module.register_state_dict_pre_hook(save),
                module.register_load_state_dict_pre_hook(load),
            ]
    return handles


class ParameterWatch:
    """Notices parameters that were registered, replaced, moved or given hooks meanwhile, and modules replaced."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.named_modules())
        self._parameters, self._names = _column((path, parameter_table(module)) for path, module in modules)
        self._modules, self._paths = _column((path, child_table(module)) for path, module in modules)
        self._tables = [parameter_table(module) for _, module in modules]
        self._sizes, self._owners = list(map(len, self._tables)), [path for path, _ in modules]
        self._tensors = {
            name: tensor
            for name, tensor in zip(self._names, self._parameters.values, strict=True)
            if tensor is not None
        }
        self._next_hook: int | None = None  # when no parameter had hooks
        self.renew()

    def renew(self) -> None:
        """Take the memory that the parameters have now for theirs; which parameters they are stays."""
        self._addresses = _addresses(self._tensors.values())

    def check(self) -> None:
        """Raise where something has changed.

        Raises:
            UsageError: names the parameter or module.
        """
        for position, _ in self._modules.differences():
            raise UsageError(
                f"expected the modules that the step was built with, found that {self._paths[position]} was replaced "
                f"since: call step.close() before, and compile after"
            )
        sizes = list(map(len, self._tables))
        if sizes != self._sizes:
            differ = map(operator.ne, sizes, self._sizes)
            now, before, owner = next(compress(zip(sizes, self._sizes, self._owners, strict=True), differ))
            raise UsageError(
                f"expected the parameters that the step was built with, found {now} of its own in "
                f"{owner or 'the model'}, where there were {before}: call step.close() before parameters are "
                f"registered or deleted, and compile after"
            )
        changed = [self._names[position] for position, _ in self._parameters.differences()]
        addresses = _addresses(self._tensors.values())
        if addresses != self._addresses:
            changed += compress(self._tensors, map(operator.ne, addresses, self._addresses))
        if changed:
            raise UsageError(
                f"expected the model's parameters where compile put them, found that {changed[0]} was replaced or "
                f"moved since (by model.to(), an assignment, load_state_dict(assign=True)): change values in place "
                f"inside `with step.full_parameters(write_back=True):`, or call step.close() before and compile after"
            )
        if (next_hook := number_of_next_hook()) != self._next_hook:
            with without_torch_functions():  # which parameters that are held have
                for name, tensor in self._tensors.items():
                    check_hooks(name, tensor)
            self._next_hook = next_hook


def _column(tables: Iterable[tuple[str, dict[str, Any]]]) -> tuple[Column, list[str]]:
    """All that is registered in tables of modules, which are given by path, and what each of it is called."""
    items = [(path, own, key) for path, own in tables for key in own]
    values = [own[key] for _, own, key in items]
    column = Column(items_of_dicts, [own for _, own, _ in items], [key for _, _, key in items], values)
    return column, [f"{path}.{key}" if path else key for path, _, key in items]


def _addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    with without_torch_functions():  # which parameters that are held have
        return list(map(torch.Tensor.data_ptr, tensors))


class ModeWatch:
    """Which modules are in training mode, as a word that two equal answers share."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """``modules`` are looked into, the model first, each with what the paths in it begin with."""
        named = [(path, part) for root, module in modules.items() for path, part in module.named_modules(prefix=root)]
        self._paths, self._modules = zip(*named, strict=True)
        self._flags, self._word = list[bool](), ""

    def mode(self) -> str:
        """``"train"``, ``"eval"``, or which modules differ from the model: the first of many, and a hash of all."""
        flags = list(map(_IS_TRAINING, self._modules))
        if flags != self._flags:
            self._flags, word = flags, "train" if flags[0] else "eval"
            other = "eval" if flags[0] else "train"
            differ = [path for path, flag in zip(self._paths, flags, strict=True) if flag is not flags[0]]
            few = first_few(differ)
            if few != ", ".join(differ):
                few += f" (hash {xxhash.xxh3_64_hexdigest(','.join(differ).encode(errors='surrogatepass'))[:8]})"
            self._word = f"{word}, but {other} in {few}" if differ else word
        return self._word


class LossWatch:
    """Notices a loss that is not finite: on a CPU at once, on a GPU as soon as its value is there, without waiting."""

    def __init__(self) -> None:
        self._pending: deque[tuple[int, torch.Tensor, Any]] = deque()
        self._was_finite = True

    def add(self, number: int, loss: torch.Tensor) -> None:
        """Watch the loss of step ``number``, shape ``[]``."""
        if loss.device.type == "cuda":
            value = torch.empty((), dtype=loss.dtype, pin_memory=True, device="cpu").copy_(loss, non_blocking=True)
            arrived: Any = torch.cuda.Event()
            arrived.record()
            self._pending.append((number, value, arrived))
        else:
            self._pending.append((number, loss, None))

    def warn(self, rank: int, *, wait: bool = False) -> None:
        """Warn of the steps that turned from a finite loss to one that is not, as far as known by now.

        ``wait``: for values that have not arrived yet.
        """
        while self._pending:
            number, value, arrived = self._pending[0]
            if arrived is not None and not arrived.query():
                if not wait:
                    break
                arrived.synchronize()
            self._pending.popleft()
            is_finite = bool(value.isfinite())
            if self._was_finite and not is_finite:
                warn(
                    f"the loss is {float(value)} on rank {rank} in step {number}; the update with its gradients has "
                    f"been done. Lower the learning rate, or look for an overflow"
                )
            self._was_finite = is_finite
