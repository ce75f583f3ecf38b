"""The seconds of a step in stages: each stage runs its micro-batches in order, and waits for what others hand on.

All micro-batches go forward through a stage before the first comes back, but in the last stage, where each comes back
at once (GPipe, 1811.06965). Or a stage takes turns, forward and backward, once it is as many micro-batches ahead as
stages come after it (1F1B, 1806.03377). With p stages that take F and B for a micro-batch, each idles (p - 1)(F + B) of
a step either way; it holds what backward reads of all micro-batches, or of no more than stages from it to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerofx.ir import ops
from zerofx.ir.facts import Phase, origin
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import turns
from zerofx.ir.streams import COMPUTE, stream_of
from zerofx.scheduler.cost.simulate import Simulation
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a stage: of a micro-batch forward and backward, and once a step besides, the update above all.

    ``forward_message`` and ``backward_message``: until what it sends is with its neighbour.
    """

    forward: float
    backward: float
    rest: float = 0.0
    forward_message: float = 0.0
    backward_message: float = 0.0


@dataclass(frozen=True)
class PipelineSeconds:
    """Seconds of a step in stages, in how many of them each stage idles, and the most micro-batches that are under way
    in each: forward has run, and backward has not."""

    step: float
    idle: tuple[float, ...]
    under_way: tuple[int, ...]


def predict_stage(plan: Plan, pipeline: PipelineSeconds, why: str = "") -> Plan:
    """The plan of a stage with the seconds that it takes among the others; ``why``: micro-batches are in this order."""
    assert plan.prediction is not None, "its own have been simulated"
    idle = pipeline.idle[plan.pipe_stage]
    reasons = filter(None, [plan.micro_batches_reason, why])
    return replace(plan, micro_batches_reason="; ".join(reasons)).with_prediction(
        replace(
            plan.prediction,
            step_seconds=pipeline.step,
            exposed_seconds=plan.exposed_seconds + idle,
            idle_seconds=idle,
        )
    )


def stage_seconds(step: StepGraph, simulation: Simulation) -> StageSeconds:
    """The seconds of the stage that ``step`` is, as it is simulated by itself."""
    seconds = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.0, Phase.UPDATE: 0.0}
    messages = dict(seconds)
    for node, timing in simulation.timings.items():
        phase, waited = origin(node).phase, node.args[0] if node.target is ops.wait else None
        if node.target is ops.receive_value:
            messages[phase] += timing.num_runs * timing.seconds
        elif stream_of(node) == COMPUTE and getattr(waited, "target", None) not in ops.MESSAGES:
            seconds[phase] += timing.num_runs * (timing.seconds + timing.exposed_seconds)
    num = step.num_micro_batches
    return StageSeconds(
        seconds[Phase.FORWARD] / num,
        seconds[Phase.BACKWARD] / num,
        seconds[Phase.UPDATE] + messages[Phase.UPDATE],
        messages[Phase.FORWARD] / num,
        messages[Phase.BACKWARD] / num,
    )


def simulate_stages(
    stages: Sequence[StageSeconds], num_micro_batches: int, *, by_turns: bool = False
) -> PipelineSeconds:
    """Run the micro-batches through stages; what one receives is on its way as long as its own messages say.

    ``by_turns``: backward of a micro-batch before the forward of later ones.
    """
    phases, most = (Phase.FORWARD, Phase.BACKWARD), num_micro_batches - 1
    ahead = [min(after if by_turns else most * bool(after), most) for after in reversed(range(len(stages)))]
    orders = [
        [(phases[number], batch) for turn in turns((0, lag), num_micro_batches) for number, batch in turn]
        for lag in ahead
    ]
    done: dict[tuple[Phase, int, int], float] = {}
    free, places = [0.0] * len(stages), [0] * len(stages)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for number, stage in enumerate(stages):
            while places[number] < len(orders[number]):
                phase, batch = orders[number][places[number]]
                source = number - 1 if phase is Phase.FORWARD else number + 1
                is_fed = source in range(len(stages))
                if is_fed and (phase, source, batch) not in done:
                    break
                message = stage.forward_message if phase is Phase.FORWARD else stage.backward_message
                ready = done[phase, source, batch] + message if is_fed else 0.0
                seconds = stage.forward if phase is Phase.FORWARD else stage.backward
                free[number] = done[phase, number, batch] = max(free[number], ready) + seconds
                places[number] += 1
    total = max(end + stage.rest for end, stage in zip(free, stages, strict=True))
    busy = [num_micro_batches * (stage.forward + stage.backward) + stage.rest for stage in stages]
    return PipelineSeconds(total, tuple(max(0.0, total - each) for each in busy), tuple(lag + 1 for lag in ahead))
