"""The stages of a step on the axis pipe: cut alike on all ranks, each of which has its own from then on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerofx.driver.captures import Captures
from zerofx.driver.prepared import Earlier, Request
from zerofx.errors import UsageError
from zerofx.ir.bucketing import layout_of
from zerofx.ir.facts import is_random, origin
from zerofx.ir.graph import PipeStage, StepGraph
from zerofx.passes.lib.draws_ahead import find_unforeseen_draw
from zerofx.passes.lib.message_check import check_messages
from zerofx.passes.prepare.stages import check_stages
from zerofx.runtime.state.parameter_groups import group_of_parameters, histories_of
from zerofx.scheduler.search.stage_cuts import decide_stages, name_cuts


@dataclass(frozen=True)
class CutStep:
    """A captured step as the ranks of each stage run it, and the parts of the forward that later stages begin with."""

    stages: tuple[Captures, ...]
    cuts: tuple[int, ...] = ()


def cut_into_stages(request: Request, captures: Captures, earlier: Earlier | None = None) -> CutStep:
    """The captured step in the stages of the axis pipe: those that ``earlier`` has, if there is one; all of it as the
    only one without such an axis.

    Raises:
        UsageError: the step cannot run in as many stages.
    """
    num_stages = request.mesh.pipe
    if num_stages == 1:
        return CutStep((captures,))
    if len(captures.candidates) > 1:
        raise UsageError(
            f"expected accumulate to be a number where the mesh has an axis 'pipe', found "
            f"accumulate={request.options.accumulate!r}: say how many micro-batches there are"
        )
    step = captures.whole_graph(captures.candidates[0])
    check_stages(step)
    draw, draws = find_unforeseen_draw(step), any(map(is_random, step.calls()))
    if draw is not None:
        raise UsageError(
            f"expected random operators whose draws depend on shapes alone where the mesh has an axis 'pipe', found "
            f"{draw.target} in {origin(draw).layer or 'the model'}: leave the axis out"
        )
    cuts = decide_stages(step, request.mesh, request.machine) if earlier is None else earlier.shared.cuts
    names = name_cuts(step, request.machine, cuts)
    pipes = [PipeStage(number, num_stages, names, draws=draws) for number in range(num_stages)]
    stages = [captures.stage_captures(pipe) for pipe in pipes]
    num_micro_batches = captures.candidates[0]
    graphs = [staged.rank_graph(num_micro_batches) for staged in stages]
    check_messages(graphs, min(num_micro_batches, num_stages + 1))
    if earlier is not None:
        _check_places(graphs, earlier)
    if not step.gradients:
        return CutStep(tuple(stages), cuts)
    groups = group_of_parameters(request.model, request.optimizers, step.parameters, set(step.gradients))
    histories = histories_of(request.model, request.optimizers)
    layouts = [layout_of(graph, groups, request.mesh, histories=histories) for graph in graphs]
    counts = [sum(bucket.trainable for bucket in layout.buckets) for layout in layouts]
    for number, count in enumerate(counts):
        if not count:
            raise UsageError(
                f"expected parameters to train in each of {num_stages} stages, found none in number {number}: give "
                f"fewer ranks on the axis 'pipe'"
            )
    return CutStep(
        tuple(
            captures.stage_captures(replace(pipe, first_bucket=sum(counts[: pipe.number]), num_buckets=sum(counts)))
            for pipe in pipes
        ),
        cuts,
    )


def _check_places(graphs: Sequence[StepGraph], earlier: Earlier) -> None:
    """Raises:
    UsageError: a parameter is first read by another stage than the one that has it.
    """
    for number, graph in enumerate(graphs):
        for info in graph.parameters:
            place = earlier.state.homes.get(info.source, number)
            if place != number:
                raise UsageError(
                    f"expected {info.source} to be read first by stage {place}, which has it since the first step, "
                    f"found that stage {number} reads it before: give batches that go through the same layers"
                )
