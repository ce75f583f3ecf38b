"""Requirements on a model, an optimizer and a batch, checked before anything is captured or changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerofx.capture.objective.loss import ForwardFunction, LossFunction
from zerofx.deferred import DeferredTensor
from zerofx.errors import OptimizerError, UsageError, warn
from zerofx.ir.batch import Batch
from zerofx.ir.tensor_parts import check_frozen, named_buffers, named_parameters
from zerofx.optimizers import Optimizers
from zerofx.precision import dtype_name
from zerofx.torch_private.modules import compiles_calls, is_compiled
from zerofx.torch_private.optimizers import is_set_up, step_hooks
from zerofx.torch_private.tensors import has_hooks
from zerofx.units import first_few

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def check_model(model: nn.Module, *, on_meta: bool = False, in_part: bool = False) -> None:
    """Refuse a model that cannot be captured as it stands. ``on_meta``: a model on ``meta`` is fine, and one of which a
    part is there if ``in_part`` says so, which gets values where the others are.

    Raises:
        UsageError: the model is wrapped, compiled, sharded already, on ``meta``, on several devices, has nothing to
            train, or has something else in the memory of what it trains.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected an nn.Module, found {type(model).__name__}")
    for path, module in model.named_modules():
        _check_module(path, module)
    for name, tensor in (*named_parameters(model), *named_buffers(model)):
        _check_tensor(name, tensor, on_meta=on_meta)
    for name, whole in model.named_parameters():
        check_frozen(name, whole)
    _check_memory(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            f"expected a model with a parameter to train, found none with requires_grad=True among "
            f"{len(list(model.parameters()))} in {type(model).__name__}"
        )
    devices: dict[torch.device, str] = {}
    for name, parameter in named_parameters(model):
        if not (in_part and parameter.is_meta):
            devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        listed = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise UsageError(
            f"expected a model on one device, found {listed}: move it with model.to(device); stage=3 divides it over "
            f"ranks"
        )


