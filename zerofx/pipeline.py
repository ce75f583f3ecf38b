"""Every rewrite of the graph, in order and by phase, and the loop that runs, verifies and reports those of a plan."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from zerofx.capture.by_layer.by_layer import Stamp
from zerofx.capture.normalise.phase import NORMALISATIONS
from zerofx.codegen.cpu.extras import OPTIONAL
from zerofx.codegen.inductor.phase import REGION_REWRITES
from zerofx.codegen.kernels.table import check_kernels
from zerofx.errors import UsageError, wrap_defects
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.graph import PipeStage, StepGraph
from zerofx.ir.parameters import ParameterInfo
from zerofx.optimizers import UpdateProgram
from zerofx.passes.across import Across
from zerofx.passes.activations.compress import Compress
from zerofx.passes.activations.offload import Offload
from zerofx.passes.activations.recompute import Recompute
from zerofx.passes.activations.spread import Spread
from zerofx.passes.barrier.clip import Clip
from zerofx.passes.barrier.guard_loss import CheckGradients, GuardLoss
from zerofx.passes.barrier.keep_gradients import KeepGradients
from zerofx.passes.barrier.unscale import Unscale
from zerofx.passes.base import Pass, PassReport, Preparation, op_counts
from zerofx.passes.buffers import Buffers
from zerofx.passes.direct import Direct
from zerofx.passes.divide import Divide
from zerofx.passes.gather import Gather
from zerofx.passes.gradients import Gradients
from zerofx.passes.in_place import InPlace
from zerofx.passes.lib.message_check import check_order, order_on_links
from zerofx.passes.lib.norm_check import check_norm
from zerofx.passes.lib.placement_check import check_placements, whole_calls
from zerofx.passes.merge import Merge
from zerofx.passes.parts import Parts
from zerofx.passes.prefetch import Prefetch
from zerofx.passes.prepare.accumulate import Accumulate
from zerofx.passes.prepare.borrow import Borrow
from zerofx.passes.prepare.copies import Copies
from zerofx.passes.prepare.multiply import Multiply
from zerofx.passes.prepare.order_rows import OrderRows
from zerofx.passes.prepare.overlap import Overlap
from zerofx.passes.prepare.partition import Partition
from zerofx.passes.prepare.rounds import Rounds
from zerofx.passes.prepare.scale_loss import ScaleLoss
from zerofx.passes.prepare.simplify import Simplify
from zerofx.passes.prepare.slice import Slice
from zerofx.passes.prepare.stages import Stages
from zerofx.passes.reduce import Reduce
from zerofx.passes.settle import Settle
from zerofx.passes.shard import Shard
from zerofx.passes.tile import Tile
from zerofx.passes.update import Update
from zerofx.passes.verify import verify
from zerofx.passes.wire.casts import CastGathers
from zerofx.passes.wire.gathers import QuantiseGathers
from zerofx.passes.wire.reductions import QuantiseReductions
from zerofx.scheduler.cost.liveness import liveness
from zerofx.scheduler.plan.decisions import MovedNodes, ProductDecision, ShardingDecision, TileDecision
from zerofx.scheduler.plan.plan import Plan
from zerofx.settings import Settings
from zerofx.units import format_bytes, format_seconds

# Fields of ``Plan``; of each those of a decision, or none for the field itself.
Decisions = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class PassEntry:
    """A rewrite in the list: its class, and what this page knows of it.

    ``decisions`` are those of a plan that it carries out: fields of ``Plan``, with the fields of each decision there
    (none: the field itself). Every decision is carried out by one rewrite. ``when``, of what preparations are given, or
    of a plan and whether the step is guarded: whether the rewrite is run; where it is not, it would change nothing.
    ``optional``: ``ZEROFX_DISABLE`` may name it.
    """

    kind: type[Any]
    decisions: Decisions = field(default_factory=dict)
    when: Callable[..., object] = lambda *_: True
    optional: bool = False

    @property
    def name(self) -> str:
        """The name in texts."""
        name: str = self.kind.name
        return name

    @property
    def about(self) -> str:
        """The first sentence of its documentation."""
        paragraph = " ".join((self.kind.__doc__ or "").partition("\n\n")[0].split())
        return f"{paragraph.removesuffix('.').partition('. ')[0]}."

    def instance(self, **given: object) -> Any:
        """The rewrite, with those of ``given`` that it has fields for."""
        return self.kind(**{entry.name: given[entry.name] for entry in fields(self.kind) if entry.name in given})


# A traced joint graph, which they make a step's; then, where layers repeat, those that were not traced.
CAPTURE = (*(PassEntry(type(normalisation)) for normalisation in NORMALISATIONS), PassEntry(Stamp, optional=True))

# A captured graph, before there is a plan.
PREPARE = (
    PassEntry(Simplify, when=lambda given: given.traced, optional=True),  # nodes that only autograd needed
    # Rows brought into another order where they have the fewest bytes.
    PassEntry(OrderRows, when=lambda given: given.traced),
    PassEntry(Borrow, when=lambda given: given.held),  # what other steps train, as they have it
    PassEntry(ScaleLoss, when=lambda given: given.loss_scaled),  # backward begins with the loss's scale
    # Whole values become one rank's, where the ranks of the model axis share the computation.
    PassEntry(
        Partition,
        {"shardings": ("node", "outputs", "inputs", "again", "parameter", "has_no_way")},
        lambda given: given.num_parts > 1,
    ),
    # Rows of the experts that have the most, on all ranks.
    PassEntry(
        Copies,
        {"shardings": ("num_copies",)},
        lambda given: any(decision.num_copies for decision in given.shardings),
    ),
    # Rows of experts in several rounds, where there is no room for all at once.
    PassEntry(
        Rounds,
        {"shardings": ("num_rounds",)},
        lambda given: any(decision.num_rounds > 1 for decision in given.shardings),
    ),
    # What collectives on those values overlap with.
    PassEntry(Overlap, {"overlaps": ()}, lambda given: given.num_parts > 1),
    # One stage of several, with what it sends and receives.
    PassEntry(Stages, {"stage_cuts": (), "pipe_stage": (), "weights_lag": ()}, lambda given: given.pipe is not None),
    # Products of linear layers in fp8, as one rank has them.
    PassEntry(Multiply, {"products": ("node", "left", "right", "in_fp8"), "fp8": ()}, lambda given: given.products),
    # Huge parameters a slice at a time.
    PassEntry(Slice, {"slices": ("value", "num_tiles", "over")}, lambda given: given.slices),
    # Micro-batches one after the other.
    PassEntry(Accumulate, {"num_micro_batches": (), "by_layer": ()}, lambda given: given.num_micro_batches > 1),
)

# The prepared graph, as a plan says.
PLAN = (
    PassEntry(Tile, {"tiles": ("value", "num_tiles", "over")}),  # output layer and loss a few rows at a time
    # What is outside layers in pieces that are decided about one by one.
    PassEntry(
        Divide, {"pieces": ("name", "first", "last", "back_first", "back_last", "values")}, lambda plan, _: plan.pieces
    ),
    # Activations that are not kept, computed again in backward.
    PassEntry(Recompute, {"recomputes": ("value",), "extra_keeps": ()}),
    # Those that all ranks of the model axis have, kept as one part on each.
    PassEntry(Spread, {"spreads": ("value",)}, lambda plan, _: plan.spreads or plan.model > 1),
    # Those that wait for backward in 8 bits.
    PassEntry(Compress, {"compresses": ("value",), "saved": ()}, lambda plan, _: plan.compresses),
    # Activations that wait for backward in a slower tier.
    PassEntry(Offload, {"offloads": ("value", "tier", "free_after", "reload_before")}),
    PassEntry(Shard, {"parameters": ("bucket", "tier")}),  # parameters become views of flat buckets
    # A gather before first use, a release after last.
    PassEntry(Gather, {"gathers": ("bucket", "first", "last")}, lambda plan, _: plan.has_residencies),
    # Gradients into flat buffers, reduced as soon as complete.
    PassEntry(Reduce, {"reduces": ("bucket", "wait_after", "gathered_after", "earlier")}),
    PassEntry(Direct),  # products written straight into those buffers
    # Gradients that wait for the next micro-batch elsewhere.
    PassEntry(
        Gradients, {"gradients": ("bucket", "tier", "free_after", "reload_before")}, lambda plan, _: plan.gradients
    ),
    # Sums of slices, summed again across replicas.
    PassEntry(Across, {"reduces": ("crossed_after",)}, lambda plan, _: plan.replicate > 1),
    # The largest of all gradients, and what frees them of the loss's scale.
    PassEntry(Unscale, {"loss_scaled": ()}, lambda plan, _: plan.loss_scaled),
    # The norm of all gradients, and a factor; the norms of layers.
    PassEntry(
        Clip, {"max_grad_norm": (), "grad_norms": ()}, lambda plan, _: plan.max_grad_norm is not None or plan.grad_norms
    ),
    # Gradients that are asked for by name.
    PassEntry(KeepGradients, {"kept_gradients": ()}, lambda plan, _: plan.kept_gradients),
    # No update where a gradient is not finite.
    PassEntry(CheckGradients, when=lambda plan, _: plan.loss_scaled),
    # The optimizer, on each bucket as soon as it is reduced.
    PassEntry(
        Update, {"states": ("bucket", "tier", "update", "reload_before", "read", "at_once", "delayed", "takes_over")}
    ),
    PassEntry(Buffers),  # mutated buffers written back
    PassEntry(Prefetch, {"gathers": ("issue", "reload", "read")}, optional=True),  # gathers issued ahead of their use
    # Several gathers as one collective.
    PassEntry(Merge, {"gathers": ("merged",)}, lambda plan, _: any(gather.merged for gather in plan.gathers)),
    # What runs on from the step before, awaited where it is needed.
    PassEntry(Settle, {"states": ("back_by",)}, lambda plan, _: plan.states),
    # What is not sent exactly as it is: in few bits, or from second shards on each node.
    PassEntry(QuantiseGathers, {"wires": ("bucket", "gather", "second_shard")}, lambda plan, _: plan.wires),
    PassEntry(QuantiseReductions, {"wires": ("reduce", "hop_after")}, lambda plan, _: plan.wires),
    # Weights that products read in fp8 are sent so.
    PassEntry(CastGathers, {"gathers": ("in_fp8",)}, lambda plan, _: plan.has_casts),
    # No update where a loss is not finite, if that is asked for, or rows have found no room.
    PassEntry(GuardLoss, when=lambda plan, guarded: guarded or plan.sends_rows),
    # Views that collectives on values read.
    PassEntry(Parts, when=lambda plan, _: plan.model > 1),
    # Gathers that ranks of one host need not copy.
    PassEntry(
        InPlace, when=lambda plan, _: plan.gathers and plan.num_ranks > plan.replicate == plan.pipe == 1, optional=True
    ),
)

# A region of the planned graph, in front of Inductor.
REGION = tuple(PassEntry(type(rewrite)) for rewrite in REGION_REWRITES)


def phases() -> Mapping[str, tuple[PassEntry, ...]]:
    """Every rewrite of the graph, in order, by phase."""
    # Inductor takes seconds to import: only who asks for the passes over its kernels pays.
    from zerofx.codegen.inductor.kernel_passes import KERNEL_PASSES

    kernels = tuple(PassEntry(type(entry)) for entry in KERNEL_PASSES)
    return {"capture": CAPTURE, "prepare": PREPARE, "plan": PLAN, "region": (*REGION, *kernels)}


@dataclass(frozen=True)
class PreparationInputs:
    """All that preparations are given; each has the fields of these names.

    ``traced``: the graph comes from autograd's trace. ``loss_scaled``: backward begins with a scale. ``held``: as what
    other steps have their parameters, by name, which are read here. ``shardings``: how the ``num_parts`` ranks of the
    model axis share the graph, ``overlaps`` what stands elsewhere there. ``pipe``: the stage that is kept of it.
    ``products``: which are in fp8, of the recipe of that name. ``slices`` are parameters to take in slices, ``divided``
    the batch tensors that micro-batches divide, which run layer by layer if ``by_layer`` says so.
    """

    traced: bool = False
    loss_scaled: bool = False
    held: Mapping[str, Sequence[ParameterInfo]] = field(default_factory=dict)
    shardings: tuple[ShardingDecision, ...] = ()
    overlaps: tuple[MovedNodes, ...] = ()
    num_parts: int = 1
    pipe: PipeStage | None = None
    fp8: str = ""
    products: tuple[ProductDecision, ...] = ()
    slices: tuple[TileDecision, ...] = ()
    num_micro_batches: int = 1
    divided: frozenset[str] = frozenset()
    by_layer: bool = False

    @classmethod
    def from_plan(cls, plan: Plan, divided: Collection[str]) -> PreparationInputs:
        """The decisions of a plan for a traced graph of all stages, which reads no other step's parameters."""
        return cls(
            traced=True, loss_scaled=plan.loss_scaled,
            shardings=plan.shardings, overlaps=plan.overlaps, num_parts=plan.model,
            fp8=plan.fp8, products=plan.products,
            slices=plan.slices, num_micro_batches=plan.num_micro_batches, divided=frozenset(divided),
            by_layer=plan.by_layer,
        )  # fmt: skip


