"""Activations off the device: menus that use the free link, and copies placed on the timeline."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from gpt import GPT
from tests.lib.models import CASES
from tests.lib.runs.offloads import prepare_case
from zerofx.capture.trace import Batch, capture
from zerofx.ir.bucketing import layout_of
from zerofx.ir.edit import consumers
from zerofx.ir.facts import Phase, origin
from zerofx.passes.prepare.accumulate import accumulate
from zerofx.passes.prepare.simplify import simplify
from zerofx.scheduler.analysis.saved_values import saved_values, storage_size
from zerofx.scheduler.cost.machine import Link, Machine, Nvme
from zerofx.scheduler.cost.timeline import runs, seconds_by_place
from zerofx.scheduler.cost.transfers import copy_seconds
from zerofx.scheduler.decide.activations import Segment, menu, segments
from zerofx.scheduler.decide.ledger import Ledger, Level
from zerofx.scheduler.decide.offload import entries, joint_menu, place, seconds_away
from zerofx.scheduler.decide.prefetch import place_arrivals
from zerofx.scheduler.decide.undecided import undecided
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.choice import plan_of
from zerofx.scheduler.search.graph_facts import GraphFacts
from zerofx.scheduler.search.items import items_of
from zerofx.scheduler.search.order import order_moves
from zerofx.scheduler.search.question import Question

H100 = Machine.named("h100-sxm")


def with_link(bandwidth: float, host_bytes: int = H100.host.memory_bytes) -> Machine:
    link = Link(bandwidth, 1e-6)
    host = replace(H100.host, to_host=link, to_device=link, memory_bytes=host_bytes)
    return replace(H100, name="h100-other-link", host=host)


def question(machine: Machine, layers: int = 6, num_micro_batches: int = 1) -> Question:
    with torch.device("meta"):
        model = GPT(512, 512, layers, 8, 512)
        ids = torch.zeros(8, 512, dtype=torch.long)
    batch = Batch.from_call((ids, ids), {})
    step = capture(model, batch, compute_dtype=torch.bfloat16, num_micro_batches=num_micro_batches)
    simplify(step)
    accumulate(step, num_micro_batches, batch.divided_names())
    layout = layout_of(step, {p.name: 0 for p in step.parameters}, Mesh())
    blank = replace(undecided(step, layout, 0, "bf16", machine.name), memory_budget=1)
    return Question(GraphFacts(step, machine), layout, blank, recompute=True, tiers=("host",))


def layers_of(asked: Question) -> list[Segment]:
    """The segments of repeated layers: not what is before and between them."""
    return [segment for segment in segments(asked.step) if segment.unit]


def everything_offloaded(asked: Question) -> Plan:
    items = [item for item in items_of(asked, "offload") if item.kind == "activations"]
    return plan_of(asked, items, order_moves([item.levels for item in items]))[0]


def offloading(segment: Segment, machine: Machine, *, recompute: bool = True) -> tuple[Level, ...]:
    """The menu of one of endlessly many layers, away from the device for as long as it likes."""
    return joint_menu(entries(segment, machine, "host", 10**9, recompute=recompute), float("inf"))


def test_each_micro_batch_has_its_values_back_in_its_own_backward() -> None:
    asked = question(H100, 3, num_micro_batches=2)
    names = [node.name for node in asked.step.calls()]
    border = next(i for i, name in enumerate(names) if name.startswith("micro1_"))
    found: list[bool] = []
    for decision in everything_offloaded(asked).offloads:
        places = (decision.value, *decision.free_after, *decision.reload_before)
        behind = {names.index(name) >= border for name in places}
        assert len(behind) == 1
        found += behind
    assert set(found) == {False, True}


def test_a_buffer_that_the_next_micro_batch_reads_stays() -> None:
    prepared = prepare_case(CASES["batchnorm"], 0, 1, num_micro_batches=2)
    step, seconds = prepared.step, seconds_by_place(prepared.step, H100)
    order = step.positions()
    stays: list[str] = []
    goes: list[str] = []
    for node in saved_values(step):
        forward = [order[n] for n in consumers(node) if origin(n).phase is Phase.FORWARD]
        backward = [order[n] for n in consumers(node) if origin(n).phase is Phase.BACKWARD]
        (stays if max(forward, default=0) > min(backward) else goes).append(node.name)
    assert stays and goes
    requests = dict.fromkeys((*stays, *goes), "by hand")
    placed = {
        decision.value
        for decision in place(step, requests, seconds, H100, Ledger(("host",), {"host": 1 << 30, "nvme": 0}))
    }
    assert placed and not placed.intersection(stays)


def seconds_for(levels: tuple[Level, ...], num_bytes: int) -> float:
    """The least seconds at which a menu holds at most ``num_bytes``, its levels mixed over many layers."""
    points = [(level.num_bytes, level.seconds) for level in levels]
    if num_bytes >= points[0][0]:
        return points[0][1]
    for (more, fast), (less, slow) in itertools.pairwise(points):
        if less <= num_bytes:
            return fast + (slow - fast) * (more - num_bytes) / (more - less)
    return float("inf")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("bandwidth", [1e9, 2e10, 5e10, 4e11])
def test_choosing_per_tensor_is_never_slower_than_either_alone(bandwidth: float) -> None:
    machine = with_link(bandwidth)
    segment = layers_of(question(machine, 2))[0]
    joint = offloading(segment, machine)
    for alone in (menu(segment, machine), offloading(segment, machine, recompute=False)):
        for level in alone:
            assert seconds_for(joint, level.num_bytes) <= level.seconds * (1 + 1e-9)


def test_each_level_holds_less_and_takes_longer_on_a_convex_line() -> None:
    machine = with_link(2e10)
    levels = offloading(layers_of(question(machine, 2))[0], machine)
    assert len(levels) > 3
    assert not levels[0].offloaded
    priced = [pair for pair in itertools.pairwise(levels) if pair[1].seconds > pair[0].seconds]
    rates = [(one.num_bytes - other.num_bytes) / (other.seconds - one.seconds) for one, other in priced]
    assert rates == sorted(rates, reverse=True)
    assert all(level.offloaded <= level.saved for level in levels)


def test_with_a_slow_link_values_are_computed_again_and_with_a_fast_one_they_are_offloaded() -> None:
    slow, fast = with_link(1e8), with_link(1e13)
    segment = layers_of(question(slow, 2))[0]
    again = offloading(segment, slow)
    moved = [sum(storage_size(segment.values[i]) for i in level.offloaded) for level in again[:-1]]
    assert max(moved) < 0.01 * again[0].num_bytes
    assert again[-1].num_bytes < 0.2 * again[0].num_bytes
    best = offloading(segment, fast)[1]
    assert best.seconds == 0 and best.offloaded


def test_copies_fit_on_their_link_one_after_the_other_and_are_done_when_they_are_awaited() -> None:
    asked = question(with_link(2e10))
    plan = everything_offloaded(asked)
    assert plan.offloads
    spans = runs(asked.step, asked.facts.seconds)
    end_of = {run.last.name: run.end_seconds for run in spans}
    start_of = {run.first.name: run.start_seconds for run in spans}
    copy = sum(copy_seconds(d.num_bytes, "device", "host", asked.machine) for d in plan.offloads)
    forward = max(run.end_seconds for run in spans if run.phase == "forward")
    by_name = {node.name: node for node in asked.step.graph.nodes}
    order = asked.step.positions()
    assert copy > 0.5 * forward, "the link is busy"
    for decision in plan.offloads:
        node = by_name[decision.value]
        assert order[by_name[decision.free_after[0]]] > order[node]
        assert order[by_name[decision.reload_before[0]]] > order[by_name[decision.free_after[0]]]
        again = min(order[reader] for reader in consumers(node) if reader.meta["zerofx_origin"].phase == "backward")
        assert order[by_name[decision.reload_before[0]]] <= again
        assert start_of[decision.reload_before[0]] > end_of[decision.free_after[0]] or decision.free_after[0] in end_of


def test_the_last_layer_is_the_last_to_leave_the_device() -> None:
    asked = question(with_link(2e10))
    items = [item for item in items_of(asked, "offload") if item.kind == "activations"]
    moves = order_moves([item.levels for item in items])
    seen: dict[str, None] = {}
    for length in range(len(moves) + 1):
        plan, _ = plan_of(asked, items, moves[:length])
        seen |= dict.fromkeys(decision.layer.split(".")[1] for decision in plan.offloads)
    assert list(seen) == sorted(seen) and len(seen) > 3


def test_a_layer_is_away_from_its_forward_to_its_backward_and_may_offload_what_is_back_by_then() -> None:
    asked = question(with_link(2e10))
    spans = runs(asked.step, asked.facts.seconds)
    parts = layers_of(asked)
    times = [seconds_away(part, spans) for part in parts]
    assert times == sorted(times, reverse=True)
    found = entries(parts[0], asked.machine, "host", 6, recompute=True)
    assert any(level.offloaded for level in joint_menu(found, times[0]))
    assert not any(level.offloaded for level in joint_menu(found, 0.0))


def test_a_slower_link_gives_memory_back_later_and_asks_for_it_earlier() -> None:
    """The same values over both links: what each may have gone by the time that backward reads it."""
    asked = {bandwidth: question(with_link(bandwidth)) for bandwidth in (2e10, 1e12)}
    values = [{d.value for d in everything_offloaded(one).offloads} for one in asked.values()]
    both = sorted(set.intersection(*values))
    assert both
    order = {node.name: place for node, place in asked[2e10].step.positions().items()}
    slow, fast = (_placed(one, both) for one in asked.values())
    assert slow.keys() == fast.keys() == set(both)
    assert all(order[slow[name].free_after[0]] >= order[fast[name].free_after[0]] for name in both)
    assert all(order[slow[name].reload_before[0]] <= order[fast[name].reload_before[0]] for name in both)
    assert any(order[slow[name].free_after[0]] > order[fast[name].free_after[0]] for name in both)


def _placed(asked: Question, values: list[str]) -> dict[str, Absence]:
    """Where the copies of ``values`` begin and end if nothing else is offloaded."""
    step, seconds, machine = asked.step, asked.facts.seconds, asked.machine
    most = machine.host.memory_bytes
    requests = dict.fromkeys(values, "as asked")
    offloads = place(step, requests, seconds, machine, Ledger(("host",), {"host": most, "nvme": 0}))
    plan = asked.undecided.replace_absences(offloads=offloads)
    plan = place_arrivals(plan, step, asked.layout, {}, seconds, machine, ahead=True)
    return {decision.value: decision for decision in plan.offloads}


def test_what_the_host_has_no_room_for_goes_to_nvme() -> None:
    drives = Nvme(2**40, Link(1e11, 1e-5), Link(1e11, 1e-5))
    machine = replace(with_link(1e12, host_bytes=8 * 2**25), nvme=drives)
    asked = replace(question(machine), tiers=("host", "nvme"))
    offloads = everything_offloaded(asked).offloads
    held = {tier: sum(d.num_bytes for d in offloads if d.tier == tier) for tier in ("host", "nvme")}
    assert 0 < held["host"] <= machine.host_bytes_per_rank
    assert held["nvme"] > 0
