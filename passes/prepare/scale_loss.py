"""Let backward begin with the loss's scale instead of 1.

    one = full([], 1.0)                     seed = clone(loss_scale_float16)
    gradient = mul(one, x)           ->     gradient = mul(seed, x)

This is what backward of ``scaler.scale(loss)`` begins with (``torch.amp.GradScaler``): the gradient of a product is its
other factor, in the dtype of the loss. The step's loss itself is not multiplied. The scale is an input of the step, in
float32, of which the passes of ``passes/barrier`` free gradients, and in the loss's dtype. It is rounded to that by the
host: a compiled region computes in float32, where a scale that float16 does not have would be none of GradScaler's.

Does not handle: several scales for several losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Phase, Placeholder, Role, origin, tensor
from zerofx.ir.graph import StepGraph
from zerofx.precision import dtype_name

_aten = torch.ops.aten


@dataclass(frozen=True)
class ScaleLoss:
    """Let backward begin with the loss's scale, an input of the step."""

    name: str = "scale_loss"

    def run(self, step: StepGraph) -> None:
        # Backward begins where the capture has put the loss's own gradient (``BeginBackward``).
        seed = next(node for node in step.calls() if origin(node).phase is Phase.BACKWARD)
        assert seed.target is _aten.full.default and seed.args == ([], 1.0), f"{seed.name} is no gradient of a loss"
        dtypes = dict.fromkeys((torch.float32, tensor(seed).dtype))
        scales = {dtype: _add_scale(step, dtype) for dtype in dtypes}
        with step.graph.inserting_before(seed):
            # What is computed of it may be a view, and is not the state's own memory.
            scaled = insert_call(step.graph, _aten.clone.default, (scales[tensor(seed).dtype],), origin(seed))
        seed.replace_all_uses_with(scaled)
        step.graph.erase_node(seed)


def _add_scale(step: StepGraph, dtype: torch.dtype) -> fx.Node:
    name = dtype_name(dtype)
    return step.add_placeholder(f"loss_scale_{name}", Placeholder(Role.LOSS_SCALE, name), (), dtype)
