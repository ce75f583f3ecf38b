"""Outputs of a traced joint graph: sorted by kind, given their own memory, put after the forward's checks, written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from zerofx.capture.checks import find_overlap
from zerofx.capture.free_tensors.free_tensors import change_error
from zerofx.capture.normalise.joint import Joint, Outputs, free_tensor_name, is_free_tensor
from zerofx.errors import CaptureError
from zerofx.ir import ops
from zerofx.ir.aliasing import aliased_input
from zerofx.ir.batch import Batch
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import origin, value
from zerofx.ir.operators.operator import OperatorKind
from zerofx.ir.operators.table import facts_of
from zerofx.torch_private.capture import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTOutput,
    descriptions,
)


@dataclass(frozen=True)
class SortOutputs:
    """Sort the outputs of a joint graph by kind.

        return [out_0, out_1, out_2, ...]     ->     loss = out_0; buffer mean = out_1; gradient of head.weight = out_2

    Only trained parameters have a gradient. Checks are part of the graph by now (``BeginBackward``).

    An evaluation hands out all that is returned, and its loss is the first tensor of that.

    Does not handle: forwards that change their batch or parameters in place, or one of two buffers over the same
    memory, gradients of and changes to free tensors, losses that depend on no parameter. These are refused.
    """

    name: str = "sort_outputs"

    def run(self, joint: Joint) -> None:
        output, lossy, first_name = joint.graph.output_node(), joint.lossy, joint.first_names()
        loss: fx.Node | None = None
        extras: list[fx.Node] = []
        mutations: dict[str, fx.Node] = {}
        gradients: list[tuple[str, fx.Node]] = []
        trainable = {info.name for info in joint.step.parameters if info.requires_grad}
        outputs: Any = output.args[0]
        for node, desc in zip(outputs, descriptions(output), strict=True):
            match desc:
                case PlainAOTOutput(idx=0):
                    loss = node
                # After what in-place calls make of a buffer; then come checks, which are part of the graph by now.
                case PlainAOTOutput(idx=index) if index <= len(lossy.rebound):
                    mutations[lossy.rebound[index - 1]] = node
                case PlainAOTOutput(idx=index) if index > len(lossy.rebound) + len(lossy.checked):
                    extras.append(node)
                case InputMutationAOTOutput(
                    mutated_input=BufferAOTInput(target=target) | ParamAOTInput(target=target)
                ) if is_free_tensor(target):
                    raise change_error(f"changes {free_tensor_name(joint, target)} in place")
                case GradAOTOutput(grad_of=ParamAOTInput(target=target)) if is_free_tensor(target) and node is not None:
                    name = free_tensor_name(joint, target)
                    raise CaptureError(
                        f"expected a loss whose gradients are those of the model's parameters, found that it has one "
                        f"for {name}, which is not of the model and would not be trained: compute with it inside "
                        f"torch.no_grad(), call requires_grad_(False) on it, or make its module a part of the model"
                    )
                case GradAOTOutput(grad_of=ParamAOTInput(target=target)) if is_free_tensor(target):
                    pass
                case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=target)):
                    mutations[first_name[target]] = node
                case InputMutationAOTOutput(mutated_input=changed):
                    lines = "\n  ".join(list(dict.fromkeys(joint.watcher.lines))[:5]) or "(line not found)"
                    raise CaptureError(
                        f"expected a forward that leaves its batch and parameters as they are, found an in-place "
                        f"change of {_describe_input(changed, joint.batch)}. In-place calls that were traced:"
                        f"\n  {lines}\n"
                        f"Use the out-of-place form (x = x + 1, not x.add_(1)), clone the tensor first, or build an "
                        f"Embedding without max_norm."
                    )
                case GradAOTOutput(grad_of=ParamAOTInput(target=target)) if node is not None:
                    name = first_name[target]
                    if name in trainable:
                        gradients.append((name, node))
                case _:
                    pass
        if loss is None:
            raise CaptureError("the captured graph has no loss; return a scalar from the model or give loss_fn")
        if lossy.trains and not gradients:
            raise CaptureError(
                "expected a loss that depends on a trainable parameter, found a scalar that depends on none of the "
                "model's: check that forward uses them and that nothing detaches the loss"
            )
        pair = find_overlap(joint.model, mutations)
        if pair is not None:
            raise CaptureError(
                f"expected buffers with memory of their own, found that the forward changes one of {pair[0]} and "
                f"{pair[1]}, which share some: make them one buffer, or clone() one"
            )
        joint.sorted_outputs = Outputs(loss, extras, mutations, gradients)


def _describe_input(desc: Any, batch: Batch) -> str:
    target = getattr(desc, "target", None)
    return f"parameter {target.removeprefix('model.')}" if target else batch.names[desc.idx]


@dataclass(frozen=True)
class OwnLoss:
    """Copy a loss that is a view.

        loss = view(x, [])                   view_1 = view(x, [])
        return loss, ...             ->      loss = clone(view_1); return loss, ...

    ``detach`` and ``alias`` of a loss with memory of its own are left as they are.

    Does not handle: outputs next to the loss, as all outputs of an evaluation are (``HandOut``).
    """

    name: str = "own_loss"

    def run(self, joint: Joint) -> None:
        if joint.lossy.trains:
            joint.outputs.loss = _own_storage(joint.graph, joint.outputs.loss)


def _own_storage(graph: fx.Graph, loss: fx.Node) -> fx.Node:
    """The loss, or a copy of it where it is a view."""
    source: fx.Node | None = loss
    while source is not None and facts_of(source.target).kind is OperatorKind.IDENTITY:
        source = aliased_input(source)
    if source is not None and source.op != "placeholder" and aliased_input(source) is None:
        return loss
    with graph.inserting_after(loss):
        return insert_call(graph, torch.ops.aten.clone.default, (loss,), origin(loss), fake=value(loss))


@dataclass(frozen=True)
class CheckFirst:
    """Hand out an evaluation's outputs after the forward's checks of values.

        holds = all(condition)                           holds = all(condition)
        return loss, logits                      ->      seen = asserted(loss, holds, "..."); return seen, logits

    The smallest tensor is copied for it.

    Does not handle: training steps, whose backward begins after the checks (``BeginBackward``).
    """

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


@dataclass(frozen=True)
class HandOut:
    """Hand out tensors in the step's own memory, or copies.

        y = view(x, [2, 4]); return loss, y             y = view(x, [2, 4]); return loss, x
        return loss, batch_0                     ->     copied = clone(batch_0); return loss, copied

    A view is made again from the handed out tensor (``zerofx/ir/returned.py``) if possible.

    Does not handle: the loss itself (``OwnLoss``).
    """

    name: str = "hand_out"

    def run(self, joint: Joint) -> None:
        returned, extras = joint.lossy.returned, joint.outputs.extras
        sources = [_source(extra, partial(returned.shows, index)) for index, extra in enumerate(extras)]
        pairs = list(zip(extras, sources, strict=True))
        whole = {index for index, (extra, source) in enumerate(pairs) if source is None or _is_all_of(extra, source)}
        joint.step.returned = replace(returned, whole=frozenset(whole))
        joint.outputs.extras = [_copy(joint.graph, extra) if source is None else source for extra, source in pairs]


def _source(node: fx.Node, shows: Callable[[torch.Tensor, torch.Tensor], bool]) -> fx.Node | None:
    """The tensor that ``node`` is a view of, if the step made that memory and ``shows`` says the view can be made.

    A part of a tensor in a kernel's layout (``compat/strides.py``) is not shown: the positions of parts are found by a
    forward that is not traced, and has no such layout.
    """
    source = node
    while (further := aliased_input(source)) is not None:
        source = further
    is_shown = _is_all_of(node, source) or "memory_format" not in source.kwargs
    return source if source.op != "placeholder" and is_shown and shows(value(source), value(node)) else None


def _is_all_of(node: fx.Node, source: fx.Node) -> bool:
    """True if the two are one tensor."""
    part: torch.Tensor = value(node)
    whole: torch.Tensor = value(source)
    return part.shape == whole.shape and part.stride() == whole.stride() and part.dtype == whole.dtype


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    last = node if node.op != "placeholder" else list(graph.find_nodes(op="placeholder"))[-1]
    with graph.inserting_after(last):
        return insert_call(graph, torch.ops.aten.clone.default, (node,), origin(node), fake=value(node).clone())


@dataclass(frozen=True)
class WriteOutputs:
    """Write the output node, and remove nodes that nothing reads.

        return [out_0, out_1, out_2, None]     ->     return loss, extras..., buffers..., gradients...

    Does not handle: operators that only raise errors or print, which nothing reads: ``NameInputs`` refuses them.
    """

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
