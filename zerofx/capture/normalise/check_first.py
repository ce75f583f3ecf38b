"""Hand out what an evaluation gives once it is seen that what its forward checks of values holds.

    holds = all(condition)                           holds = all(condition)
    return loss, logits                      ->      seen = asserted(loss, holds, "..."); return seen, logits

The smallest tensor is copied for it.

Does not handle: training steps, whose backward begins after the checks (``begin_backward.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from zerofx.capture.normalise.joint import Joint
from zerofx.ir import ops
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import origin, value


@dataclass(frozen=True)
class CheckFirst:
    """Hand out what an evaluation gives after what its forward checks of values."""

    name: str = "check_first"

    def run(self, joint: Joint) -> None:
        if joint.lossy.trains:
            return
        extras = joint.outputs.extras
        smallest = min(range(len(extras)), key=lambda i: value(extras[i]).numel())
        for holds, text in joint.checks():
            result = extras[smallest]
            with joint.graph.inserting_after(max(result, holds)):  # nodes compare by their place in the graph
                args, fake = (result, holds, text), value(result).clone()
                extras[smallest] = insert_call(joint.graph, ops.asserted, args, origin(result), fake=fake)