def _check_module(path: str, module: nn.Module) -> None:
    where = f" at {path}" if path else ""
    kind = type(module).__name__
    if isinstance(module, _WRAPPERS):
        raise UsageError(
            f"expected a plain module, found {kind}{where}: give zerofx the module inside (model.module); the step "
            f"itself runs on all ranks"
        )
    if is_compiled(module):
        raise UsageError(
            f"expected a plain module, found one compiled by torch.compile{where}: give zerofx the module inside "
            f"(model._orig_mod); backend='inductor' compiles the whole step"
        )
    if compiles_calls(module):
        raise UsageError(
            f"expected a plain module, found {kind}{where} on which .compile() was called: build the model without it; "
            f"backend='inductor' compiles the whole step"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise UsageError(
            f"expected a module in Python, found {kind}{where}: give zerofx the model before torch.jit.script or trace"
        )
    if type(module).__module__.startswith("torch.distributed.fsdp"):
        raise UsageError(f"expected a plain module, found {kind}{where}: give zerofx the module without FSDP")
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
        raise UsageError(
            f"expected dense gradients, found {kind}(sparse=True){where}: build it with sparse=False; gradients are "
            f"reduced as flat buffers"
        )


def check_hooks(name: str, tensor: torch.Tensor) -> None:
    """Check that a parameter has no hooks on its gradient.

    Raises:
        UsageError: it has.
    """
    if has_hooks(tensor):
        raise UsageError(
            f"expected parameters without hooks of their own, found one on {name}: its gradient is summed over ranks "
            f"and used within the step, where no hook runs; remove it, and change the gradient in the model "
            f"(an autograd function around the parameter) or with max_grad_norm"
        )


def _check_tensor(name: str, tensor: torch.Tensor, *, on_meta: bool) -> None:
    if nn.parameter.is_lazy(tensor):
        raise UsageError(
            f"expected parameters that have their shapes, found that {name} is not initialized: call the lazy model "
            f"once with a batch, and build the optimizer after that"
        )
    if type(tensor.data) not in (torch.Tensor, DeferredTensor):
        hint = "an undivided model; zerofx does the sharding" if type(tensor.data).__name__ == "DTensor" else "a tensor"
        raise UsageError(
            f"expected plain tensors for parameters and buffers, found that {name} is a {type(tensor.data).__name__}: "
            f"give zerofx {hint}"
        )
    check_hooks(name, tensor)
    if tensor.is_meta and not on_meta:
        raise UsageError(
            f"expected a model whose parameters have values, found {name} on the meta device: give them values "
            f"(model.to_empty(device=...), then initialize or load them), or build the model inside "
            f"zerofx.empty_init(); zerofx.plan works on meta"
        )
    if tensor.layout is not torch.strided:
        raise UsageError(f"expected dense parameters, found that {name} has layout {tensor.layout}: use to_dense()")


def _check_memory(model: nn.Module) -> None:
    pair = find_overlap(model, {name for name, parameter in model.named_parameters() if parameter.requires_grad})
    if pair is not None:
        raise UsageError(
            f"expected parameters with memory of their own, found that {pair[0]} and {pair[1]} share some, of which a "
            f"step would train one and leave the other as it was: make them one parameter (b.weight = a.weight), "
            f"compute one from the other in forward, or clone() one"
        )


def device_of(model: nn.Module) -> torch.device:
    """The device a model is trained on: that of its parameters, or for those on ``meta`` the accelerator, if any."""
    _, first = next(named_parameters(model))
    device = first.device
    if device.type != "meta":
        return device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def check_optimizers(model: nn.Module, optimizers: Optimizers) -> None:
    """Check that these are optimizers, over parameters of this model alone, and that existing states have values.

    Raises:
        OptimizerError: one is not, or has a parameter that another has.
    """
    for optimizer in optimizers.each:
        _check_set_up(optimizer)
    check_owner(model, optimizers)
    for optimizer in optimizers.each:
        check_step_hooks(optimizer)
        _check_states(optimizer)


def _check_set_up(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"expected a torch.optim.Optimizer such as torch.optim.AdamW(model.parameters()), found "
            f"{type(optimizer).__name__}"
        )
    if not is_set_up(optimizer):
        raise OptimizerError(
            f"expected an optimizer that torch.optim.Optimizer.__init__ has set up, found {type(optimizer).__name__}, "
            f"whose own does not call it: give zerofx.compile the optimizer that it wraps, or call "
            f"super().__init__(params, defaults) there"
        )


def _check_states(optimizer: torch.optim.Optimizer) -> None:
    for states in optimizer.state.values():
        for name, value in states.items() if isinstance(states, Mapping) else ():
            if isinstance(value, DeferredTensor) or (isinstance(value, torch.Tensor) and value.is_meta):
                raise OptimizerError(
                    f"expected an optimizer whose states have values, found a {name} of shape {list(value.shape)} that "
                    f"has none: it was stepped before the model had values; build a fresh one over its parameters"
                )


def refuse_step(*_: object) -> None:
    """The hook that a step registers on its optimizer.

    Raises:
        UsageError: the optimizer is stepped by hand.
    """
    raise UsageError(
        "expected no call of optimizer.step(): step(batch) has already updated the parameters; remove the call (and "
        "loss.backward())"
    )


def check_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer has no hooks on its step but ``refuse_step``.

    Raises:
        OptimizerError: it has.
    """
    hooks = [hook for hook in step_hooks(optimizer) if hook is not refuse_step]
    if hooks:
        raise OptimizerError(
            f"expected an optimizer without hooks on its step, found {len(hooks)}: step(batch) updates without a call "
            f"of optimizer.step(); remove them, and do before or after step(batch) what they do"
        )


def check_loss_function(loss_fn: LossFunction | None) -> None:
    """Refuse a loss that would train parameters of its own.

    Raises:
        UsageError: names them.
    """
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise UsageError(f"expected loss_fn to be a module or a function, found a class: give {loss_fn.__name__}()")
    if isinstance(loss_fn, nn.Module):
        trained = [name for name, parameter in loss_fn.named_parameters() if parameter.requires_grad]
        if trained:
            raise UsageError(
                f"expected a loss_fn without parameters to train, found {first_few(trained)} in "
                f"{type(loss_fn).__name__}: make it a part of the model, which then returns its loss"
            )


def check_forward_function(forward: ForwardFunction | None) -> None:
    """Refuse a module or a class in the place of a function.

    Raises:
        UsageError: says what it is.
    """
    if isinstance(forward, nn.Module | type):
        raise UsageError(
            f"expected forward to be a function forward(model, *batch) that gives the loss, found "
            f"{forward.__name__ if isinstance(forward, type) else 'a ' + type(forward).__name__}: the model itself is "
            f"the first argument of compile"
        )


def check_batch(model: nn.Module, batch: Batch) -> None:
    """Check that a batch is where the model is, and carries no graph.

    Raises:
        UsageError: names the tensor.
    """
    _, first = next(named_parameters(model))
    device = first.device
    for name, tensor in zip(batch.names, batch.tensors, strict=True):
        if tensor.device != device:
            raise UsageError(
                f"expected the batch on {device} like the model's parameters, found {name} on {tensor.device}: move it "
                f"with .to({str(device)!r})"
            )
        if tensor.requires_grad:
            raise UsageError(
                f"expected a batch without gradients, found that {name} requires one: detach() it, or make what "
                f"computes it a part of the model"
            )
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise UsageError(f"expected plain tensors in a batch, found that {name} is a {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise UsageError(f"expected dense tensors in a batch, found that {name} has layout {tensor.layout}")


def misfits(missing: Sequence[str], unexpected: Sequence[str], other: Sequence[str]) -> str:
    """The differences between a model's tensors and the saved ones, in words; empty if there are none."""
    kinds = (("missing", missing), ("that the model has not", unexpected), ("of another shape", other))
    return ", ".join(f"{len(listed)} {what} ({first_few(listed)})" for what, listed in kinds if listed)


def fits(shape: tuple[int, ...], dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    """True if a saved tensor of this shape and dtype can be loaded into ``tensor``."""
    alike = dtype == tensor.dtype or (dtype.is_floating_point and tensor.is_floating_point())
    return shape == tuple(tensor.shape) and alike


def warn_of_rounding(what: str, stored: Mapping[str, torch.dtype], tensors: Mapping[str, torch.Tensor]) -> None:
    """Warn where the dtypes of a model's ``tensors`` cannot hold the ``stored`` values of the same names."""
    rounded: dict[tuple[torch.dtype, torch.dtype], str] = {}
    for name, dtype in stored.items():
        own = tensors[name].dtype
        if torch.promote_types(dtype, own) != own:
            rounded.setdefault((dtype, own), name)
    for (dtype, own), name in rounded.items():
        warn(f"{what} are rounded from {dtype_name(dtype)} to the model's {dtype_name(own)}, as {name} is")


def check_owner(model: nn.Module, optimizers: Optimizers) -> None:
    """Check that every tensor in the param groups is a parameter of the model, and in those of one optimizer.

    Raises:
        OptimizerError: one is not; the message says which.
    """
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    holders: dict[int, int] = {}
    places = optimizers.places()
    for (at, index), group in zip(places, optimizers.param_groups, strict=True):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise OptimizerError(
                    f"expected an optimizer over the model's parameters, found a tensor of shape "
                    f"{list(parameter.shape)} in param group {index} (number {position}) of "
                    f"{type(optimizers.each[at]).__name__} that is not one: build the optimizer from "
                    f"model.parameters() of the model given to compile"
                )
            if holders.setdefault(id(parameter), at) != at:
                both = " and ".join(
                    f"{type(optimizers.each[index]).__name__} (number {index})"
                    for index in (holders[id(parameter)], at)
                )
                raise OptimizerError(
                    f"expected optimizers that train different parameters, found {known[id(parameter)]} in both {both} "
                    f"of the list: leave it to one of them"
                )


def find_overlap(model: nn.Module, changed: Collection[str]) -> tuple[str, str] | None:
    """The names of two parameters or buffers that share memory, of which one is among those that are ``changed``.

    A tensor that is both counts as two.
    """
    spans = []
    for name, tensor in (*named_parameters(model), *named_buffers(model)):
        if type(tensor.data) is torch.Tensor and not tensor.is_meta and tensor.numel():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size(), name, tensor))
    last = last_changed = (0, 0, "", torch.empty(0, device="cpu"))  # of those that begin before, what ends last
    for span in sorted(spans, key=lambda span: span[:3]):
        start, end, name, tensor = span
        _, other_end, other_name, other = last if name in changed else last_changed
        if start < other_end and _share_elements(tensor, other):
            return other_name, name
        last = span if end > last[1] else last
        last_changed = span if name in changed and end > last_changed[1] else last_changed
    return None


def _share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if tensors that overlap have bytes in common; columns of one matrix have none."""
    storage = a.untyped_storage()
    if storage.data_ptr() != b.untyped_storage().data_ptr():
        return True
    marks = torch.zeros(storage.nbytes(), dtype=torch.bool, device="cpu")

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.element_size()
        strides = (*(size * stride for stride in tensor.stride()), 1)
        return marks.as_strided((*tensor.shape, size), strides, tensor.data_ptr() - storage.data_ptr())

    bytes_of(a).fill_(True)
    return bool(bytes_of(b).any())