def run_preparations(step: StepGraph, settings: Settings, given: PreparationInputs) -> None:
    """Run the preparations that ``given`` has something for on a captured graph, in place.

    Raises:
        PlanError: a parameter cannot be worked with in the slices that are asked for.
        InvalidGraphError: what the ranks of the model axis compute is not what the graph does.
    """
    for listed in PREPARE:
        if listed.when(given) and listed.name not in settings.disable:
            preparation: Preparation = listed.instance(**vars(given))
            is_shared = listed.kind is Partition and settings.verify > 0
            whole = whole_calls(step) if is_shared else {}
            preparation.run(step)
            if is_shared:
                check_placements(step, whole, given.num_parts)


def passes(
    layout: BucketLayout, programs: Mapping[int, UpdateProgram], plan: Plan, *, guarded: bool = False
) -> tuple[Pass, ...]:
    """The passes that have something to do for ``plan``, in order; ``guarded`` as the step's graph is."""
    return tuple(entry.instance(layout=layout, programs=programs) for entry in PLAN if entry.when(plan, guarded))


def find(name: str) -> PassEntry:
    """The rewrite that is called ``name``.

    Raises:
        UsageError: none is; lists those that there are.
    """
    listed = {entry.name: entry for entry in (*CAPTURE, *PREPARE, *PLAN, *REGION)}
    if name not in listed:
        raise UsageError(f"expected the name of a pass ({', '.join(listed)}), found {name!r}: see `zerofx opt --list`")
    return listed[name]


