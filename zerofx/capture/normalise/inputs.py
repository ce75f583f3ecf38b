"""Inputs of a traced joint graph: the meaning of each, constants among them, real numbers, devices by kind."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from zerofx.capture.blame import unknown_input
from zerofx.capture.normalise.joint import Joint, free_tensor_name, is_free_tensor
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase, Placeholder, Role, placeholder, set_placeholder, set_value, value
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
    """Give every input its meaning.

        primals_1, primals_2, primals_3        embed_weight: parameter embed.weight (also head.weight)
        embedding(primals_1, primals_3)   ->   batch_0: input batch[0]
        mm(x, t(primals_2))                    embedding(embed_weight, batch_0); mm(x, t(embed_weight))

    Does not handle: inputs that are neither the model's, nor the batch's, nor tensors that forward reaches elsewhere:
    torch orders operators with effects by tokens, which come in as inputs. They are refused.
    """

    name: str = "name_inputs"

    def run(self, joint: Joint) -> None:
        graph, first_name = joint.graph, joint.first_names()
        parameters = {info.name for info in joint.step.parameters}
        merged: dict[str, fx.Node] = {}
        for node in list(graph.find_nodes(op="placeholder")):
            desc = descriptions(node)
            match desc:
                case TangentAOTInput():
                    pass  # of the loss: ``BeginBackward``
                case ParamAOTInput(target=target) | BufferAOTInput(target=target) if is_free_tensor(target):
                    if set(node.users) <= {graph.output_node()}:  # nothing reads it
                        joint.unread.append(node)
                    _rename(node, Role.OUTSIDE, free_tensor_name(joint, target))
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
    """The name of the placeholder of a parameter, a buffer or a batch tensor, unless it is taken."""
    prefix = {Role.PARAMETER: "", Role.BUFFER: "buffer_", Role.INPUT: "batch_", Role.OUTSIDE: "outside_"}[role]
    stem = prefix + re.sub(r"\W+", "_", name).strip("_").removeprefix(prefix)
    return stem if stem and not stem[0].isdigit() else f"_{stem}"


@dataclass(frozen=True)
class LiftConstants:
    """Turn tensors that the model holds outside parameters and buffers into inputs.

        x = mul(batch_0, self._tensor_constant0)     ->     constant_0: constant; x = mul(batch_0, constant_0)

    Does not handle: a constant that forward changes in place, which tracing refuses.
    """

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


@dataclass(frozen=True)
class RealParameters:
    """Make complex parameters real inputs.

        w: complex64[4]                    w: float32[4, 2]
        y = mul(x, w)              ->      shown = view_as_complex(w); y = mul(x, shown)

    Their gradients are for ``RealGradients``. Does not handle: complex buffers, which stay as they are.
    """

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


@dataclass(frozen=True)
class NameDevices:
    """Make operators create tensors on the current device of a kind.

        arange(8, device="cuda:1")     ->     arange(8, device="cuda")

    A rank's graph is that of the others, a step runs with its own device as the current one, and a plan that was saved
    on one device is for all of its kind.

    Does not handle: a forward that uses two devices of a kind, which tracing refuses.
    """

    name: str = "name_devices"

    def run(self, joint: Joint) -> None:
        def kind(arg: Any) -> Any:
            return torch.device(arg.type) if isinstance(arg, torch.device) else arg

        for node in joint.graph.nodes:
            node.args, node.kwargs = map_aggregate(node.args, kind), map_aggregate(node.kwargs, kind)
