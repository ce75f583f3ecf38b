"""The table of zerofx's own kernels: what turns each on, which a step uses, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from zerofx.errors import UsageError
from zerofx.ir import ops
from zerofx.ir.op_kernels import attention, products


@dataclass(frozen=True)
class Kernel:
    """One entry of the table.

    ``instead_of`` is what runs where it is not used; ``device_type`` is where it runs. ``is_default``: whether compiled
    steps there use it without being asked to; ``reason`` says why, or why not.
    """

    name: str
    does: str
    instead_of: str
    device_type: str
    is_default: bool
    reason: str


UPDATE = "update"
LOSS = "loss"
WIRE = "wire"
ATTENTION = attention.KERNEL
PRODUCTS = products.KERNEL
NORMS = "norms"

KERNELS = (
    Kernel(
        UPDATE,
        "a bucket's update: unscaling, casts, the optimizer's arithmetic and the copy in low precision, in one pass",
        "torch's fused optimizer, or the operators of one that has no fused kernel, each a pass of its own",
        "cuda",
        True,
        "torch's fused kernels neither take a gradient in another dtype than the master's nor write the copy",
    ),
    Kernel(
        LOSS,
        "tiles of classes for the loss: no logits, and no sum of the weight's gradient, ever exist whole",
        "tiles of rows, which sum the weight's gradient up in float32",
        "cuda",
        True,
        "it is one more way to fit a memory_budget, taken only where the plan is faster for it",
    ),
    Kernel(
        WIRE,
        "rounding to few bits for the wire, and back, in one pass each, with sums in the order of the ranks",
        "what Inductor makes of the same arithmetic",
        "cuda",
        False,
        "Inductor fuses most of it, and which is faster has not been measured",
    ),
    Kernel(
        NORMS,
        "the sum of squares of a bucket's gradients for max_grad_norm: all rows in one launch, their sum in another",
        "torch's vector_norm and sums, some launches for each 4 million gradients",
        "cuda",
        False,
        "torch's reads each gradient once and holds no copy either, and what launches cost has not been measured",
    ),
    Kernel(
        ATTENTION,
        "attention in float32 and its gradients, on operands that are packed once for a block of scores",
        "ATen's, which takes each product of blocks through a BLAS",
        "cpu",
        True,
        "it takes 0.5 to 0.9 of ATen's time under a causal mask, given as a tensor or not, and is as exact",
    ),
    Kernel(
        PRODUCTS,
        "matrix products in float32: by oneDNN, those that give a weight's gradient by blocks that are packed once",
        "ATen's, which are a BLAS's: MKL in torch's builds for x86",
        "cpu",
        True,
        "on AMD's processors with AVX-512, which MKL does not use there: 0.8 to 0.95 of its time; off elsewhere",
    ),
)
_LAUNCHES: Mapping[str, tuple[str, ...]] = {
    WIRE: ("quantise", "dequantise", "dequantise_sum"),
    NORMS: ("square_sum",),
}
_NAMES = frozenset(kernel.name for kernel in KERNELS)


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
        asked: those that ``ZEROFX_KERNELS`` names; None for those that are on by default.
        device: where the step runs. Those for CUDA are Triton's, which runs them on a CPU too, slowly, where
            ``TRITON_INTERPRET`` is set, and only those that are asked for by name.
    """
    if chosen is None:
        chosen = frozenset(kernel.name for kernel in KERNELS if kernel.is_default and kernel.device_type == device.type)
        chosen -= frozenset() if products.is_worth_it() else {PRODUCTS}
    return frozenset(kernel.name for kernel in KERNELS if kernel.name in chosen and _runs(kernel, device))


def _runs(kernel: Kernel, device: torch.device) -> bool:
    if kernel.device_type == "cpu":
        return device.type == "cpu" and (kernel.name != PRODUCTS or products.can_multiply())
    return find_spec("triton") is not None and (device.type == "cuda" or _is_interpreting())


def _is_interpreting() -> bool:
    return bool(import_module("triton").knobs.runtime.interpret)


def launches_of(kernels: frozenset[str]) -> dict[Any, Any]:
    """The operators in whose place a step with ``kernels`` has launches of them, and what launches them."""
    names = [name for kernel, operators in _LAUNCHES.items() if kernel in kernels for name in operators]
    return {getattr(ops, name): getattr(torch.ops.zerofx, f"launch_{name}").default for name in names}