@dataclass(frozen=True)
class GraphStage:
    """The graph as text after one pass, and what the pass did (None for the captured graph)."""

    name: str
    text: str
    report: PassReport | None

    def __str__(self) -> str:
        return f"# after {self.name}\n{self.text}"


def check_disabled(settings: Settings) -> None:
    """Check the names in ``ZEROFX_DISABLE`` and ``ZEROFX_KERNELS``.

    Raises:
        UsageError: one of them is nothing that can be left out, or no kernel.
    """
    check_kernels(settings.kernels)
    allowed = {entry.name for entry in (*CAPTURE, *PREPARE, *PLAN) if entry.optional} | OPTIONAL
    unknown = settings.disable - allowed
    if unknown:
        raise UsageError(
            f"expected ZEROFX_DISABLE to name what can be left out ({', '.join(sorted(allowed))}), found "
            f"{', '.join(sorted(unknown))}"
        )


def run_passes(
    step: StepGraph,
    plan: Plan,
    layout: BucketLayout,
    programs: Mapping[int, UpdateProgram],
    settings: Settings,
    after: Callable[[str, float], None] = lambda *_: None,
) -> None:
    """Run all passes on ``step`` in place, and verify it as the settings say; ``after`` is told of each pass, and of
    the seconds that it took."""
    messages = order_on_links(step)
    listed = [p for p in passes(layout, programs, plan, guarded=step.guarded) if p.name not in settings.disable]
    for number, entry in enumerate(listed):
        began = time.perf_counter()
        _run(entry, step, plan)
        seconds = time.perf_counter() - began
        last = number == len(listed) - 1
        if settings.verify == 2 or (settings.verify == 1 and last):
            verify(step, entry.name, plan if last else None)
        if settings.verify and last:
            check_norm(step, layout)
            check_order(step, messages)
        after(entry.name, seconds)


