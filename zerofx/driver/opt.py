"""Rewrites run on a saved graph, one after the other and by name: what ``zerofx opt`` does.

Nothing is decided here, and nothing is run that was not asked for: a pass finds the graph as those before it leave it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zerofx.codegen.emit import emit
from zerofx.codegen.inductor.region_rewrites import RegionRewrite, TracedRegion
from zerofx.codegen.kernels.table import kernels_in_use
from zerofx.codegen.regions import cut, regions_of
from zerofx.codegen.step_file import load_source
from zerofx.disk.cache import MALFORMED
from zerofx.driver.saved_graph import SavedGraph
from zerofx.errors import PlanError, UsageError, ZeroFXError
from zerofx.ir.bucketing import layout_of
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.facts import value
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.quantise import BLOCK
from zerofx.ir.text import node_text
from zerofx.optimizers.program import cast_states
from zerofx.passes.verify import verify
from zerofx.pipeline import CAPTURE, PLAN, PREPARE, REGION, PassEntry, PreparationInputs, check_disabled, find, phases
from zerofx.precision import dtype_named
from zerofx.runtime.comm.collectives import is_on_cpu
from zerofx.scheduler.cost.liveness import liveness
from zerofx.scheduler.decide.undecided import summarise
from zerofx.scheduler.plan.plan import Plan
from zerofx.settings import read_settings
from zerofx.units import first_few

# Is told what has run, the text of what it has rewritten, and the region that this is ("" for the step's graph).
Say = Callable[[str, str, str], object]

_NO_PLAN = Plan(0, 1, None, "", "", (), (), ())
_ABOUT = {
    "capture": "what was traced becomes a step's graph",
    "prepare": "a captured graph, before there is a plan",
    "plan": "the prepared graph, as a plan says",
    "region": "each region of the planned graph, in front of Inductor and on its kernels",
}


def list_rewrites() -> Iterator[str]:
    """Every rewrite, a line each, by phase and in order; a star marks those that ``ZEROFX_DISABLE`` may name."""
    for phase, rewrites in phases().items():
        yield f"{phase}: {_ABOUT[phase]}"
        yield from (f"  {entry.name + ('*' if entry.optional else ''):20} {entry.about}" for entry in rewrites)


def rewrite_file(
    source: str | Path, passes: str | None, phase: str | None, plan: Plan | None, save: Path | None, *, every: bool
) -> str:
    """The graph in a file after the passes or the phase that are asked for, as text; ``save``: a file for the graph.

    ``every``: after each rewrite, not only the last.

    Raises:
        ZeroFXError: there is no such graph, or it cannot be rewritten so.
    """
    stages: dict[tuple[str, str], str] = {}

    def say(name: str, text: str, region: str) -> None:
        stages[region, name if every else ""] = text

    saved = SavedGraph.load(source)
    if passes is not None and phase is not None:
        raise UsageError("expected --passes or --phase, found both: name the passes, or the phase that has them")
    names = passes.split(",") if passes is not None else None
    asked = phase_passes(phase, plan, saved) if names is None else [find(n.strip()) for n in names]
    if not asked:
        say("nothing", saved.step.text(), "")
    result = rewrite(saved, asked, plan, say)
    if save is not None:
        result.save(save)
    return "\n\n".join(f"{_head(*at)}{text}" for at, text in stages.items())


def _head(region: str, name: str) -> str:
    parts = [f"after {name}" if name else "", f"region {region}" if region else ""]
    return f"# {' in '.join(filter(None, parts))}\n" if any(parts) else ""


def phase_passes(phase: str | None, plan: Plan | None, saved: SavedGraph) -> list[PassEntry]:
    """The passes of a phase, or of all that the graph can go through (None), that have something to do for ``plan``.

    Raises:
        UsageError: the phase needs a plan, and there is none.
    """
    settings = read_settings()
    check_disabled(settings)
    if phase == "region":
        return list(REGION)
    if phase == "plan" and plan is None:
        raise _no_plan("the phase plan")
    prepared = [entry for entry in PREPARE if entry.when(_inputs(saved, plan or _NO_PLAN))]
    planned = [entry for entry in PLAN if plan is not None and entry.when(plan, saved.step.guarded)]
    asked = {"prepare": prepared, "plan": planned}.get(phase or "", [*prepared, *planned])
    return [entry for entry in asked if entry.name not in settings.disable]


def _inputs(saved: SavedGraph, plan: Plan) -> PreparationInputs:
    """The decisions of a plan about a saved graph, which is of all stages and has no other step's parameters.

    Raises:
        UsageError: the plan is for another.
    """
    if plan.pipe > 1 or any(bucket.lent for bucket in plan.buckets):
        whose = "one of a stage" if plan.pipe > 1 else "one that reads parameters of other steps"
        raise UsageError(
            f"expected a plan for a graph by itself, found {whose}: a saved graph has not what the others hold; "
            f"step.stages has the graph after each pass"
        )
    return PreparationInputs.from_plan(plan, saved.divided)


def rewrite(saved: SavedGraph, passes: Sequence[PassEntry], plan: Plan | None, say: Say) -> SavedGraph:
    """Run ``passes``, with the decisions of ``plan``, on the saved graph, which they edit, and check it after each.

    Raises:
        UsageError: a pass needs a plan, or another graph.
        PlanError: the plan is for another graph.
        InvalidGraphError: a pass has left a graph that breaks a rule.
    """
    _check(passes, plan)
    ordered = plan or _NO_PLAN
    step, layout = saved.step, saved.layout
    for entry in passes:
        if entry in REGION:
            break
        if entry in PLAN and layout is None:
            layout = _layout(step, saved, ordered)
            step = step.clone()  # as the driver carries plans out: what passes put in is numbered alike
        with _blame_graph(entry.name):
            _run(entry, step, saved, layout, ordered)
        verify(step, entry.name)
        say(entry.name, step.text(), "")
    if of_regions := [item for item in passes if item in REGION]:
        _rewrite_regions(step, of_regions, say)
    return replace(saved, step=step, layout=layout)


def _run(listed: PassEntry, step: StepGraph, saved: SavedGraph, layout: BucketLayout | None, plan: Plan) -> None:
    if listed in PREPARE:
        listed.instance(**vars(_inputs(saved, plan))).run(step)
        return
    assert layout is not None, "passes of a plan have one"
    updated = (bucket for bucket in layout.buckets if bucket.trainable)
    programs = {
        bucket.index: cast_states(saved.programs[bucket.slots[0].source], bucket.state_dtype) for bucket in updated
    }
    listed.instance(layout=layout, programs=programs).run(step, plan)


@contextlib.contextmanager
def _blame_graph(name: str) -> Iterator[None]:
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


def _check(passes: Sequence[PassEntry], plan: Plan | None) -> None:
    begun = False
    for entry in passes:
        if entry in CAPTURE:
            raise UsageError(
                f"expected passes on a graph that has been captured, found {entry.name}, which is for one that is "
                f"being traced: `zerofx opt --list` has those of the other phases"
            )
        if plan is None and (entry in PLAN or entry.decisions):
            raise _no_plan(entry.name)
        if begun and entry not in REGION:
            raise UsageError(f"expected passes of regions after all others, found {entry.name} after one of those")
        begun = entry in REGION


def _no_plan(name: str) -> UsageError:
    return UsageError(
        f"expected a plan for {name}, found none: give --plan PLAN.json, which `zerofx plan --save` writes"
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
        casts_apart=plan.has_casts, in_parts=plan.has_parts, reduce_dtype=reduced, state_dtype=stored,
    )  # fmt: skip
    if tuple(map(summarise, layout.buckets)) != plan.buckets:
        raise PlanError(
            f"expected a graph with the buckets that the plan is for "
            f"({first_few(bucket.name for bucket in plan.buckets)}), found "
            f"{first_few(bucket.name for bucket in layout.buckets)}, or others of these names: save graph and plan "
            f"together, with `zerofx plan --save PLAN.json --save-graph GRAPH.json`"
        )
    return layout


@dataclass(frozen=True)
class _Watched:
    """A rewrite of a region that is told of, with the text of what it has rewritten."""

    inner: RegionRewrite
    say: Say
    region: str

    @property
    def name(self) -> str:
        return self.inner.name

    def run(self, traced: TracedRegion, /) -> None:
        self.inner.run(traced)
        self.say(self.name, "\n".join(map(node_text, traced.graph.nodes)), self.region)


def _rewrite_regions(step: StepGraph, listed: Sequence[PassEntry], say: Say) -> None:
    """Trace each distinct region that would be compiled, from the source that would be emitted, and rewrite it."""
    # Inductor takes seconds to import: only who asks for regions pays.
    from zerofx.codegen.inductor.compile import trace_and_rewrite

    kernels = kernels_in_use(read_settings().kernels, step.device)
    instructions = cut(step)
    live = liveness(step, is_on_cpu(step.device), compiles_regions=True)
    emitted = emit(step, instructions, live, "Regions of a step.")
    namespace = load_source(emitted.source, "step.py")
    first = {region.key: region for region in reversed(regions_of(instructions))}
    for key, name in emitted.functions.items():
        region = first[key]
        if region.inputs and not region.is_update:
            watched = [_Watched(entry.instance(), say, name) for entry in listed]
            trace_and_rewrite(namespace[name], [value(node) for node in region.inputs], kernels, watched)
