"""Step graphs of tiny models, made as ``compile`` makes them, but for any number of ranks and on no process group."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.lib.captures import captured_graph
from zerofx.capture.traceable import Forward
from zerofx.ir.batch import Batch
from zerofx.ir.bucketing import layout_of
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.facts import Role, placeholder, tensor
from zerofx.ir.graph import StepGraph
from zerofx.optimizers import Optimizers, UpdateProgram
from zerofx.optimizers.binding import OptimizerBinding
from zerofx.passes.base import Pass
from zerofx.passes.prepare.accumulate import accumulate
from zerofx.passes.prepare.scale_loss import ScaleLoss
from zerofx.passes.prepare.simplify import simplify
from zerofx.passes.prepare.slice import slice_parameters
from zerofx.pipeline import GraphStage, passes, trace_passes
from zerofx.runtime.state.parameter_groups import group_of_parameters
from zerofx.scheduler.analysis.slices import Slices, slices_of_names
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.measured import MeasuredCosts
from zerofx.scheduler.decide.residency import PolicyOptions, decide
from zerofx.scheduler.decide.undecided import undecided
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.rehearsal import Rehearsal
from zerofx.scheduler.search.target import Target
from zerofx.settings import Settings

ROWS = 2
DIM = 4


class Block(nn.Module):
    """One linear layer and a nonlinearity; without a bias, to keep printed graphs short."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class TwoBlocks(nn.Module):
    """Two equal blocks and a head. The loss is the sum of the head's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x).sum()
        return loss


class Averaging(TwoBlocks):
    """Two blocks that keep a running mean of their input."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return super().forward(x - self.mean)


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, DIM)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), ids)


class Peeking(nn.Module):
    """Blocks of which the last one's weight is read early as well, without a gradient.

    Its own gradient is complete long before backward reads it for the last time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(DIM, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        last = self.layers[-1]
        assert isinstance(last, Block)
        x = self.layers[0](x) * last.linear.weight.detach()[0]
        for layer in self.layers[1:]:
            x = layer(x)
        loss: Tensor = self.head(x).sum()
        return loss


class Shift(nn.Module):
    """Adds a parameter of its input's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(ROWS, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class Summed(nn.Module):
    """Layers and the sum of what they give."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Shifts(Summed):
    """Layers whose gradients are all one and the same node."""

    def __init__(self) -> None:
        super().__init__(*(Shift() for _ in range(3)))


class Normed(Summed):
    """Blocks that end in a layer norm: the gradients of its weight and bias are two outputs of one operator."""

    def __init__(self) -> None:
        super().__init__(*(nn.LayerNorm(DIM) for _ in range(2)))


def features() -> tuple[Tensor, ...]:
    return (torch.randn(ROWS, DIM),)


def token_ids() -> tuple[Tensor, ...]:
    return (torch.randint(5, (ROWS,)),)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer with the shortest update."""
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer with the shortest update that has a state from the first step on."""
    return torch.optim.Adagrad(model.parameters(), lr=0.1, foreach=False)


@dataclass
class Prepared:
    """A captured graph with all that the passes need, before the first of them."""

    step: StepGraph
    layout: BucketLayout
    programs: Mapping[int, UpdateProgram]
    plan: Plan
    may_be_sliced: bool = False

    @property
    def updates(self) -> Sequence[Mapping[int, UpdateProgram]]:
        return [self.programs]

    @property
    def candidates(self) -> Sequence[int]:
        return [self.step.num_micro_batches]

    def graph(self, num_micro_batches: int, *, by_layer: bool = False) -> StepGraph:
        assert (num_micro_batches, by_layer) == (self.step.num_micro_batches, self.step.by_layer)
        return self.step

    def slice_parameters(self, slices: Slices) -> Prepared:
        assert not slices, "its parameters stay whole"
        return self

    def use_whole_slices(self) -> Prepared:
        raise AssertionError("its layout is given")

    def put_casts_apart(self) -> Prepared:
        return self

    def rehearsal(self, target: Target) -> Rehearsal:
        return Rehearsal(self.step, self.layout, self.programs, target)

    def run(self, until: str = "") -> Prepared:
        """Run the pipeline's passes in place, up to and with the one called ``until``, or all."""
        for one in self.passes():
            one.run(self.step, self.plan)
            if one.name == until:
                break
        return self

    def changes(self, name: str) -> str:
        """What the pass called ``name`` changes: lines taken out (-), put in (+) and one left around each place."""
        for one in self.passes():
            before = self.step.text()
            one.run(self.step, self.plan)
            if one.name == name:
                return difference(before, self.step.text())
        raise ValueError(f"no pass is called {name}")

    def passes(self) -> tuple[Pass, ...]:
        return passes(self.layout, self.programs, self.plan)

    def run_pipeline(self, **changed: object) -> tuple[GraphStage, ...]:
        """The pipeline itself, with every check after every pass."""
        return trace_passes(
            self.step, self.plan, self.layout, self.programs, settings(**changed), on_cpu=True, verbose=True
        )

    def node(self, name: str) -> fx.Node:
        found: fx.Node = next(node for node in self.step.graph.nodes if node.name == name)
        return found


