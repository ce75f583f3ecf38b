"""The table of zerofx's own CUDA kernels that a step may use, what turns each on, and why.

Those for CPUs are in ``codegen/cpu/extras.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch

from zerofx.codegen.cpu.extras import CPU_KERNELS, cpu_kernels_in_use
from zerofx.errors import UsageError


@dataclass(frozen=True)
class Kernel:
    """One entry of the table: a kernel in Triton.

    ``instead_of`` is what runs where it is not used. ``is_default``: whether compiled steps on CUDA use it without
    being asked to; ``reason`` says why, or why not.
    """

    name: str
    does: str
    instead_of: str
    is_default: bool
    reason: str


UPDATE = "update"
LOSS = "loss"

KERNELS = (
    Kernel(
        UPDATE,
        "a bucket's update: unscaling, casts, the optimizer's arithmetic and the copy in low precision, in one pass",
        "torch's fused optimizer, or the operators of one that has no fused kernel, each a pass of its own",
        True,
        "torch's fused kernels neither take a gradient in another dtype than the master's nor write the copy",
    ),
    Kernel(
        LOSS,
        "tiles of classes for the loss: no logits, and no sum of the weight's gradient, ever exist whole",
        "tiles of rows, which sum the weight's gradient up in float32",
        True,
        "it is one more way to fit a memory_budget, taken only where the plan is faster for it",
    ),
)
_IN_TRITON = frozenset(kernel.name for kernel in KERNELS)
_DEFAULT = frozenset(kernel.name for kernel in KERNELS if kernel.is_default)
_NAMES = _IN_TRITON | CPU_KERNELS


def check_kernels(chosen: frozenset[str] | None) -> None:
    """Check the names in ``ZEROFX_KERNELS``.

    Raises:
        UsageError: one of them is no kernel's.
    """
    unknown = (chosen or frozenset()) - _NAMES
    if unknown:
        raise UsageError(
            f"expected ZEROFX_KERNELS to be auto, none, or names of kernels ({', '.join(sorted(_NAMES))}), found "
            f"{', '.join(sorted(unknown))}"
        )


def kernels_in_use(chosen: frozenset[str] | None, device: torch.device) -> frozenset[str]:
    """The kernels that a compiled step on ``device`` uses.

    Args:
        chosen: those that ``ZEROFX_KERNELS`` names; None for those that are on by default.
        device: where the step runs. Those for CUDA are Triton's, which runs them on a CPU too, slowly, where
            ``TRITON_INTERPRET`` is set, and only those that are chosen for by name.
    """
    own = cpu_kernels_in_use(chosen) if device.type == "cpu" else frozenset[str]()
    in_triton = _IN_TRITON & chosen if chosen is not None else _DEFAULT if device.type == "cuda" else frozenset[str]()
    return own | in_triton if in_triton and _runs_triton(device) else own


def _runs_triton(device: torch.device) -> bool:
    if find_spec("triton") is None:
        return False
    return device.type == "cuda" or bool(import_module("triton").knobs.runtime.interpret)
