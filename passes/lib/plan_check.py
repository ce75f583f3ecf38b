"""The verifier's rule ``plan``: a graph does exactly what its plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import storage_source
from zerofx.ir.edit import consumers
from zerofx.ir.facts import DEVICE, Job, Phase, Role, delayed_bucket, origin, placeholder, task_of, tier_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import num_gathers_after, slice_gathered
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.plan import Plan

GATHERS = frozenset({ops.all_gather, ops.gather_on_node})


# What a graph does, in words, with what it does it to, and what the plan says of that.
Compared = tuple[str, Sequence[object], Sequence[object]]


def differences(step: StepGraph, plan: Plan) -> Iterator[str]:
    """Differences between the graph after the last pass and ``plan``, a sentence a kind of decision."""
    for subject in (_gathers, _reductions, _absences, _looks_at_gradients, _delays, _wire):
        for what, carried_out, planned in subject(step, plan):
            if Counter(carried_out) != Counter(planned):
                yield f"the graph {what} {sorted(map(str, carried_out))}, the plan says {sorted(map(str, planned))}"


def _gathers(step: StepGraph, plan: Plan) -> Iterator[Compared]:
    gathered = [_bucket_gathered(node) for node in parameter_gathers(step)]
    yield "gathers buckets", gathered, [decision.bucket for decision in plan.gathers]
    launched = [num_gathers_after(node) for node in step.calls() if node.target in GATHERS and slice_gathered(node)]
    sent = [numbers for numbers in plan.launches if plan.num_slices(plan.buckets[plan.gathers[numbers[0]].bucket]) > 1]
    merged = [following for numbers in sent for following in reversed(range(len(numbers)))]
    yield "merges gathers with as many after them", launched, merged


def _reductions(step: StepGraph, plan: Plan) -> Iterator[Compared]:
    wanted = [
        decision.bucket
        for decision in plan.reduces
        if plan.num_slices(plan.buckets[decision.bucket]) * plan.replicate > 1
        for _ in (*decision.earlier, decision.wait_after)
    ]
    yield "reduces buckets", [node.args[1] for node in step.calls() if is_reduction(node)], wanted
    crossing = [node.args[1] for node in step.calls() if _crosses(node)]
    yield "sums across replicas", crossing, [r.bucket for r in plan.reduces if r.crossed_after != ""]


def _absences(step: StepGraph, plan: Plan) -> Iterator[Compared]:
    """Tiers of what stays between steps, of gradients between micro-batches, and of values between forward and
    backward."""

    def planned(decisions: Iterable[Absence]) -> list[str]:
        return [f"{decision.bucket} on {decision.tier}" for decision in decisions]

    stored = [node for role in (Role.MASTER, Role.STATE) for node in step.placeholders(role)]
    stateful = {placeholder(node).bucket for node in stored}
    states = (decision for decision in plan.states if decision.bucket in stateful)
    yield "keeps states of buckets", sorted(set(_slow_tiers(stored))), planned(states)
    yield "keeps parameters of buckets", _slow_tiers(step.placeholders(Role.SHARD)), planned(plan.parameters)
    waiting = [f"{_bucket_of_gradients(node)} on {node.args[1]}" for node in _offload_calls(step, Phase.BACKWARD)]
    yield "has gradients waiting of buckets", waiting, planned(d for d in plan.gradients for _ in d.free_after)
    offloaded = [f"{node.all_input_nodes[0].name} to {node.args[1]}" for node in _offload_calls(step, Phase.FORWARD)]
    packed = [node.all_input_nodes[0].name for node in step.calls() if node.target is ops.quantise_saved]
    yield "keeps in 8 bits", packed, [decision.value for decision in plan.compresses]
    yield "offloads", offloaded, [f"{decision.value} to {decision.tier}" for decision in plan.offloads]


def _slow_tiers(stored: Iterable[fx.Node]) -> list[str]:
    return [f"{placeholder(node).bucket} on {tier_of(node)}" for node in stored if tier_of(node) != DEVICE]


def _looks_at_gradients(step: StepGraph, plan: Plan) -> Iterator[Compared]:
    clipped = [ops.square_sum for _ in plan.reduces] if plan.max_grad_norm is not None or plan.grad_norms else []
    yield "sums squares of gradients", [n.target for n in step.calls() if n.target is ops.square_sum], clipped
    checked = [ops.check_gradients] if plan.loss_scaled else []
    yield "checks gradients", [n.target for n in step.calls() if n.target is ops.check_gradients], checked


def _delays(step: StepGraph, plan: Plan) -> Iterator[Compared]:
    delayed = sorted({bucket for node in step.calls() if (bucket := delayed_bucket(node)) is not None})
    updated = {decision.bucket for decision in plan.reduces}
    yield "delays updates of buckets", delayed, [d.bucket for d in plan.states if d.delayed and d.bucket in updated]


def _wire(step: StepGraph, plan: Plan) -> Iterator[Compared]:
    yield "sends", _actual_wire(step), _wire_of_plan(plan)


def _offload_calls(step: StepGraph, phase: Phase) -> list[fx.Node]:
    return [node for node in step.calls() if node.target is ops.offload and origin(node).phase is phase]


def _bucket_of_gradients(offload: fx.Node) -> object:
    """The bucket whose gradient buffer, or what was reloaded of it, is offloaded."""
    node = offload
    while node.target is not ops.empty_gradients:
        node, _ = storage_source(node.all_input_nodes[0])
    return node.args[0]


def parameter_gathers(step: StepGraph) -> list[fx.Node]:
    """The nodes that make a whole bucket of a rank's slice: its gather, or on one rank its copy to the device."""
    gathered = []
    for node in step.calls():
        gathers = node.target in GATHERS
        comes_up = node.target is ops.reload and tier_of(node) == DEVICE and origin(node).phase is not Phase.UPDATE
        if (gathers or comes_up) and slice_gathered(node) is not None:
            if any(reader.target in (ops.all_gather, ops.quantise) for reader in consumers(node)):
                continue  # a copy of what is gathered next
            gathered.append(node)
    return gathered


