"""Comparisons between ranks before a step is built: the machine that is planned for, and the options."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import nn

from zerofx.errors import notify
from zerofx.ir.tensor_parts import named_buffers, named_parameters
from zerofx.ir.text import type_text
from zerofx.optimizers import Optimizers
from zerofx.options import CompileOptions
from zerofx.runtime.comm.control import Control
from zerofx.scheduler.cost.catalog import machine_of_device
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.probe import memory_bytes, read_kept_machine
from zerofx.scheduler.plan.plan import Plan
from zerofx.settings import Settings


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
    lines.append(f"plan: {plan.decisions_hash() if isinstance(plan, Plan) else 'from a file' if plan else None}")
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