def target(machine: Machine, *, costs: MeasuredCosts | None = None, num_ranks: int = 1) -> Target:
    """A target whose regions are not compiled, and that says nothing."""
    silent = Target(machine, settings(), on_cpu=True, compiles_regions=False, kernels=frozenset(), verbose=False)
    return silent if costs is None else silent.replace_costs(costs, Mesh(shard=num_ranks))


def settings(**changed: object) -> Settings:
    """Settings that check after every pass and say nothing, but for what is given."""
    defaults: dict[str, object] = {
        "debug": 0, "dump_dir": Path("unused"), "disable": frozenset(), "verify": 2, "timeout_seconds": 60.0,
    }  # fmt: skip
    return Settings(**{**defaults, **changed})  # type: ignore[arg-type]  # the names are checked by the call


def prepare(
    model: nn.Module | None = None,
    batch: tuple[Tensor, ...] | None = None,
    *,
    stage: int = 3,
    num_ranks: int = 2,
    mesh: Mesh | None = None,
    in_parts: bool = True,
    prefetch: int = 1,
    keep: tuple[str, ...] | str = (),
    optimizer: torch.optim.Optimizer | None = None,
    precision: str | None = None,
    keywords: Mapping[str, object] | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    num_micro_batches: int = 1,
    by_layer: bool = False,
    slices: Mapping[str, int] | None = None,
    block: int = 1,
    loss_scaled: bool = False,
    reduce_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
) -> Prepared:
    """Capture ``model`` (``TwoBlocks`` if none is given), lay it out and plan it, on no process group.

    ``batch`` is one micro-batch, ``slices`` the parameters that are taken in so many slices; each rank's share of a
    bucket is a multiple of ``block`` elements. ``loss_scaled``: whether backward begins with a scale.
    """
    model = TwoBlocks() if model is None else model
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}[precision]
    taken = Batch.from_call(features() if batch is None else batch, dict(keywords or {}))
    step = captured_graph(Forward(model, taken, loss_fn, dtype, num_micro_batches))
    simplify(step)
    if loss_scaled:
        ScaleLoss().run(step)
    optimizers = Optimizers((optimizer or sgd(model),))
    groups = group_of_parameters(model, optimizers, step.parameters, set(step.gradients))
    slice_parameters(step, slices_of_names(step, slices or {}))
    accumulate(step, num_micro_batches, taken.divided_names(), by_layer=by_layer)
    layout = layout_of(
        step, groups, mesh or Mesh(shard=num_ranks), block=block,
        in_parts=in_parts, reduce_dtype=reduce_dtype, state_dtype=state_dtype,
    )  # fmt: skip
    binding = OptimizerBinding(optimizers, layout, step.device, prefer_fused=False)
    programs = binding.programs(None, binding.find_states(dict(model.named_parameters())))
    plan = replace(undecided(step, layout, stage, precision, "cpu"), loss_scaled=loss_scaled)
    plan = decide(step, layout, plan, PolicyOptions(prefetch, keep))
    return Prepared(step, layout, programs, plan)


