"""The seconds of a step in stages: each stage runs its micro-batches in order, and waits for what others hand on.

All micro-batches go forward through a stage before the first comes back, but in the last stage, where each comes back
at once (GPipe, 1811.06965). Or a stage takes turns, forward and backward, once it is as many micro-batches ahead as
stages come after it (1F1B, 1806.03377). With p stages that take F and B for a micro-batch, each idles (p - 1)(F + B) of
a step either way; it holds what backward reads of all micro-batches, or of no more than stages from it to the last.

Backward falls into what leads to the gradients that are sent on, and weight gradients, W of its seconds. These may come
some turns later, in the time until the next message (2401.10241): as many as there are stages before this one. Each
then idles for (p - 1)(F + B - 2W), and holds what weight gradients read of p micro-batches (ZB-H1 there).

Or a stage has v chunks of the model, each p chunks after the one before (2104.04473), and idles for (p - 1)(F + B)/v.
With two, the first stage holds what backward reads of 2p - 1/2 micro-batches at most. All micro-batches may go through
a chunk before the next (round robin, 2604.27085): a stage idles as long, and holds what backward reads of all.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zerofx.ir import ops
from zerofx.ir.facts import Phase, chunk_of, origin
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import backward_lag, forward_lag, turns
from zerofx.ir.streams import COMPUTE, stream_of
from zerofx.scheduler.analysis.stages_of_nodes import weight_gradients
from zerofx.scheduler.cost.simulate import Simulation
from zerofx.scheduler.plan.plan import Plan

_NO_LONGER = 1.001  # times the least seconds
_Piece = Literal["forward", "backward", "weights"]


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a stage, or of one of its chunks: of a micro-batch forward and backward, and once a step besides, the
    update above all.

    ``forward_message`` and ``backward_message``: until what it sends is with its neighbour. ``weights``: the part of
    backward that weight gradients take, which may come some turns later. ``exposed``: in all of it, what computation
    waits for but messages.
    """

    forward: float
    backward: float
    rest: float = 0.0
    forward_message: float = 0.0
    backward_message: float = 0.0
    weights: float = 0.0
    exposed: float = 0.0


@dataclass(frozen=True)
class PipelineSeconds:
    """Seconds of a step in stages, in how many of them each stage idles, and with that waits for anything
    (``exposed``); the most micro-batches that are under way in each: forward has run, and backward has not. A chunk
    counts as its part of the stage."""

    step: float
    idle: tuple[float, ...]
    exposed: tuple[float, ...]
    under_way: tuple[float, ...]


def predict_stage(plan: Plan, pipeline: PipelineSeconds, why: str = "") -> Plan:
    """The plan of a stage with the seconds that it takes among the others; ``why``: micro-batches are in this order."""
    assert plan.prediction is not None, "its own have been simulated"
    reasons = filter(None, [plan.micro_batches_reason, why])
    return replace(plan, micro_batches_reason="; ".join(reasons)).with_prediction(
        replace(
            plan.prediction,
            step_seconds=pipeline.step,
            exposed_seconds=pipeline.exposed[plan.pipe_stage],
            idle_seconds=pipeline.idle[plan.pipe_stage],
        )
    )