def _bucket_gathered(gather: fx.Node) -> int | None:
    shard = slice_gathered(gather)
    assert shard is not None
    return placeholder(shard).bucket


def is_reduction(node: fx.Node) -> bool:
    """True if a bucket's reduction starts here; a hop across nodes or replicas belongs to one that has started."""
    return _sums(node) and not _crosses(node)


def _crosses(node: fx.Node) -> bool:
    """True if the hop of a reduction across replicas starts here."""
    task = task_of(node)
    return _sums(node) and task is not None and task.job is Job.CROSSING


def _sums(node: fx.Node) -> bool:
    """True if a node requests gradients of other ranks; a second hop across nodes does not count."""
    return node.target in ops.REDUCTIONS or (node.target is ops.exchange and node.args[3] != "across")


def _wire_of_plan(plan: Plan) -> list[str]:
    lines = []
    for decision in plan.wires:
        lines += [f"gathers {decision.bucket} in {decision.gather}"] if decision.gather != "exact" else []
        lines += [f"second shard of {decision.bucket}"] if decision.second_shard else []
        lines += [f"reduces {decision.bucket} in {decision.reduce}"] if decision.reduce != "exact" else []
    return lines


def _actual_wire(step: StepGraph) -> list[str]:
    """Quantised sends of buckets, in words."""
    lines = set()
    for node in step.calls():
        if node.target is ops.quantise and slice_gathered(node) is not None:
            lines.add(f"gathers {_bucket_gathered(node)} in {node.args[2]}")
        if node.target is ops.second_shard:
            lines.add(f"second shard of {node.args[1]}")
        if node.target is ops.exchange:
            (small,) = (source for source in node.all_input_nodes)
            lines.add(f"reduces {node.args[1]} in {small.args[2]}")
    return sorted(lines)
