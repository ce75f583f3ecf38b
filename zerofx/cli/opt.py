"""What ``zerofx opt`` prints: graphs after rewrites, pipelines, and the list of all rewrites."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zerofx.cli.arguments import make_training
from zerofx.driver.opt import Say, phase_passes, rewrite, rewrite_traced
from zerofx.driver.plan_only import batch_to_capture
from zerofx.driver.saved_graph import SavedGraph
from zerofx.errors import UsageError
from zerofx.options import check_options
from zerofx.pipeline import check_disabled, phases
from zerofx.scheduler.plan.pipeline_text import PassText, pipeline_text, read_pipeline
from zerofx.scheduler.plan.plan import Plan
from zerofx.settings import read_settings

_ABOUT = {
    "capture": "what was traced becomes a step's graph",
    "prepare": "a captured graph, before there is a plan",
    "plan": "the prepared graph, as a plan says",
    "region": "each region of the planned graph, in front of Inductor and on its kernels",
}


def listed() -> Iterator[str]:
    """Every rewrite, a line each, by phase and in order; a star marks those that ``ZEROFX_DISABLE`` may name."""
    for phase, rewrites in phases().items():
        yield f"{phase}: {_ABOUT[phase]}"
        yield from (f"  {entry.name + ('*' if entry.optional else ''):20} {entry.about}" for entry in rewrites)


def pipeline_of(passes: str | None, phase: str | None, plan: Plan | None, *, guarded: bool) -> list[PassText]:
    """The passes that are asked for by their text, or by phase.

    Raises:
        UsageError: both are given, or the text is none of a pipeline.
    """
    if passes is not None and phase is not None:
        raise UsageError("expected --passes or --phase, found both: name the passes, or the phase that has them")
    if passes is not None:
        return list(read_pipeline(passes))
    settings = read_settings()
    check_disabled(settings)
    return phase_passes(phase, plan, guarded=guarded, disabled=settings.disable)


def rewritten(
    source: str, passes: str | None, phase: str | None, plan: Plan | None, save: Path | None, *, every: bool
) -> str:
    """The graph in the file ``source``, or traced by the function that it names, after what is asked for.

    ``every``: after each rewrite, not only the last. ``save``: a file for the graph.

    Raises:
        ZeroFXError: there is no such graph, or it cannot be rewritten so.
    """
    stages: dict[tuple[str, str], str] = {}

    def say(name: str, text: str, region: str) -> None:
        stages[region, name if every else ""] = text

    if source.endswith(".json"):
        _rewrite_file(source, passes, phase, plan, save, say)
    elif phase == "capture" and passes is None and save is None:
        _trace(source, say)
    else:
        raise UsageError(
            f"expected GRAPH.json, or MODULE:FUNCTION with --phase capture alone, found {source!r}: save its graph "
            f"with `zerofx plan {source} --save-graph GRAPH.json`"
        )
    return "\n\n".join(f"{_head(*at)}{text}" for at, text in stages.items())


def _head(region: str, name: str) -> str:
    parts = [f"after {name}" if name else "", f"region {region}" if region else ""]
    return f"# {' in '.join(filter(None, parts))}\n" if any(parts) else ""


def _rewrite_file(
    source: str, passes: str | None, phase: str | None, plan: Plan | None, save: Path | None, say: Say
) -> None:
    saved = SavedGraph.load(source)
    asked = pipeline_of(passes, phase, plan, guarded=saved.step.guarded)
    if not asked:
        say("nothing", saved.step.text(), "")
    result = rewrite(saved, asked, plan, say)
    if save is not None:
        result.save(save)


def _trace(source: str, say: Say) -> None:
    model, _, batch, loss_fn, forward = make_training(source, "meta")
    options = check_options(stage=3, loss_fn=loss_fn, forward=forward, machine="cpu")
    rewrite_traced(model, batch_to_capture(model, batch, options), options, say)


def print_pipeline(passes: str | None, phase: str | None, plan: Plan | None) -> str:
    """The passes that are asked for, with what ``plan`` decides for them, as ``--passes`` takes them."""
    return pipeline_text(pipeline_of(passes, phase, plan, guarded=False))
