"""A traced joint graph on its way to a step graph: the state that the rewrites of this folder edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx, nn

from zerofx.capture.objective.loss import LossModule
from zerofx.capture.values.watched_calls import CallWatcher
from zerofx.ir.batch import Batch
from zerofx.ir.edit import Rewrite
from zerofx.ir.graph import StepGraph
from zerofx.torch_private.capture import PlainAOTOutput, descriptions

_FREE_TENSORS = "free_tensors."  # what names of stand-ins begin with in a ``LossModule``


@dataclass
class Outputs:
    """Outputs of a joint graph, sorted: ``gradients`` are names of parameters with a node, tied ones several times."""

    loss: fx.Node
    extras: list[fx.Node]
    mutations: dict[str, fx.Node]
    gradients: list[tuple[str, fx.Node]]


@dataclass
class Joint:
    """A joint graph, and the context in which it was traced.

    ``step`` has the graph. ``traced`` is the module that holds its constants, ``lossy`` the module that was traced, and
    ``watcher`` knows its in-place calls. ``unread`` are placeholders of free tensors that nothing reads. ``outputs``
    exist once they are sorted (``SortOutputs``). ``capability`` is that of the NVIDIA GPU that the step is for, if any.
    """

    step: StepGraph
    traced: fx.GraphModule
    model: nn.Module
    batch: Batch
    watcher: CallWatcher
    lossy: LossModule
    capability: tuple[int, int] | None
    unread: list[fx.Node] = field(default_factory=list)
    sorted_outputs: Outputs | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.step.graph

    @property
    def outputs(self) -> Outputs:
        assert self.sorted_outputs is not None, "outputs are sorted first"
        return self.sorted_outputs

    def checks(self) -> Sequence[tuple[fx.Node, str]]:
        """The forward's checks of values, each with the message for its failure."""
        output, lossy = self.graph.output_node(), self.lossy
        outputs: Any = output.args[0]
        returned = [
            entry for entry, desc in zip(outputs, descriptions(output), strict=True) if isinstance(desc, PlainAOTOutput)
        ]
        first = 1 + len(lossy.rebound)
        return list(zip(returned[first : first + len(lossy.checked)], lossy.checked, strict=True))

    def first_names(self) -> Mapping[str, str]:
        """The step's name of each parameter and buffer, by each name that it has in the traced module."""
        models = [("", self.model), *((lender.name, lender.model) for lender in self.lossy.lenders())]
        paths = ["model", *(f"lent.{number}" for number in range(len(models) - 1))]
        parts = {f"parts.{number}": name for number, name in enumerate(self.lossy.parts.names)}
        return parts | {
            f"{path}.{alias}": f"{root}.{first}".removeprefix(".")
            for path, (root, model) in zip(paths, models, strict=True)
            for alias, first in (_first_names(model, "parameters") | _first_names(model, "buffers")).items()
        }


Normalisation: TypeAlias = Rewrite[[Joint]]


def is_free_tensor(name: str) -> bool:
    """True if a name of the traced module is that of a free tensor."""
    return name.startswith(_FREE_TENSORS)


def free_tensor_name(joint: Joint, name: str) -> str:
    """The name by which the user knows a free tensor."""
    return joint.lossy.free_tensor_names[int(name.removeprefix(_FREE_TENSORS))]


def _first_names(model: nn.Module, kind: str) -> dict[str, str]:
    """The first name of each parameter or buffer, by each of its names, where modules share a tensor."""
    named = model.named_parameters if kind == "parameters" else model.named_buffers
    first = {tensor: name for name, tensor in named()}
    return {name: first[tensor] for name, tensor in named(remove_duplicate=False)}