def trace_passes(
    step: StepGraph,
    plan: Plan,
    layout: BucketLayout,
    programs: Mapping[int, UpdateProgram],
    settings: Settings,
    *,
    on_cpu: bool,
    verbose: bool,
) -> tuple[GraphStage, ...]:
    """``run_passes``, which takes much longer with the captured graph and the graph after each pass, as they are
    returned.

    ``verbose``: whether this rank writes what ``ZEROFX_DEBUG`` asks for.
    """
    stages = [GraphStage("capture", step.text(), None)]
    peak, before = liveness(step, on_cpu).peak_bytes, op_counts(step)

    def add(name: str, seconds: float) -> None:
        nonlocal peak, before
        counts, text = op_counts(step), step.text()
        # Most passes have nothing to do in most plans: what holds for a graph holds for its equal.
        now = peak if text == stages[-1].text else liveness(step, on_cpu).peak_bytes
        report = PassReport(name, dict(counts - before), dict(before - counts), peak, now, seconds)
        stages.append(GraphStage(name, text, report))
        peak, before = now, counts
        if verbose and settings.debug:
            _write_report(report, settings.debug)

    run_passes(step, plan, layout, programs, settings, add)
    if verbose and settings.debug >= 5:
        sys.stderr.write("\n\n".join(map(str, stages)) + "\n")
    return tuple(stages)


