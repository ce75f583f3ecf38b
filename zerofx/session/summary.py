"""The text of ``print(step)``: what is trained and how, where its bytes are, predictions, measurements, and reasons."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from tabulate import tabulate
from torch import nn

from zerofx.codegen.regions import Event
from zerofx.ir import ops
from zerofx.ir.facts import origin
from zerofx.ir.text import target_name
from zerofx.lengths.padded_batches import Rung
from zerofx.lowering.load import CompiledStep
from zerofx.options import CompileOptions
from zerofx.runtime.cuda_graphs.graphed import Launches
from zerofx.runtime.measure.measure import Measurement
from zerofx.scheduler.cost.categories import Category, peak_memory
from zerofx.scheduler.cost.cpu.workspace import is_unknown
from zerofx.scheduler.cost.machine import MEASURED
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.plan.text.overview import arena_words, bucket_table, heading
from zerofx.scheduler.plan.text.reasons import one_line, reasons
from zerofx.units import first_few, format_bytes, format_count, format_seconds, text_table

_NEAR = 0.15  # of a predicted time: plans that differ by more are told apart


class Summarised(Protocol):
    """The parts of a step that a summary reads, besides what ran last."""

    model: nn.Module
    options: CompileOptions

    @property
    def rungs(self) -> Sequence[Rung]: ...
    @property
    def launches(self) -> Launches: ...
    @property
    def notice(self) -> str: ...


def summary(step: Summarised, what: str, compiled: CompiledStep | None, measured: Measurement | None) -> str:
    """The summary of a step.

    Args:
        what: the model with its optimizers, by name.
        compiled: what ran last; None before the first capture, about which there is little to say.
        measured: what ``step.measure`` found for it, if it was called.
    """
    if compiled is None:
        num_parameters = sum(parameter.numel() for parameter in step.model.parameters())
        return (
            f"{what}: {format_count(num_parameters)} parameters, stage {step.options.stage}, backend "
            f"{step.options.backend}\nnot captured yet: the first step(batch) captures and plans it, or "
            f"step.prepare(batch), which runs nothing"
        )
    plan, lowered, left_out = compiled.plan, compiled.lowered, compiled.returned.left_out
    num_parameters = sum(bucket.num_parameters for bucket in plan.buckets if not bucket.lent)
    lines = [
        f"{what}: {format_count(num_parameters)} parameters",
        f"{heading(plan)}, backend {step.options.backend}",
        f"{compiled.num_regions} regions, {len(compiled.emitted.functions)} of them distinct, "
        f"in {compiled.source_path}",
        *([f"not kept of what the model returns: {first_few(left_out)}"] if left_out else []),
        *([str(step.launches)] if step.options.cuda_graphs else []),
        *([step.notice] if step.notice else []),
        "",
        _predictions(plan, measured),
        *_not_predicted(compiled),
        *arena_words(plan),
        *_misprediction(plan, measured),
        *([] if plan.arena is not None else reserves_more(compiled.device, plan.memory_budget)),
        "",
        f"On the device at the peak, in {_place(compiled, step.options.backend)}:",
        _shares(peak_memory(lowered.graph, lowered.simulation.live)),
        "",
        bucket_table(plan),
        *(["", _links(compiled, measured)] if plan.link_bytes else []),
        *(["", *_rungs(step)] if step.rungs else []),
    ]
    why = [*_reason_lines(plan), *_whole_lines(compiled)]
    return "\n".join([*lines, "", *why] if why else lines)


def _predictions(plan: Plan, measured: Measurement | None) -> str:
    """A line for each number that a plan predicts, and what was measured of it."""
    prediction = plan.prediction
    assert prediction is not None
    lines = [
        *([f"peak on the {tier}", format_bytes(size)] for tier, size in plan.peak_bytes.items()),
        ["time of a step", format_seconds(plan.step_seconds)],
        ["waits for communication", format_seconds(plan.exposed_seconds)],
        ["sent in a step", format_bytes(plan.wire_bytes)],
        ["parameters, gradients, optimizer states", format_bytes(plan.model_state_bytes)],
        ["FLOPs of a step", format_count(prediction.flops)],
    ]
    headers = ["per rank", "predicted"]
    if measured is not None:
        outcomes = [
            *(_comparison(measured.peak_bytes.get(tier, 0), size) for tier, size in plan.peak_bytes.items()),
            format_seconds(measured.step_seconds),
            format_seconds(measured.exposed_seconds),
            _comparison(measured.wire_bytes, plan.wire_bytes),
            _comparison(measured.model_state_bytes, plan.model_state_bytes),
            "",
        ]
        headers.append("measured")
        lines = [[*line, text] for line, text in zip(lines, outcomes, strict=True)]
    return text_table(lines, headers)


def _rungs(step: Summarised) -> Iterator[str]:
    """A line for each length that batches are padded to, and which fits the budget."""
    lines = [
        [
            f"{rung.length:,}", f"{rung.samples:,}", format_bytes(rung.plan.peak_bytes["device"]),
            format_seconds(rung.plan.step_seconds), format_count(rung.tokens_per_second), f"{rung.num_steps:,}",
        ]
        for rung in step.rungs
    ]  # fmt: skip
    headers = ["tokens", "samples", "peak on the device", "time of a step", "tokens a second", "steps done"]
    yield text_table(lines, headers, left=())
    if step.options.memory_budget is not None:
        yield f"the longest that fits memory_budget: {max(rung.length for rung in step.rungs):,} of lengths="


def _not_predicted(compiled: CompiledStep) -> Iterator[str]:
    """Gaps of the predicted peak: operators of which it is not known what they hold while they run."""
    operators = sorted({target_name(node) for node in compiled.lowered.graph.calls() if is_unknown(node)})
    if operators:
        yield (
            f"the predicted peak lacks what {', '.join(operators)} may take and give back while running, "
            f"which is not known; step.measure() finds the peak"
        )


def _misprediction(plan: Plan, measured: Measurement | None) -> Iterator[str]:
    """That this machine is not the one that times were predicted for, where they are far from what was measured."""
    if measured is None or plan.machine.endswith(MEASURED):
        return
    ratio = measured.step_seconds / plan.step_seconds
    if max(ratio, 1 / ratio) > 1 + _NEAR:
        yield (
            f"a step takes {ratio:.2g} times what is predicted for the machine {plan.machine!r}: "
            f"zerofx.Machine.measure(), called by all processes, measures this one in some seconds and keeps what it "
            f"finds, for which later steps are planned where no machine= is given"
        )


def reserves_more(device: torch.device, budget: int | None) -> Iterator[str]:
    """That the allocator of ``device`` may take more from it than it gives to a step with a ``budget`` in bytes."""
    settings = (os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if (
        device.type == "cuda"
        and budget is not None
        and all("expandable_segments:True" not in text for text in settings)
    ):
        yield (
            "memory_budget is for what is allocated; the allocator may reserve some percent more, in segments that are "
            "not full: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True keeps it near to that"
        )


def _links(compiled: CompiledStep, measured: Measurement | None) -> str:
    """A line for each stream that copies between tiers: its bytes, time and bandwidth, predicted and measured, and how
    much of the measured time overlapped with computation."""
    busy = compiled.lowered.simulation.busy_by_stream
    headers = ["copies between tiers", "bytes", "predicted", "per second"]
    lines = []
    for stream, num_bytes in compiled.plan.link_bytes.items():
        line = [stream, format_bytes(num_bytes), format_seconds(busy[stream]), _speed(num_bytes, busy[stream])]
        use = measured.streams.get(stream) if measured is not None else None
        if use is not None:
            hidden = use.hidden_seconds / use.busy_seconds if use.busy_seconds else 0.0
            line += [format_seconds(use.busy_seconds), _speed(use.num_bytes, use.busy_seconds), f"{hidden:.0%}"]
        lines.append(line)
    if measured is not None:
        headers += ["measured", "per second", "overlapped"]
    return text_table(lines, headers)


def _speed(num_bytes: int, seconds: float) -> str:
    return f"{format_bytes(num_bytes / seconds)}/s" if seconds else ""


def _comparison(measured: int, predicted: int) -> str:
    """Measured bytes, and how far they are from the prediction."""
    if measured == predicted:
        return f"{format_bytes(measured)} (to the byte)" if measured else format_bytes(measured)
    return f"{format_bytes(measured)} ({(measured - predicted) / max(predicted, 1):+.1%})"


def _place(compiled: CompiledStep, backend: str) -> str:
    """The place of the peak: the operator, its layer, and its phase; of a compiled region, which is one kernel after
    the other, the region's function."""
    node = compiled.lowered.simulation.live.peak_node
    if node is None:
        return "an empty step"
    what, layer, phase = target_name(node), origin(node).layer, origin(node).phase
    for instruction in compiled.lowered.instructions:
        if backend == "inductor" and not isinstance(instruction, Event) and node in instruction.own:
            what = compiled.emitted.functions[instruction.key]
            layer, phase = instruction.unit or instruction.origin.layer, instruction.origin.phase
    return f"{what} of {layer or 'the model'} ({phase})"


