"""A traced joint graph as a ``StepGraph``: its inputs and outputs by role and name, its nodes by layer and phase."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from zerofx.capture.blame import unknown_input
from zerofx.capture.canonicalise import (
    assert_values,
    check_results,
    handed_out,
    lift_constants,
    name_kinds_of_devices,
    own_storage,
    real_gradient,
    real_parameters,
    refuse_mixed_products,
    refuse_sparse,
    replace_tangent,
    sum_gradients,
)
from zerofx.capture.layer_annotations import set_origins
from zerofx.capture.layers import find_units
from zerofx.capture.loss import LossModule
from zerofx.capture.values.watched_calls import CallWatcher
from zerofx.errors import CaptureError
from zerofx.ir.batch import Batch
from zerofx.ir.facts import Placeholder, Role, set_placeholder
from zerofx.ir.graph import ParameterInfo, StepGraph
from zerofx.torch_private.capture import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    descriptions,
    rename,
)


def to_step_graph(
    traced: fx.GraphModule,
    model: nn.Module,
    batch: Batch,
    parameters: tuple[ParameterInfo, ...],
    device: torch.device,
    watcher: CallWatcher,
    lossy: LossModule,
) -> StepGraph:
    """The graph that ``capture`` gives, of a joint graph of ``lossy``, whose modules ``watcher`` has seen call.

    Raises:
        CaptureError: the model changes or trains what a step does not, has no loss, or an input that is not known.
    """
    graph = traced.graph
    step = StepGraph(graph=graph, device=device, parameters=parameters, units=frozenset(find_units(model)))
    first_name = {alias: info.name for info in parameters for alias in info.aliases} | _buffer_names(model)
    check_results(graph)
    set_origins(graph, has_layers=bool(step.units))
    merged: dict[str, fx.Node] = {}
    unread: list[fx.Node] = []  # of what is outside of the model
    for node in list(graph.find_nodes(op="placeholder")):
        desc = descriptions(node)
        match desc:
            case TangentAOTInput():
                one = replace_tangent(graph, node)
                if one is not None:
                    assert_values(graph, one, zip(_checks(graph, lossy), lossy.checked, strict=True))
            case ParamAOTInput(target=target) | BufferAOTInput(target=target) if _is_outside(target):
                if set(node.users) <= {graph.output_node()}:  # nothing reads it
                    unread.append(node)
                _rename(node, Role.OUTSIDE, lossy.outside_names[int(target.removeprefix(_OUTSIDE))])
            case ParamAOTInput(target=target) | BufferAOTInput(target=target):
                name = first_name[_inner_name(target)]
                role = Role.PARAMETER if isinstance(desc, ParamAOTInput) else Role.BUFFER
                if name in merged:
                    node.replace_all_uses_with(merged[name])
                    graph.erase_node(node)
                else:
                    merged[name] = _rename(node, role, name)
            case PlainAOTInput(idx=index):
                _rename(node, Role.INPUT, batch.names[index])
            case _:
                raise unknown_input(graph, desc)
    lift_constants(traced, step)
    real_parameters(step)
    name_kinds_of_devices(graph)
    _classify_outputs(step, first_name, batch, watcher, lossy)
    for node in unread:
        graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()
    return step


def _checks(graph: fx.Graph, lossy: LossModule) -> list[fx.Node]:
    """What the forward checks of values."""
    output = graph.output_node()
    outputs: Any = output.args[0]
    described = zip(outputs, descriptions(output), strict=True)
    returned = [one for one, desc in described if isinstance(desc, PlainAOTOutput)]
    return returned[1 + len(lossy.rebound) :][: len(lossy.checked)]


def _classify_outputs(
    step: StepGraph,
    first_name: Mapping[str, str],
    batch: Batch,
    watcher: CallWatcher,
    lossy: LossModule,
) -> None:
    loss: fx.Node | None = None
    extras: list[fx.Node] = []
    mutations: dict[str, fx.Node] = {}
    arrived: dict[str, list[fx.Node]] = {}
    trainable = {info.name for info in step.parameters if info.requires_grad}
    outputs: Any = step.output.args[0]
    for node, desc in zip(outputs, descriptions(step.output), strict=True):
        match desc:
            case PlainAOTOutput(idx=0):
                loss = node
            # After what in-place calls make of a buffer; then come checks, which are part of the graph by now.
            case PlainAOTOutput(idx=index) if index <= len(lossy.rebound):
                mutations[lossy.rebound[index - 1]] = node
            case PlainAOTOutput(idx=index) if index > len(lossy.rebound) + len(lossy.checked):
                extras.append(node)
            case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=target) | ParamAOTInput(target=target)) if (
                _is_outside(target)
            ):
                name = lossy.outside_names[int(target.removeprefix(_OUTSIDE))]
                raise CaptureError(
                    f"expected a step that changes nothing outside of the model, found that it changes {name} in "
                    f"place: call eval() on its module if it is a statistic of a layer in training mode, make its "
                    f"module a part of the model, or change it between steps"
                )
            case GradAOTOutput(grad_of=ParamAOTInput(target=target)) if _is_outside(target) and node is not None:
                name = lossy.outside_names[int(target.removeprefix(_OUTSIDE))]
                raise CaptureError(
                    f"expected a loss whose gradients are those of the model's parameters, found that it has one for "
                    f"{name}, which is not of the model and would not be trained: compute with it inside "
                    f"torch.no_grad(), call requires_grad_(False) on it, or make its module a part of the model"
                )
            case GradAOTOutput(grad_of=ParamAOTInput(target=target)) if _is_outside(target):
                pass
            case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=target)):
                mutations[first_name[_inner_name(target)]] = node
            case InputMutationAOTOutput(mutated_input=changed):
                lines = "\n  ".join(list(dict.fromkeys(watcher.lines))[:5]) or "(line not found)"
                raise CaptureError(
                    f"expected a forward that leaves its batch and parameters as they are, found an in-place change of "
                    f"{_describe_input(changed, batch)}. In-place calls that were traced:\n  {lines}\n"
                    f"Use the out-of-place form (x = x + 1, not x.add_(1)), clone the tensor first, or build an "
                    f"Embedding without max_norm."
                )
            case GradAOTOutput(grad_of=ParamAOTInput(target=target)) if node is not None:
                name = first_name[_inner_name(target)]
                if name in trainable:
                    arrived.setdefault(name, []).append(real_gradient(step.graph, node))
            case _:
                pass
    if loss is None:
        raise CaptureError("the captured graph has no loss; return a scalar from the model or give loss_fn")
    if not arrived:
        raise CaptureError(
            "expected a loss that depends on a trainable parameter, found a scalar that depends on none of the "
            "model's: check that forward uses them and that nothing detaches the loss"
        )
    refuse_sparse(step.graph)
    refuse_mixed_products(step.graph)
    loss = own_storage(step.graph, loss)
    gradients = {name: sum_gradients(step.graph, nodes) for name, nodes in arrived.items()}
    step.returned = lossy.returned
    handed = [handed_out(step.graph, one, partial(lossy.returned.shows, i)) for i, one in enumerate(extras)]
    step.set_outputs(loss, mutations, gradients, extras=handed)
    step.output.meta.pop("desc")


def _buffer_names(model: nn.Module) -> dict[str, str]:
    """Of each buffer by each of its names: the one that ``named_buffers`` has, where modules share a tensor."""
    first = {buffer: name for name, buffer in model.named_buffers()}
    return {name: first[buffer] for name, buffer in model.named_buffers(remove_duplicate=False)}


def _rename(node: fx.Node, role: Role, name: str) -> fx.Node:
    rename(node, placeholder_name(role, name))
    node.target = node.name
    return set_placeholder(node, Placeholder(role, name))


def placeholder_name(role: Role, name: str) -> str:
    """What the placeholder of a parameter, a buffer or a batch tensor is called, unless the name is taken."""
    prefix = {Role.PARAMETER: "", Role.BUFFER: "buffer_", Role.INPUT: "batch_", Role.OUTSIDE: "outside_"}[role]
    stem = prefix + re.sub(r"\W+", "_", name).strip("_").removeprefix(prefix)
    return stem if stem and not stem[0].isdigit() else f"_{stem}"


_OUTSIDE = "outside."  # what names of stand-ins begin with in a ``LossModule``


def _is_outside(name: str) -> bool:
    return name.startswith(_OUTSIDE)


def _inner_name(name: str) -> str:
    return name.removeprefix("model.")


def _describe_input(desc: Any, batch: Batch) -> str:
    target = getattr(desc, "target", None)
    return f"parameter {_inner_name(target)}" if target else batch.names[desc.idx]