def captured(model: nn.Module, *batch: Tensor, precision: torch.dtype | None = None, **named: Tensor) -> StepGraph:
    """The graph of one micro-batch, before it is laid out."""
    step = captured_graph(Forward(model, Batch.from_call(batch, named), compute_dtype=precision))
    simplify(step)
    return step


def run_graph(step: StepGraph, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and all gradients by name of a captured graph, before the passes that take parameters away."""
    taken = Batch.from_call(batch, {})
    inputs = dict(zip(taken.names, taken.tensors, strict=True))
    tensors, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    parameters = {
        info.name: tensors[info.source][info.first_row : info.first_row + info.shape[0]]
        if info.whole
        else tensors[info.source]
        for info in step.parameters
    }
    given: list[Tensor] = []
    for node in step.placeholders():
        what = placeholder(node)
        if what.role is Role.PARAMETER:
            given.append(parameters[what.name].detach().to(tensor(node).dtype))
        else:
            given.append({**inputs, **buffers, **step.constants}[what.name])
    with torch.no_grad():
        found = fx.Interpreter(fx.GraphModule({}, step.clone().graph)).run(*given)
    first = 1 + len(step.mutation_names)
    return found[0], dict(zip(step.gradient_names, found[first:], strict=True))


def joined(step: StepGraph, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of whole parameters from those of their slices."""
    parts: dict[str, list[Tensor]] = {}
    for info in step.parameters:
        if info.name in gradients:
            parts.setdefault(info.source, []).append(gradients[info.name])
    return {name: found[0] if len(found) == 1 else torch.cat(found) for name, found in parts.items()}


def check_same_results(
    step: StepGraph,
    changed: StepGraph,
    model: nn.Module,
    batch: tuple[Tensor, ...],
    rtol: float | None = None,
    share: float = 0.0,
    loss_rtol: float | None = None,
) -> None:
    """Both graphs give the loss and gradients, of one dtype and within tolerance.

    ``rtol``, ``loss_rtol``: torch's tolerances where they are None. ``share``: of a gradient's largest value.
    """
    loss, gradients = run_graph(step, model, batch)
    again, split = run_graph(changed, model, batch)
    torch.testing.assert_close(again, loss, rtol=loss_rtol, atol=None if loss_rtol is None else 0.0)
    split = joined(changed, split)
    assert split.keys() == gradients.keys()
    for name, gradient in gradients.items():
        atol = None if rtol is None else share * float(gradient.abs().max())
        torch.testing.assert_close(split[name], gradient, rtol=rtol, atol=atol)


def difference(before: str, after: str) -> str:
    """The lines in which two graphs' texts differ, with one line around each place; values as by ``number_values``."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)
    text = "\n".join("..." if line.startswith("@@") else line for line in list(lines)[2:])
    return number_values(text, f"{before}\n{after}")


def number_values(text: str, graphs: str | None = None) -> str:
    """The text with %0, %1 ... in the order of their lines, for values that fx has named after their operator.

    fx counts all names that a graph ever had, those of nodes that are gone too. Names that a pass gives stay.
    ``graphs``: texts in which the values are computed, where ``text`` shows a part of them.
    """
    computed = re.findall(
        r"^(\w+)(?:: [^=]+)? = \w+\.(\w+?)\.(\w+)\(", text if graphs is None else graphs, re.MULTILINE
    )
    counted = {
        name for name, operator, overload in computed if re.fullmatch(rf"{operator}(_{overload})?(_\d+)?", name, re.I)
    }
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        name = match[0]
        return f"%{numbers.setdefault(name, len(numbers))}" if name in counted else name

    return re.sub(r"(?<![\w.])\w+(?![\w.(])", number, text)


def order_of(step: StepGraph) -> dict[str, int]:
    """Position by name."""
    return {node.name: position for node, position in step.positions().items()}


def calls(step: StepGraph, target: object) -> list[fx.Node]:
    """All calls of one operator, in order."""
    return [node for node in step.calls() if node.target is target]
