"""Which loops of a kernel are written over what they read."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from zerofx.scheduler.cost.fusion import find_last_reads, order_for_reuse

NUM_LOOPS = 5
Kernel = tuple[dict[int, set[str]], dict[int, set[int]]]


@st.composite
def kernels(draw: st.DrawFn) -> Kernel:
    """Loops in an order that their needs allow: the values that each reads, and the loops that it needs."""
    ends = {loop: draw(st.sets(st.sampled_from("abcd"), max_size=3)) for loop in range(NUM_LOOPS)}
    needs: dict[int, set[int]] = {}
    for loop in range(NUM_LOOPS):
        direct = draw(st.sets(st.integers(0, loop - 1), max_size=2)) if loop else set()
        needs[loop] = direct.union(*(needs[one] for one in direct))
    return ends, needs


def test_a_gated_layer_holds_four_values_instead_of_six() -> None:
    ends = {"h": {"gate", "up"}, "dup": {"dh", "gate"}, "dgate": {"dh", "gate", "up"}}
    order = order_for_reuse(list(ends), ends, {loop: set() for loop in ends})
    assert order == ["h", "dgate", "dup"]
    assert find_last_reads(order, ends) == {"dup": {"dh", "gate"}, "dgate": {"up"}}
    assert find_last_reads(list(ends), ends) == {"dgate": {"dh", "gate", "up"}}


def test_an_order_that_gains_nothing_is_left_alone() -> None:
    ends = {"first": {"a"}, "second": set[str](), "third": {"b"}}
    assert order_for_reuse(list(ends), ends, {loop: set() for loop in ends}) == list(ends)


def test_what_a_loop_needs_stays_before_it() -> None:
    ends = {"first": {"a", "b"}, "second": {"a"}, "third": {"a", "b"}}
    order = order_for_reuse(list(ends), ends, {"first": set(), "second": {"elsewhere"}, "third": {"second"}})
    assert order.index("second") < order.index("third")


@given(kernels())
@settings(deadline=None)
def test_every_loop_has_its_place_and_no_fewer_values_are_written_over(kernel: Kernel) -> None:
    ends, needs = kernel
    order = order_for_reuse(range(NUM_LOOPS), ends, needs)
    assert sorted(order) == list(range(NUM_LOOPS))
    assert all(order.index(one) < order.index(loop) for loop in order for one in needs[loop])
    assert len(find_last_reads(order, ends)) >= len(find_last_reads(range(NUM_LOOPS), ends))


@given(kernels())
@settings(deadline=None)
def test_what_is_written_over_is_read_by_no_later_loop(kernel: Kernel) -> None:
    ends, needs = kernel
    order = order_for_reuse(range(NUM_LOOPS), ends, needs)
    found = find_last_reads(order, ends)
    for place, loop in enumerate(order):
        later = set[str]().union(*(ends[one] for one in order[place + 1 :]))
        assert found.get(loop, set()) == ends[loop] - later


@given(kernels())
@settings(deadline=None, max_examples=50)
def test_loops_that_need_nothing_of_one_another_are_near_the_best_order(kernel: Kernel) -> None:
    ends, _ = kernel
    free: dict[int, set[int]] = {loop: set() for loop in range(NUM_LOOPS)}
    best = max(len(find_last_reads(order, ends)) for order in permutations(range(NUM_LOOPS)))
    assert len(find_last_reads(order_for_reuse(range(NUM_LOOPS), ends, free), ends)) >= best - 1
