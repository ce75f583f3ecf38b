"""Which of the kernels a step uses: the table of them, what turns each on, and why."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch

from zerofx.errors import UsageError


@dataclass(frozen=True)
class Kernel:
    """One entry of the table.

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
WIRE = "wire"

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
    Kernel(
        WIRE,
        "rounding to few bits for the wire, and back, in one pass each, with sums in the order of the ranks",
        "what Inductor makes of the same arithmetic",
        False,
        "Inductor fuses most of it, and which is faster has not been measured",
    ),
)
_NAMES = frozenset(kernel.name for kernel in KERNELS)


def check_kernels(asked: frozenset[str] | None) -> None:
    """Check the names in ``ZEROFX_KERNELS``.

    Raises:
        UsageError: one of them is no kernel's.
    """
    unknown = (asked or frozenset()) - _NAMES
    if unknown:
        raise UsageError(
            f"expected ZEROFX_KERNELS to be auto, none, or names of kernels ({', '.join(sorted(_NAMES))}), found "
            f"{', '.join(sorted(unknown))}"
        )


def kernels_in_use(asked: frozenset[str] | None, device: torch.device) -> frozenset[str]:
    """The kernels that a compiled step on ``device`` uses.

    Args:
        asked: those that ``ZEROFX_KERNELS`` names; None for those that are on by default.
        device: where the step runs. Triton needs CUDA; on a CPU it runs kernels, slowly, where ``TRITON_INTERPRET`` is
            set, and only those that are asked for by name.
    """
    if asked is None:
        asked = frozenset(kernel.name for kernel in KERNELS if kernel.is_default and device.type == "cuda")
    if not asked or find_spec("triton") is None:
        return frozenset()
    return asked if device.type == "cuda" or _is_interpreting() else frozenset()


def _is_interpreting() -> bool:
    return bool(import_module("triton").knobs.runtime.interpret)
