"""Requests before a step is built: checks that they can be trained, and comparisons of options and machine by ranks."""

from __future__ import annotations

import fnmatch
import os
from dataclasses import replace

import torch
from torch import nn

from zerofx.capture.checks import check_model, check_optimizers, device_of
from zerofx.errors import UsageError, notify
from zerofx.ir.tensor_parts import named_buffers, named_parameters
from zerofx.ir.text import type_text
from zerofx.optimizers import Optimizers, check_supported
from zerofx.options import CompileOptions
from zerofx.runtime.comm.control import Control
from zerofx.scheduler.cost.catalog import machine_of_device
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.probe import memory_bytes, read_kept_machine
from zerofx.scheduler.plan.plan import Plan
from zerofx.settings import Settings
from zerofx.units import first_few


def machine_at_hand(device: torch.device, options: CompileOptions, control: Control) -> Machine:
    """The machine that the options give, or what ``Machine.measure`` has kept of this one, or the built-in row of the
    device, or the plain CPU's: rank 0's.

    A node has at most as many ranks as there are, and as many as ``torchrun`` has started on it where ``options.wire``
    asks where nodes end.
    """
    return control.share(
        "describe the machine", lambda: _machine_here(device, options, control.num_ranks).as_torch_computes()
    )


def measure_machine(device: torch.device, options: CompileOptions, settings: Settings, control: Control) -> Machine:
    """The machine as ``machine_at_hand`` gives it, measured by all ranks together if no measurement is kept."""
    is_known = control.share(
        "look for what was measured",
        lambda: options.machine is not None or read_kept_machine(device, control.num_ranks) is not None,
    )
    if is_known:
        return machine_at_hand(device, options, control)
    drive = str(settings.nvme_dirs[0]) if len(settings.nvme_dirs) == 1 else None
    return control.attempt("measure the machine", lambda: Machine.measure(device, nvme_path=drive).as_torch_computes())


def _machine_here(device: torch.device, options: CompileOptions, num_ranks: int) -> Machine:
    if options.machine is not None:
        return options.machine.for_ranks(num_ranks)
    machine = read_kept_machine(device, num_ranks) or _row_of(device, num_ranks)
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return replace(machine, ranks_per_node=int(local)) if options.wire != "exact" and local.isdigit() else machine


def _row_of(device: torch.device, num_ranks: int) -> Machine:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        row = machine_of_device(properties.name, properties.total_memory)
        if row is not None:
            # Its driver keeps a part of what a device has by its name.
            num_bytes = min(row.device.memory_bytes, properties.total_memory)
            return _limit_host(replace(row, device=replace(row.device, memory_bytes=num_bytes)), num_ranks)
        notify(f"no machine row for {properties.name}: predicted times are an H100's; give machine=Machine.measure()")
        return _limit_host(Machine.named("h100-sxm"), num_ranks)
    return Machine.named("cpu").for_ranks(num_ranks)


def _limit_host(row: Machine, num_ranks: int) -> Machine:
    """The row of a whole server with no more of its host than there is: its GPUs may be lent one by one, each with some
    of the cores, and each rank's updates on the host run in its threads."""
    row = row.for_ranks(num_ranks)
    update = None if row.host.update is None else row.host.update.scale_to_threads(torch.get_num_threads())
    host = replace(row.host, memory_bytes=min(row.host.memory_bytes, memory_bytes()), update=update)
    return replace(row, host=host)


def describe_request(model: nn.Module, optimizers: Optimizers, options: CompileOptions, settings: Settings) -> str:
    """The settings that must be the same on every rank, a line each."""
    lines = options.texts("ranks")
    plan = options.plan
    known = "None" if plan is None else "from a file"
    if isinstance(plan, Plan):
        known = plan.decisions_hash() if plan.pipe == 1 else "of its stage"
    lines.append(f"plan: {known}")
    lines.append(f"ZEROFX_DISABLE: {','.join(sorted(settings.disable))}")
    kernels = "auto" if settings.kernels is None else ",".join(sorted(settings.kernels))
    lines.append(f"ZEROFX_KERNELS: {kernels}")
    for optimizer in optimizers.each:
        lines.append(f"optimizer: {type(optimizer).__name__} with {len(optimizer.param_groups)} param group(s)")
    for kind, tensors in (("parameter", named_parameters(model)), ("buffer", named_buffers(model))):
        for name, tensor in tensors:
            frozen = " frozen" if kind == "parameter" and not tensor.requires_grad else ""
            lines.append(f"{kind} {name}: {type_text(tensor)}{frozen}")
    return "\n".join(lines)


def check_training(model: nn.Module, optimizers: Optimizers, options: CompileOptions, *, on_meta: bool = False) -> None:
    """Check what is to be trained, as far as that can be before anything is captured; ``on_meta`` as in `check_model`.

    Raises:
        ZeroFXError: the model or an optimizer cannot be, or the backend's compiler is missing.
    """
    check_model(model, on_meta=on_meta, in_part=options.weights is not None)
    check_optimizers(model, optimizers)
    for optimizer in optimizers.each:
        check_supported(optimizer)
    options.casts(model)
    _check_kept_gradients(model, options.keep_gradients)
    if options.loss_scale is not None:
        _check_stored(optimizers)
    if options.compiles_regions:
        # Inductor takes seconds to import: only who needs it pays.
        from zerofx.codegen.inductor.cpp import check_compiler

        check_compiler(device_of(model))


def _check_kept_gradients(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Check that what gradients are asked for by name is trained."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    unknown = [pattern for pattern in patterns if not fnmatch.filter(trained, pattern)]
    if unknown:
        raise UsageError(
            f"expected keep_gradients to be names of trained parameters or patterns of names, such as "
            f"('layers.0.weight', '*.bias'), found {first_few(map(repr, unknown))}, which is none of "
            f"{first_few(trained)}"
        )


def _check_stored(optimizers: Optimizers) -> None:
    """Check that gradients are freed of the loss's scale in more than float16, where small ones would be zero again."""
    parameters = [parameter for group in optimizers.param_groups for parameter in group["params"]]
    low = sum(parameter.dtype is torch.float16 for parameter in parameters)
    if low:
        raise UsageError(
            f"expected parameters that are stored in float32 where the loss is scaled, found {low} of "
            f"{len(parameters)} in float16, in which updates cannot be made of unscaled gradients: call model.float() "
            f"before the optimizer is made, and give precision='fp16', which computes in float16 all the same"
        )