def stage_seconds(step: StepGraph, simulation: Simulation) -> tuple[StageSeconds, ...]:
    """The seconds of the chunks of the stage that ``step`` is, as it is simulated by itself; what is once a step, and
    what computation waits for, count for the first."""
    assert step.pipe is not None, "a step in stages"
    own = step.pipe.chunks
    seconds = {phase: dict.fromkeys(own, 0.0) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)}
    messages = {phase: dict(of_chunks) for phase, of_chunks in seconds.items()}
    weights, apart, exposed, chunk = dict.fromkeys(own, 0.0), set(weight_gradients(step)), 0.0, own[0]
    chunks = {origin(node).layer: known for node in step.calls() if (known := chunk_of(node)) is not None}
    for node, timing in simulation.timings.items():
        # What passes have put in is of its layer's chunk, or of that of what stands before it.
        known = chunk_of(node)
        chunk = chunks.get(origin(node).layer, chunk) if known is None else known
        phase, waited = origin(node).phase, node.args[0] if node.target is ops.wait else None
        if node.target is ops.receive_value:
            messages[phase][chunk] += timing.num_runs * timing.seconds
        elif stream_of(node) == COMPUTE and getattr(waited, "target", None) not in ops.MESSAGES:
            taken = timing.num_runs * (timing.seconds + timing.exposed_seconds)
            seconds[phase][chunk] += taken
            weights[chunk] += taken if node in apart else 0.0
            exposed += timing.num_runs * timing.exposed_seconds
    num, once = step.num_micro_batches, sum((*seconds[Phase.UPDATE].values(), *messages[Phase.UPDATE].values()))
    return tuple(
        StageSeconds(
            seconds[Phase.FORWARD][each] / num,
            seconds[Phase.BACKWARD][each] / num,
            once if each == own[0] else 0.0,
            messages[Phase.FORWARD][each] / num,
            messages[Phase.BACKWARD][each] / num,
            weights[each] / num,
            exposed if each == own[0] else 0.0,
        )
        for each in own
    )


def chunks_in_order(stages: Sequence[Sequence[StageSeconds]]) -> list[StageSeconds]:
    """The chunks of all stages, in the order in which a micro-batch goes through them."""
    return list(itertools.chain.from_iterable(zip(*stages, strict=True)))


def lags_up_to(most: int, num_micro_batches: int, splits: Sequence[bool]) -> tuple[int | None, ...]:
    """Turns after which each stage computes weight gradients: as many as stages come before it, ``most`` at most.

    ``splits``: the stages that can compute them apart. Nobody waits for what the first does in backward.
    """
    most = min(most, num_micro_batches - 1)
    return tuple(min(number, most) if number and split else None for number, split in enumerate(splits))


def choose_lags(
    chunks: Sequence[StageSeconds], num_micro_batches: int, most: int, splits: Sequence[bool]
) -> tuple[int | None, ...]:
    """The fastest of ``lags_up_to`` any number up to ``most``, each stage's as small as it can be for that: what weight
    gradients read is held until then."""

    def seconds(lags: Sequence[int | None]) -> float:
        return simulate_stages(chunks, num_micro_batches, by_turns=True, lags=lags, num_stages=len(splits)).step

    candidates = [lags_up_to(each, num_micro_batches, splits) for each in range(most + 1)]
    longest = _NO_LONGER * min(map(seconds, candidates))
    chosen = next(lags for lags in candidates if seconds(lags) <= longest)
    for number in reversed(range(len(splits))):
        while lag := chosen[number]:
            fewer = (*chosen[:number], lag - 1, *chosen[number + 1 :])
            if seconds(fewer) > longest:
                break
            chosen = fewer
    return chosen


def least_pipeline_seconds(seconds: float, waited: float, num_stages: int, num_micro_batches: int) -> float:
    """A lower bound of the seconds of a step in stages, however it is cut; ``seconds``: of a micro-batch through all.

    A stage cannot begin before the stages before it are through with the first forward, and but for weight gradients
    apart they have as long to go as it ends: of their seconds for a micro-batch it idles for the part ``waited``. So
    of S seconds, stage k has at most (S - waited x those of stages before it) / m for each of m micro-batches.
    """
    return waited * seconds / (1.0 - (1.0 - waited / num_micro_batches) ** num_stages)


