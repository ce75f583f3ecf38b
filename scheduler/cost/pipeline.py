"""The seconds of a step in stages: each stage runs its micro-batches in order, and waits for what others hand on.

All micro-batches go forward through a stage before the first comes back, but in the last stage, where each comes back
at once (GPipe, 1811.06965). Or a stage takes turns, forward and backward, once it is as many micro-batches ahead as
stages come after it (1F1B, 1806.03377). With p stages that take F and B for a micro-batch, each idles (p - 1)(F + B) of
a step either way; it holds what backward reads of all micro-batches, or of no more than stages from it to the last.

Backward falls into what leads to the gradients that are sent on, and weight gradients, W of its seconds. These may come
some turns later, in the time until the next message (2401.10241): as many as there are stages before this one. Each
then idles for (p - 1)(F + B - 2W), and holds what weight gradients read of p micro-batches (ZB-H1 there).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerofx.ir import ops
from zerofx.ir.facts import Phase, origin
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import turns
from zerofx.ir.streams import COMPUTE, stream_of
from zerofx.scheduler.analysis.stages_of_nodes import weight_gradients
from zerofx.scheduler.cost.simulate import Simulation
from zerofx.scheduler.plan.plan import Plan

_NO_LONGER = 1.001  # times the least seconds


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a stage: of a micro-batch forward and backward, and once a step besides, the update above all.

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
    (``exposed``); the most micro-batches that are under way in each: forward has run, and backward has not."""

    step: float
    idle: tuple[float, ...]
    exposed: tuple[float, ...]
    under_way: tuple[int, ...]


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


def stage_seconds(step: StepGraph, simulation: Simulation) -> StageSeconds:
    """The seconds of the stage that ``step`` is, as it is simulated by itself."""
    seconds = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.0, Phase.UPDATE: 0.0}
    messages, apart, weights, exposed = dict(seconds), set(weight_gradients(step)), 0.0, 0.0
    for node, timing in simulation.timings.items():
        phase, waited = origin(node).phase, node.args[0] if node.target is ops.wait else None
        if node.target is ops.receive_value:
            messages[phase] += timing.num_runs * timing.seconds
        elif stream_of(node) == COMPUTE and getattr(waited, "target", None) not in ops.MESSAGES:
            taken = timing.num_runs * (timing.seconds + timing.exposed_seconds)
            seconds[phase] += taken
            weights += taken if node in apart else 0.0
            exposed += timing.num_runs * timing.exposed_seconds
    num = step.num_micro_batches
    return StageSeconds(
        seconds[Phase.FORWARD] / num,
        seconds[Phase.BACKWARD] / num,
        seconds[Phase.UPDATE] + messages[Phase.UPDATE],
        messages[Phase.FORWARD] / num,
        messages[Phase.BACKWARD] / num,
        weights / num,
        exposed,
    )


def lags_up_to(most: int, num_micro_batches: int, splits: Sequence[bool]) -> tuple[int | None, ...]:
    """Turns after which each stage computes weight gradients: as many as stages come before it, ``most`` at most.

    ``splits``: the stages that can compute them apart. Nobody waits for what the first does in backward.
    """
    most = min(most, num_micro_batches - 1)
    return tuple(min(number, most) if number and split else None for number, split in enumerate(splits))


def choose_lags(
    stages: Sequence[StageSeconds], num_micro_batches: int, most: int, splits: Sequence[bool]
) -> tuple[int | None, ...]:
    """The fastest of ``lags_up_to`` any number up to ``most``, each stage's as small as it can be for that: what weight
    gradients read is held until then."""

    def seconds(lags: Sequence[int | None]) -> float:
        return simulate_stages(stages, num_micro_batches, by_turns=True, lags=lags).step

    candidates = [lags_up_to(each, num_micro_batches, splits) for each in range(most + 1)]
    longest = _NO_LONGER * min(map(seconds, candidates))
    chosen = next(lags for lags in candidates if seconds(lags) <= longest)
    for number in reversed(range(len(stages))):
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
    stages: Sequence[StageSeconds],
    num_micro_batches: int,
    *,
    by_turns: bool = False,
    lags: Sequence[int | None] = (),
) -> PipelineSeconds:
    """Run the micro-batches through stages; what one receives is on its way as long as its own messages say.

    ``by_turns``: backward of a micro-batch before the forward of later ones. ``lags``: how many turns later each stage
    computes weight gradients, None for with the rest of backward.
    """
    most, num_stages, apart = num_micro_batches - 1, len(stages), [*lags] or [None] * len(stages)
    ahead = [min(after if by_turns else most * bool(after), most) for after in reversed(range(num_stages))]
    held = [own + (lag or 0) for own, lag in zip(ahead, apart, strict=True)]
    orders = [
        list(itertools.chain.from_iterable(turns(each, num_micro_batches, weights_apart=len(each) > 2)))
        for each in (
            (0, own) if lag is None else (0, own, total) for own, lag, total in zip(ahead, apart, held, strict=True)
        )
    ]
    pieces = [
        (each.forward, each.backward - (0.0 if lag is None else each.weights), each.weights)
        for each, lag in zip(stages, apart, strict=True)
    ]
    done: dict[tuple[int, int, int], float] = {}
    free, places = [0.0] * num_stages, [0] * num_stages
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for number, stage in enumerate(stages):
            while places[number] < len(orders[number]):
                piece, batch = orders[number][places[number]]
                source = (number - 1, number + 1, num_stages)[piece]
                is_fed = source in range(num_stages)
                if is_fed and (piece, source, batch) not in done:
                    break
                message = stage.backward_message if piece else stage.forward_message
                ready = done[piece, source, batch] + message if is_fed else 0.0
                free[number] = done[piece, number, batch] = max(free[number], ready) + pieces[number][piece]
                places[number] += 1
    total = max(end + stage.rest for end, stage in zip(free, stages, strict=True))
    busy = [num_micro_batches * (stage.forward + stage.backward) + stage.rest for stage in stages]
    under_way = tuple(min(each + 1, num_micro_batches) for each in held)
    idle = [max(0.0, total - each) for each in busy]
    exposed = [own + stage.exposed for own, stage in zip(idle, stages, strict=True)]
    return PipelineSeconds(total, tuple(idle), tuple(exposed), under_way)
