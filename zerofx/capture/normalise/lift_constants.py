"""Let tensors that the model holds outside parameters and buffers come in as inputs, after all others.

    x = mul(batch_0, self._tensor_constant0)     ->     constant_0: constant; x = mul(batch_0, constant_0)

Does not handle: a constant that forward changes in place, which tracing refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerofx.capture.normalise.joint import Joint
from zerofx.ir.facts import Placeholder, Role, placeholder, set_placeholder, set_value


@dataclass(frozen=True)
class LiftConstants:
    """Let tensors that the model holds outside parameters and buffers come in as inputs."""

    name: str = "lift_constants"

    def run(self, joint: Joint) -> None:
        step = joint.step
        last = list(step.graph.find_nodes(op="placeholder"))[-1]
        for node in list(step.graph.find_nodes(op="get_attr")):
            name = str(node.target)
            constant = getattr(joint.traced, name)
            step.constants[name] = constant
            existing = next((p for p in step.placeholders(Role.CONSTANT) if placeholder(p).name == name), None)
            if existing is None:
                with step.graph.inserting_after(last):
                    existing = step.graph.placeholder(f"constant{name}")
                last = set_placeholder(existing, Placeholder(Role.CONSTANT, name))
                set_value(existing, node.meta.get("val", constant))
            node.replace_all_uses_with(existing)
            step.graph.erase_node(node)