def run_quietly(
    step: StepGraph,
    plan: Plan,
    layout: BucketLayout,
    programs: Mapping[int, UpdateProgram],
    settings: Settings,
    done: Collection[str] = (),
) -> None:
    """Run all passes but those ``done`` on ``step`` in place, and nothing else: for a plan that is only tried."""
    for entry in passes(layout, programs, plan, guarded=step.guarded):
        if entry.name not in settings.disable and entry.name not in done:
            _run(entry, step, plan)


def _run(graph_pass: Pass, step: StepGraph, plan: Plan) -> None:
    """Run a pass.

    Raises:
        InternalError: it raised what it did not mean to; says how to leave it out, if that can be.
    """
    optional = any(graph_pass.name == listed.name and listed.optional for listed in PLAN)
    remedy = f"Set ZEROFX_DISABLE={graph_pass.name}, which leaves it out" if optional else ""
    with wrap_defects(f"run the pass {graph_pass.name}", remedy, only_own=False):
        graph_pass.run(step, plan)


def _write_report(report: PassReport, debug: int) -> None:
    sys.stderr.write(
        f"{report.name:10} peak {format_bytes(report.peak_bytes_before):>10} -> "
        f"{format_bytes(report.peak_bytes_after):>10}  in {format_seconds(report.seconds)}\n"
    )
    if debug >= 2:
        for sign, ops in (("+", report.added), ("-", report.removed)):
            sys.stderr.writelines(f"  {sign}{count} {op}\n" for op, count in sorted(ops.items()))
