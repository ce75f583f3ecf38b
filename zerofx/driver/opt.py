"""Rewrites run on a saved graph, one after the other and by name: what ``zerofx opt`` does.

Nothing is decided here, and nothing is run that was not asked for: a pass finds the graph as those before it leave it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch import nn

from zerofx.capture.normalise.joint import Joint
from zerofx.capture.normalise.phase import NORMALISATIONS
from zerofx.capture.trace import capture
from zerofx.codegen.emit import emit
from zerofx.codegen.inductor.region_rewrites import TracedRegion
from zerofx.codegen.kernels.table import kernels_in_use
from zerofx.codegen.regions import cut, regions_of
from zerofx.codegen.step_file import load_source
from zerofx.disk.cache import MALFORMED
from zerofx.driver.saved_graph import SavedGraph
from zerofx.errors import PlanError, UsageError, ZeroFXError
from zerofx.ir.batch import Batch
from zerofx.ir.bucketing import layout_of
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.edit import Rewrite
from zerofx.ir.facts import value
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.quantise import BLOCK
from zerofx.ir.text import node_text
from zerofx.optimizers.stored import storing_states
from zerofx.options import CompileOptions
from zerofx.passes.verify import verify
from zerofx.pipeline import CAPTURE, PLAN, PREPARE, REGION, Listed, find, pass_texts, with_pass_texts
from zerofx.precision import dtype_named
from zerofx.runtime.comm.collectives import is_on_cpu
from zerofx.scheduler.cost.liveness import liveness
from zerofx.scheduler.decide.undecided import summarise
from zerofx.scheduler.plan.pipeline_text import PassText
from zerofx.scheduler.plan.plan import Plan
from zerofx.settings import read_settings

# Is told what has run, the text of what it has rewritten, and the region that this is ("" for the step's graph).
Say = Callable[[str, str, str], object]

T = TypeVar("T")

_NO_PLAN = Plan(0, 1, None, "", "", (), (), ())


def phase_passes(phase: str | None, plan: Plan | None, *, guarded: bool, disabled: Collection[str]) -> list[PassText]:
    """The passes of a phase, or of all that a graph can go through (None), that have something to do for ``plan``.

    Raises:
        UsageError: the phase needs a plan, and there is none; or it is no phase of a saved graph.
    """
    if phase == "capture":
        raise _refused_capture("the phase capture")
    if phase == "plan" and plan is None:
        raise _no_plan("the phase plan")
    if phase == "region":
        return [PassText(entry.name) for entry in REGION]
    asked = {"prepare": PREPARE, "plan": PLAN}.get(phase or "", (*PREPARE, *(PLAN if plan is not None else ())))
    names = {element.name for element in asked} - set(disabled)
    return [order for order in pass_texts(plan or _NO_PLAN, guarded=guarded) if order.name in names]


def rewrite(saved: SavedGraph, passes: Sequence[PassText], plan: Plan | None, say: Say) -> SavedGraph:
    """Run ``passes`` on the saved graph, which they edit, and check it after each of them.

    Passes have the decisions that their options give, or else those of ``plan``.

    Raises:
        UsageError: there is no such pass, it has no such option, or it needs a plan, or another graph.
        PlanError: the plan is for another graph.
        InvalidGraphError: a pass has left a graph that breaks a rule.
    """
    listed = [find(element.name) for element in passes]
    _check(passes, listed, plan)
    ordered = with_pass_texts(plan or _NO_PLAN, passes)
    step, layout = saved.step, saved.layout
    for entry in listed:
        if entry in REGION:
            break
        if entry in PLAN and layout is None:
            layout = _layout(step, saved, ordered)
            step = step.clone()  # as the driver carries plans out: what passes put in is numbered alike
        with _on_this_graph(entry.name):
            _run(entry, step, saved, layout, ordered)
        verify(step, entry.name)
        say(entry.name, step.text(), "")
    if of_regions := [item for item in listed if item in REGION]:
        _rewrite_regions(step, of_regions, say)
    return replace(saved, step=step, layout=layout)


def _run(listed: Listed, step: StepGraph, saved: SavedGraph, layout: BucketLayout | None, plan: Plan) -> None:
    if listed in PREPARE:
        preparation = listed.instance(
            slices=plan.slices, num_micro_batches=plan.num_micro_batches, divided=saved.divided,
            shardings=plan.shardings, overlaps=plan.overlaps, num_parts=plan.model,
        )  # fmt: skip
        preparation.run(step)
        return
    assert layout is not None, "passes of a plan have one"
    updated = (bucket for bucket in layout.buckets if bucket.trainable)
    programs = {
        bucket.index: storing_states(saved.programs[bucket.slots[0].source], bucket.state_dtype) for bucket in updated
    }
    listed.instance(layout=layout, programs=programs).run(step, plan)


@contextlib.contextmanager
def _on_this_graph(name: str) -> Iterator[None]:
    """A pass finds the graph that those before it leave, unless it was asked for without them.

    Raises:
        UsageError: the pass cannot be run on the graph; says what happens.
    """
    try:
        yield
    except MALFORMED as error:
        if isinstance(error, ZeroFXError):
            raise
        raise UsageError(
            f"expected a graph that the passes before {name} have left, found one that it cannot be run on "
            f"({type(error).__name__}: {error}): run those first, in the order of `zerofx opt --list`"
        ) from error


def _check(passes: Sequence[PassText], listed: Sequence[Listed], plan: Plan | None) -> None:
    begun = False
    times_of = Counter(given.name for given in passes if given.options)
    if twice := [name for name, times in times_of.items() if times > 1]:
        raise UsageError(f"expected the options of a pass once in a pipeline, found {', '.join(twice)} with several")
    for given, entry in zip(passes, listed, strict=True):
        if entry in CAPTURE:
            raise _refused_capture(entry.name)
        if plan is None and (entry in PLAN or (entry.decisions and not given.options)):
            raise _no_plan(entry.name, "" if entry in PLAN else f", or {entry.name} its options")
        if begun and entry not in REGION:
            raise UsageError(f"expected passes of regions after all others, found {entry.name} after one of those")
        begun = entry in REGION


def _no_plan(name: str, otherwise: str = "") -> UsageError:
    return UsageError(
        f"expected a plan for {name}, found none: give --plan PLAN.json, which `zerofx plan --save` writes{otherwise}"
    )


def _refused_capture(name: str) -> UsageError:
    return UsageError(
        f"expected passes on a graph that has been captured, found {name}, which is for one that is being traced: "
        f"`zerofx opt MODULE:FUNCTION --phase capture` runs that phase"
    )


def _layout(step: StepGraph, saved: SavedGraph, plan: Plan) -> BucketLayout:
    """The buckets of the graph as it comes to the first pass of a plan.

    Raises:
        PlanError: they are not the plan's.
    """
    reduced, stored = (
        next((dtype_named(name) for name in names if name is not None), None)
        for names in ([b.reduce_dtype for b in plan.buckets], [b.state_dtype for b in plan.buckets])
    )
    layout = layout_of(
        step, saved.groups, plan.mesh, block=1 if plan.wire == "exact" else BLOCK,
        in_parts=plan.has_parts, reduce_dtype=reduced, state_dtype=stored,
    )  # fmt: skip
    if tuple(map(summarise, layout.buckets)) != plan.buckets:
        raise PlanError(
            f"expected a graph with the buckets that the plan is for "
            f"({', '.join(bucket.name for bucket in plan.buckets)}), found "
            f"{', '.join(bucket.name for bucket in layout.buckets)}, or others of these names: save graph and plan "
            f"together, with `zerofx plan --save PLAN.json --save-graph GRAPH.json`"
        )
    return layout


@dataclass(frozen=True)
class _Watched(Generic[T]):
    """A rewrite that is told of, with the ``text`` of what it has rewritten."""

    inner: Rewrite[[T]]
    say: Say
    text: Callable[[T], str]
    region: str = ""

    @property
    def name(self) -> str:
        return self.inner.name

    def run(self, traced: T, /) -> None:
        self.inner.run(traced)
        self.say(self.name, self.text(traced), self.region)


def _rewrite_regions(step: StepGraph, listed: Sequence[Listed], say: Say) -> None:
    """Trace each distinct region that would be compiled, from the source that would be emitted, and rewrite it."""
    # Inductor takes seconds to import: only who asks for regions pays.
    from zerofx.codegen.inductor.compile import rewritten

    kernels = kernels_in_use(read_settings().kernels, step.device)
    instructions = cut(step)
    live = liveness(step, is_on_cpu(step.device), compiles_regions=True)
    emitted = emit(step, instructions, live, "Regions of a step.")
    namespace = load_source(emitted.source, "step.py")
    first = {region.key: region for region in reversed(regions_of(instructions))}
    for key, name in emitted.functions.items():
        region = first[key]
        if region.inputs and not region.is_update:
            watched = [_Watched(entry.instance(), say, _region_text, name) for entry in listed]
            rewritten(namespace[name], [value(node) for node in region.inputs], kernels, watched)


def _region_text(region: TracedRegion) -> str:
    return "\n".join(map(node_text, region.graph.nodes))


def _joint_text(joint: Joint) -> str:
    return joint.step.text()


def rewrite_traced(model: nn.Module, batch: Batch, options: CompileOptions, say: Say) -> None:
    """Trace a model, and run the rewrites of the capture phase on what comes of it.

    Raises:
        CaptureError: the model cannot be captured.
    """
    watched = [_Watched(normalisation, say, _joint_text) for normalisation in NORMALISATIONS]
    capture(model, batch, loss_fn=options.objective, compute_dtype=options.casts(model), rewrites=watched)
