"""Gathers that the plan merges start as one collective, each with a buffer, a wait and a release of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lib.graphs import calls, order_of, prepare
from tests.lib.lowered import Deep
from tests.lib.plans import merged, merging
from tests.lib.runs.offloads import parameters_away
from zerofx.errors import InvalidGraphError, PlanError
from zerofx.ir import ops
from zerofx.ir.streams import num_gathers_after
from zerofx.passes.verify import verify
from zerofx.scheduler.cost.liveness import liveness


def test_gathers_start_together(golden: Callable[..., None]) -> None:
    golden(merged(1, 2).changes("merge"))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("numbers", [(1,), (2, 3), (1, 3), (1, 2, 3, 4, 5)])
def test_merged_gathers_stand_in_a_row_and_each_is_awaited_and_released_once(
    numbers: tuple[int, ...], prefetch: int
) -> None:
    prepared = merged(*numbers, prefetch=prefetch)
    prepared.run_pipeline()
    order = order_of(prepared.step)
    for launch in prepared.plan.launches:
        names = [f"gather_{number}" for number in launch]
        assert [order[name] - order[names[0]] for name in names] == list(range(len(names)))
        assert [num_gathers_after(prepared.node(name)) for name in names] == list(reversed(range(len(names))))
    plain = prepare(Deep(3), num_ranks=2, prefetch=prefetch).run()
    assert len(calls(prepared.step, ops.release)) == len(prepared.plan.gathers) == len(calls(plain.step, ops.release))
    assert [node.name for node in calls(prepared.step, ops.all_gather)] == [
        node.name for node in calls(plain.step, ops.all_gather)
    ]


def test_the_pass_does_without_prefetch() -> None:
    prepared = merged(1, 2)
    prepared.run_pipeline(disable=frozenset({"prefetch"}))
    assert [num_gathers_after(node) for node in calls(prepared.step, ops.all_gather)][:3] == [2, 1, 0]


def test_a_later_bucket_is_on_the_device_from_where_the_earlier_one_is_gathered() -> None:
    prepared, plain = merged(1, 2, 3, prefetch=0).run(), prepare(Deep(3), num_ranks=2, prefetch=0).run()
    first = "gather_3"
    extra = sum(prepared.layout.buckets[prepared.plan.gathers[number].bucket].full_bytes for number in (1, 2, 3))
    live, before = liveness(prepared.step, True), liveness(plain.step, True)
    assert live.after[prepared.node(first)] == before.after[plain.node("gather_0")] + extra
    last = prepared.step.output.prev
    assert live.after[last] == before.after[plain.step.output.prev]


def test_a_slice_that_is_copied_up_first_is_not_merged() -> None:
    prepared = prepare(Deep(3), num_ranks=2)
    prepared.plan = merging(parameters_away(prepared, "host", None), 1)
    with pytest.raises(PlanError, match=r"gather_0 .*has to be copied up first"):
        prepared.run()


@pytest.mark.parametrize("behind", [0, 2])
def test_a_group_that_is_torn_apart_is_found(behind: int) -> None:
    prepared = merged(1).run()
    node = prepared.node("gather_0")
    node.args = (*node.args[:3], behind)
    with pytest.raises(
        InvalidGraphError, match=r"launches: .* stands where one of 2" if behind else "plan: the graph mer"
    ):
        verify(prepared.step, "merge", prepared.plan)


def test_something_between_the_gathers_of_a_group_is_found() -> None:
    prepared = merged(1).run()
    following = prepared.node("gather_1").next
    following.append(prepared.node("gather_1"))
    with pytest.raises(InvalidGraphError, match=f"launches: {following.name} stands where one of 1 gathers"):
        verify(prepared.step, "merge")


def test_what_no_other_rank_has_a_slice_of_is_not_merged() -> None:
    prepared = prepare(Deep(3), num_ranks=1)
    prepared.plan = merging(parameters_away(prepared, "host", None), 1)
    with pytest.raises(PlanError, match=r"\[0, 1\], of which some are of buckets on one rank"):
        prepared.run("merge")
