"""Guards and watches between a compiled model and its user, which turn misuse into a clear error."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Mapping
from itertools import compress
from typing import Any

import torch
import xxhash
from torch import nn

from zerofx.capture.checks import check_hooks
from zerofx.capture.python_state.columns import Tables, items_of_dicts
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
        self._modules = [_Registered(path, child_table(module)) for path, module in modules]
        self._parameters = [_Registered(path, parameter_table(module)) for path, module in modules]
        self._note()
        named = [each for registered in self._parameters for each in registered.named()]
        self._tensors = {name: tensor for name, tensor in named if tensor is not None}
        self._next_hook: int | None = None  # when no parameter had hooks
        self.renew()

    def _note(self) -> None:
        self._tables = Tables(each.table for each in (*self._modules, *self._parameters))
        self._was_written = False

    def renew(self) -> None:
        """Take the memory that the parameters have now for theirs; which parameters they are stays."""
        with without_torch_functions():  # which parameters that are held have
            self._addresses = list(map(torch.Tensor.data_ptr, self._tensors.values()))

    def check(self) -> None:
        """Raise where something has changed.

        Raises:
            UsageError: names the parameter or module.
        """
        self._was_written = self._was_written or bool(self._tables.take_written())
        replaced = self._replaced() if self._was_written else []
        with without_torch_functions():
            addresses = list(map(torch.Tensor.data_ptr, self._tensors.values()))
        if addresses != self._addresses:
            replaced += compress(self._tensors, map(operator.ne, addresses, self._addresses))
        if replaced:
            raise UsageError(
                f"expected the model's parameters where compile put them, found that {replaced[0]} was replaced or "
                f"moved since (by model.to(), an assignment, load_state_dict(assign=True)): change values in place "
                f"inside `with step.full_parameters(write_back=True):`, or call step.close() before and compile after"
            )
        if (next_hook := number_of_next_hook()) != self._next_hook:
            with without_torch_functions():
                for name, tensor in self._tensors.items():
                    check_hooks(name, tensor)
            self._next_hook = next_hook

    def _replaced(self) -> list[str]:
        """The parameters that were replaced."""
        for each in self._modules:
            for path in each.replaced():
                raise UsageError(
                    f"expected the modules that the step was built with, found that {path} was replaced since: call "
                    f"step.close() before, and compile after"
                )
        for each in self._parameters:
            if len(each.table) != len(each.before):
                raise UsageError(
                    f"expected the parameters that the step was built with, found {len(each.table)} of its own in "
                    f"{each.path or 'the model'}, where there were {len(each.before)}: call step.close() before "
                    f"parameters are registered or deleted, and compile after"
                )
        replaced = [path for each in self._parameters for path in each.replaced()]
        if not replaced:
            self._note()
        return replaced


class _Registered:
    """A table of what is registered in the module ``path``, and what was in it ``before``."""

    def __init__(self, path: str, table: dict[str, Any]) -> None:
        self.path, self.table, self.before = path, table, dict(table)

    def named(self) -> list[tuple[str, Any]]:
        """Registered values with their paths."""
        return [(f"{self.path}.{key}" if self.path else key, value) for key, value in self.before.items()]

    def replaced(self) -> list[str]:
        """The paths of what is not there any more."""
        now = items_of_dicts([self.table] * len(self.before), list(self.before))
        return [path for (path, before), after in zip(self.named(), now, strict=True) if after is not before]


class ModeWatch:
    """Training modes of all modules, as a word that two equal answers share."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """``modules`` are looked into, the model first, each with what the paths in it begin with."""
        named = [(path, part) for root, module in modules.items() for path, part in module.named_modules(prefix=root)]
        self._paths, self._modules = zip(*named, strict=True)
        self._tables = Tables(map(vars, self._modules))
        self._written = [part for part in self._modules if "training" not in vars(part)]
        self._flags: list[bool] | None = None  # of those that were written to
        self._word = ""

    def mode(self) -> str:
        """``"train"``, ``"eval"``, or which modules differ from the model: the first of many, and a hash of all."""
        if tables := set(map(id, self._tables.take_written())):
            self._written += [module for module in self._modules if id(vars(module)) in tables]
        if (now := list(map(_IS_TRAINING, self._written))) != self._flags:
            self._flags, flags = now, list(map(_IS_TRAINING, self._modules))
            word = "train" if flags[0] else "eval"
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
