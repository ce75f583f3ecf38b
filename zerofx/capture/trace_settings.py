"""Settings of the process that a trace depends on."""

from __future__ import annotations

import platform

import torch

from zerofx.torch_private.capture import aot_configuration
from zerofx.torch_private.dispatch import default_device_type, flags_of_libraries


def trace_settings() -> tuple[str, ...]:
    """Texts of all that tracing may depend on besides the model, its batch and installed versions."""
    kinds = ("cpu", "cuda")
    return (
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        aot_configuration(),
        f"{torch.get_default_dtype()} {default_device_type()}",
        f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()}",
        f"autocast {[(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]}",
        _kernel_settings(),
        torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
    )


def per_call_settings() -> dict[str, str]:
    """Settings that programs change from call to call, under names of two words each."""
    autocast = [
        f"{torch.get_autocast_dtype(kind)} on {kind}" for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    ]
    defaults = {"default dtype": str(torch.get_default_dtype()), "default device": default_device_type()}
    return {**defaults, "autocast to": ", ".join(autocast) or "none", "choice of kernels": _kernel_settings()}


def _kernel_settings() -> str:
    """The settings by which torch chooses kernels, and which a forward may query."""
    deterministic, libraries = flags_of_libraries()
    precision = torch.get_float32_matmul_precision()
    processor = torch.backends.cpu.get_cpu_capability()  # oneDNN's kernels keep what they need for it
    return f"deterministic {deterministic}, libraries {libraries}, float32 products {precision}, for {processor}"
