"""Let complex parameters come as real numbers: buckets hold those, and optimizers update them.

    w: complex64[4]                    w: float32[4, 2]
    y = mul(x, w)              ->      shown = view_as_complex(w); y = mul(x, shown)

Their gradients are for ``real_gradients.py``. Does not handle: complex buffers, which stay as they are.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial

import torch

from zerofx.capture.normalise.joint import Joint
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase, Role, placeholder, set_value, value


@dataclass(frozen=True)
class RealParameters:
    """Let complex parameters come as real numbers."""

    name: str = "real_parameters"

    def run(self, joint: Joint) -> None:
        step = joint.step
        for node in list(step.placeholders(Role.PARAMETER)):
            fake = value(node)
            if not fake.is_complex():
                continue
            set_value(node, torch.view_as_real(fake.detach()))
            with step.graph.inserting_after(step.last_placeholder()):
                where = Origin(placeholder(node).name.rpartition(".")[0], Phase.FORWARD)
                view = torch.ops.aten.view_as_complex.default
                shown = insert_call(step.graph, view, (node,), where, fake=fake.detach())
            node.replace_all_uses_with(shown, partial(operator.is_not, shown))