def _shares(held: Mapping[Category, int]) -> str:
    total = sum(held.values())
    lines = [[str(name), format_bytes(size), f"{size / total:.0%}"] for name, size in held.items()]
    lines.append(["in all", format_bytes(total), ""])
    return tabulate(lines, colalign=("left", "right", "right"), disable_numparse=True, tablefmt="plain")


def _whole_lines(compiled: CompiledStep) -> Iterator[str]:
    """Updates of whole parameters: how many, what they take, and what is exchanged with the parameters' owners."""
    nodes, timings = list(compiled.lowered.graph.calls()), compiled.lowered.simulation.timings
    updates = [node for node in nodes if node.target is ops.update_whole]
    if not updates:
        return
    seconds = sum(timings[node].seconds for node in updates)
    exchanges = [node for node in nodes if node.target in ops.OWNER_EXCHANGES]
    waits = [node for node in nodes if node.target is ops.wait and node.args[0] in exchanges]
    exposed = sum(timings[node].exposed_seconds for node in waits)
    num_buckets = sum(len(node.args[0]) for node in updates if isinstance(node.args[0], list | tuple))
    sent = sum(timings[node].wire_bytes for node in exchanges)
    what = f"{num_buckets} buckets in {format_seconds(seconds)} at the busiest owner"
    how = f"; {format_bytes(sent)} exchanged by each rank, {format_seconds(exposed)} of it exposed" if sent else ""
    yield f"updates of whole parameters by the optimizer's own step: {what}{how}"
    if exchanges:
        has_masters = any(node.target is ops.cast_owned for node in nodes)
        num = sum(_number(node.kwargs["num_parameters"]) for node in updates)
        busiest, mean = (sum(_number(node.kwargs[name]) for node in updates) for name in ("flops", "mean_flops"))
        num_ranks = " or ".join(map(str, sorted({_number(node.args[2]) for node in exchanges})))
        why = "the costliest first, to the one that has least to do"
        rest = "states and masters rest" if has_masters else "states rest"
        yield (
            f"owners: {num} parameters dealt out to {num_ranks} ranks, {why}; the busiest does "
            f"{busiest / max(1, mean):.2f} times the mean; {rest} there whole"
        )


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value


def _reason_lines(plan: Plan) -> Iterator[str]:
    for kind, counted in reasons(plan).items():
        yield one_line(kind, counted)
    if not plan.has_residencies:
        on = "one rank: it holds all of them" if plan.num_ranks == 1 else f"stage {plan.stage} keeps them whole"
        yield f"gathers: none, parameters stay on the device ({on})"
