"""Steps whose gathers start together: the same bits as without, the same bytes, on every rank in the same order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, batches
from tests.lib.plans import merging
from tests.lib.runs.offloads import prepare_case
from tests.lib.runs.training import build, differences, train_compiled, train_plain, world
from zerofx.scheduler.cost.machine import Link, Machine

_NAMES = ("stack", "lora", "tied")


def far_away() -> Machine:
    """The CPU's row with a link on which latency dominates whatever is sent."""
    link = Link(1e9, 0.05)
    return replace(Machine.named("cpu"), name="far-away", intra_node=link, inter_node=link)


def _step(name: str, **options: Any) -> tuple[zerofx.Step, tuple[Any, ...], dict[str, Any]]:
    case = CASES[name]
    model = build(case)
    args, keywords = next(batches(case, world()[0], 1))
    return zerofx.compile(model, case.optimizer(model), 3, backend="eager", **options), args, keywords


def _on_a_rank() -> dict[str, Any]:
    found: dict[str, Any] = {"wrong": {}}
    for name in _NAMES:
        prepared = prepare_case(CASES[name], 3, world()[1])
        numbers = [n for n in range(1, len(prepared.plan.gathers)) if n % 4]  # four in a row, over and over
        plan = merging(prepared.plan, *numbers)
        expected = train_plain(CASES[name], 3)
        found["wrong"][name] = differences(expected, train_compiled(CASES[name], 3, 3, plan=plan))
        found["wrong"][f"{name} planned"] = differences(
            expected, train_compiled(CASES[name], 3, 3, machine=far_away(), memory_budget="4GiB", offload="none")
        )
        step, args, keywords = _step(name, plan=plan)
        measured = step.measure(*args, num_steps=2, **keywords)
        found[name] = (step.plan, measured, len(numbers))
    step, args, keywords = _step("stack", machine=far_away(), memory_budget="4GiB", offload="none")
    step.prepare(*args, **keywords)
    found["planned"] = (step.plan, step.source)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(_on_a_rank, 2)


@pytest.mark.days(3)
def test_training_is_the_same_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert not {name: wrong for name, wrong in rank["wrong"].items() if wrong}


@pytest.mark.parametrize("name", _NAMES)
def test_memory_and_bytes_sent_are_those_predicted(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        plan, measured, num_merged = rank[name]
        assert len(plan.launches) == len(plan.gathers) - num_merged
        assert measured.wire_bytes == plan.wire_bytes
        # Each bucket's memory goes with its own release, whoever it was gathered with.
        assert measured.peak_bytes["device"] == pytest.approx(plan.peak_bytes["device"], rel=0.01, abs=4096)


def test_what_is_planned_for_a_slow_link_is_merged_alike_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    plan, source = ranks[0]["planned"]
    assert any(gather.merged for gather in plan.gathers)
    assert (
        len({rank["planned"][0].decisions_hash() for rank in ranks}) == len({rank["planned"][1] for rank in ranks}) == 1
    )
    lines = [line.strip() for line in source.splitlines() if "runtime." in line]
    first = next(n for n, line in enumerate(lines) if line.startswith("gather_0 = runtime.all_gather("))
    num_after = len(plan.launches[0]) - 1
    assert lines[first].startswith(f"gather_0 = runtime.all_gather(shard_0, 0, 2, {num_after}, in_place=True)")
    for behind in range(1, num_after + 1):
        assert lines[first + behind].startswith(f"gather_{behind} = runtime.all_gather(")