def simulate_stages(
    chunks: Sequence[StageSeconds],
    num_micro_batches: int,
    *,
    by_turns: bool = False,
    lags: Sequence[int | None] = (),
    num_stages: int | None = None,
) -> PipelineSeconds:
    """Run the micro-batches through stages; what one receives is on its way as long as its own messages say.

    ``by_turns``: backward of a micro-batch before the forward of later ones. ``lags``: how many turns later each stage
    computes weight gradients, None for with the rest of backward. ``chunks``: in order, those of ``num_stages`` stages
    by turns; None for one each.
    """
    num_chunks, num_stages = len(chunks), num_stages or len(chunks)
    apart = [*lags] or [None] * num_stages
    runs = [
        list(_run_stage(stage, num_chunks, num_stages, num_micro_batches, by_turns, apart[stage]))
        for stage in range(num_stages)
    ]
    done: dict[tuple[_Piece, int, int], float] = {}
    free, places = [0.0] * num_stages, [0] * num_stages
    while any(place < len(run) for place, run in zip(places, runs, strict=True)):
        for number, run in enumerate(runs):
            while places[number] < len(run):
                piece, chunk, batch = run[places[number]]
                sender, message, seconds = _needs(piece, chunk, chunks[chunk], is_apart=apart[number] is not None)
                is_fed = sender in range(num_chunks)
                if is_fed and (piece, sender, batch) not in done:
                    break
                ready = done[piece, sender, batch] + message if is_fed else 0.0
                free[number] = done[piece, chunk, batch] = max(free[number], ready) + seconds
                places[number] += 1
    of_stages = [chunks[stage::num_stages] for stage in range(num_stages)]
    rest = [sum(each.rest for each in own) for own in of_stages]
    total = max(map(operator.add, free, rest))
    busy = [num_micro_batches * sum(each.forward + each.backward for each in own) for own in of_stages]
    idle = [max(0.0, total - own - once) for own, once in zip(busy, rest, strict=True)]
    exposed = [own + sum(each.exposed for each in stage) for own, stage in zip(idle, of_stages, strict=True)]
    under_way = [_most_under_way(run) / len(own) for run, own in zip(runs, of_stages, strict=True)]
    return PipelineSeconds(total, tuple(idle), tuple(exposed), tuple(under_way))


def simulate_weights_apart(
    chunks: Sequence[StageSeconds], num_micro_batches: int, splits: Sequence[bool]
) -> PipelineSeconds:
    """The seconds of stages by turns, with weight gradients apart as late as ``choose_lags`` has them."""
    lags = choose_lags(chunks, num_micro_batches, len(splits) - 1, splits)
    return simulate_stages(chunks, num_micro_batches, by_turns=True, lags=lags, num_stages=len(splits))


def _needs(piece: _Piece, chunk: int, seconds: StageSeconds, *, is_apart: bool) -> tuple[int, float, float]:
    """The chunk that a piece waits for, how long what that sends takes, and how long the piece takes."""
    if piece == "forward":
        return chunk - 1, seconds.forward_message, seconds.forward
    if piece == "backward":
        return chunk + 1, seconds.backward_message, seconds.backward - (seconds.weights if is_apart else 0.0)
    return -1, 0.0, seconds.weights


def _run_stage(
    stage: int, num_chunks: int, num_stages: int, num_micro_batches: int, by_turns: bool, weights_lag: int | None
) -> Iterator[tuple[_Piece, int, int]]:
    """The pieces of a stage in order, each with its chunk and micro-batch."""
    own, last = range(stage, num_chunks, num_stages), num_chunks - 1
    if not by_turns:
        for chunk, batch in itertools.product(own, range(num_micro_batches)):
            yield "forward", chunk, batch
            if chunk == last:
                yield "backward", chunk, batch
        for chunk, batch in itertools.product(reversed(own), range(num_micro_batches)):
            if chunk != last:
                yield "backward", chunk, batch
        return
    lags = [forward_lag(chunk, num_stages) for chunk in own]
    back = [backward_lag(chunk, num_chunks, num_stages) for chunk in reversed(own)]
    if len(own) == 1:
        back = [min(back[0], num_micro_batches - 1)]
    lags += back if weights_lag is None else [*back, back[-1] + weights_lag]
    pieces: list[tuple[_Piece, int]] = [("forward", chunk) for chunk in own]
    pieces += [("backward", chunk) for chunk in reversed(own)]
    for turn in turns(lags, num_micro_batches, num_chunks=len(own), weights_apart=weights_lag is not None):
        for number, batch in turn:
            yield from ((*piece, batch) for piece in pieces[number:][:1] or [("weights", chunk) for chunk in own])


def _most_under_way(run: Sequence[tuple[_Piece, int, int]]) -> int:
    """The most forwards whose backward, with weight gradients, has not run, at any time of a stage."""
    ends: _Piece = "weights" if any(piece == "weights" for piece, *_ in run) else "backward"
    changes = ((piece == "forward") - (piece == ends) for piece, *_ in run)
    return max(itertools.accumulate(changes))
