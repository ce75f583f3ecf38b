"""Write the output node of a step graph, and take out what nothing reads.

    return [out_0, out_1, out_2, None]     ->     return loss, extras..., buffers..., gradients...

Does not handle: operators that only raise errors or print, which nothing reads: ``name_inputs.py`` refuses them.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerofx.capture.normalise.joint import Joint


@dataclass(frozen=True)
class WriteOutputs:
    """Write the output node, and take out what nothing reads."""

    name: str = "write_outputs"

    def run(self, joint: Joint) -> None:
        step, outputs = joint.step, joint.outputs
        loss = outputs.loss if joint.lossy.trains else outputs.extras[0]
        step.set_outputs(loss, outputs.mutations, dict(outputs.gradients), extras=outputs.extras)
        step.output.meta.pop("desc")
        for node in joint.unread:
            step.graph.erase_node(node)
        step.graph.eliminate_dead_code()
        step.graph.lint()
