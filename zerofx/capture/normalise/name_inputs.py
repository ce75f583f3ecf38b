"""Say of every input what it stands for, and call it after that; a tensor of several names comes once.

    primals_1, primals_2, primals_3        embed_weight: parameter embed.weight (also head.weight)
    embedding(primals_1, primals_3)   ->   batch_0: input batch[0]
    mm(x, t(primals_2))                    embedding(embed_weight, batch_0); mm(x, t(embed_weight))

Does not handle: inputs that are neither the model's, nor the batch's, nor tensors that forward reaches elsewhere: torch
orders operators with effects by tokens, which come in as inputs. They are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import fx

from zerofx.capture.blame import unknown_input
from zerofx.capture.normalise.joint import Joint, is_outside, outside_name
from zerofx.ir.facts import Placeholder, Role, set_placeholder
from zerofx.torch_private.capture import (
    BufferAOTInput,
    ParamAOTInput,
    PlainAOTInput,
    TangentAOTInput,
    descriptions,
    rename,
)


@dataclass(frozen=True)
class NameInputs:
    """Say of every input what it stands for."""

    name: str = "name_inputs"

    def run(self, joint: Joint) -> None:
        graph, first_name = joint.graph, joint.first_names()
        parameters = {info.name for info in joint.step.parameters}
        merged: dict[str, fx.Node] = {}
        for node in list(graph.find_nodes(op="placeholder")):
            desc = descriptions(node)
            match desc:
                case TangentAOTInput():
                    pass  # of the loss: ``begin_backward.py``
                case ParamAOTInput(target=target) | BufferAOTInput(target=target) if is_outside(target):
                    if set(node.users) <= {graph.output_node()}:  # nothing reads it
                        joint.unread.append(node)
                    _rename(node, Role.OUTSIDE, outside_name(joint, target))
                case ParamAOTInput(target=target) | BufferAOTInput(target=target):
                    name = first_name[target]
                    role = Role.BUFFER
                    if isinstance(desc, ParamAOTInput):
                        role = Role.PARAMETER if name in parameters else Role.OUTSIDE
                    if name in merged:
                        node.replace_all_uses_with(merged[name])
                        graph.erase_node(node)
                    else:
                        merged[name] = _rename(node, role, name)
                case PlainAOTInput(idx=index):
                    _rename(node, Role.INPUT, joint.batch.names[index])
                case _:
                    raise unknown_input(graph, desc)


def _rename(node: fx.Node, role: Role, name: str) -> fx.Node:
    rename(node, placeholder_name(role, name))
    node.target = node.name
    return set_placeholder(node, Placeholder(role, name))


def placeholder_name(role: Role, name: str) -> str:
    """What the placeholder of a parameter, a buffer or a batch tensor is called, unless the name is taken."""
    prefix = {Role.PARAMETER: "", Role.BUFFER: "buffer_", Role.INPUT: "batch_", Role.OUTSIDE: "outside_"}[role]
    stem = prefix + re.sub(r"\W+", "_", name).strip("_").removeprefix(prefix)
    return stem if stem and not stem[0].isdigit() else f"_{stem}"
