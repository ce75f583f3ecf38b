"""Tell the outputs of a joint graph apart: the loss, what is handed out, buffers, gradients.

    return [out_0, out_1, out_2, ...]     ->     loss = out_0; buffer mean = out_1; gradient of head.weight = out_2

Only what is trained has a gradient. Checks are part of the graph by now (``begin_backward.py``).

Of an evaluation all that is returned is handed out, and the loss is the first tensor of that.

Does not handle: forwards that change their batch or parameters in place, or one of two buffers over the same memory,
gradients of and changes to what is outside of
the model, losses that depend on no parameter. These are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from zerofx.capture.normalise.joint import Joint, Outputs, is_outside, outside_name
from zerofx.capture.outside.outside import changed_outside
from zerofx.capture.shared_memory import sharing
from zerofx.errors import CaptureError
from zerofx.ir.batch import Batch
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
    """Tell the outputs of a joint graph apart."""

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
                ) if is_outside(target):
                    raise changed_outside(f"changes {outside_name(joint, target)} in place")
                case GradAOTOutput(grad_of=ParamAOTInput(target=target)) if is_outside(target) and node is not None:
                    name = outside_name(joint, target)
                    raise CaptureError(
                        f"expected a loss whose gradients are those of the model's parameters, found that it has one "
                        f"for {name}, which is not of the model and would not be trained: compute with it inside "
                        f"torch.no_grad(), call requires_grad_(False) on it, or make its module a part of the model"
                    )
                case GradAOTOutput(grad_of=ParamAOTInput(target=target)) if is_outside(target):
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
        pair = sharing(joint.model, mutations)
        if pair is not None:
            raise CaptureError(
                f"expected buffers with memory of their own, found that the forward changes one of {pair[0]} and "
                f"{pair[1]}, which share some: make them one buffer, or clone() one"
            )
        joint.sorted_outputs = Outputs(loss, extras, mutations, gradients)


def _describe_input(desc: Any, batch: Batch) -> str:
    target = getattr(desc, "target", None)
    return f"parameter {target.removeprefix('model.')}" if target else batch.names[desc.idx]
