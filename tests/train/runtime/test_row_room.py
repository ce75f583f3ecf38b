"""Room for rows of experts: what steps ask for after what was counted in earlier ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerofx import MemoryBudgetError
from zerofx.errors import InternalError
from zerofx.runtime.state.row_room import RowRoom
from zerofx.scheduler.plan.decisions import ShardingDecision
from zerofx.scheduler.plan.plan import Plan


def _plan(capacity: float, num_rounds: int = 1, num_copies: int = 0) -> Plan:
    decision = ShardingDecision("mm", (f"S0[ends*{capacity}]",), num_rounds=num_rounds, num_copies=num_copies)
    return replace(Plan(0, 2, None, "cpu", "", (), (), ()), shardings=(decision,))


def test_there_is_room_for_what_was_counted_from_the_next_run_on() -> None:
    room = RowRoom()
    room.widen(2.5, 4)
    assert room.size == (3.0, 1)
    room.note_built(_plan(3.0))
    room.note_run()
    assert room.size == (3.0, 1)
    room.widen(4.0, 4)
    assert room.size == (4.0, 1)
    room.widen(4.5, 4)
    assert room.size == (16.0, 1)
    with pytest.raises(InternalError, match=r"16 equal shares.*fit in 16"):
        room.widen(16.0, 4)


def _refused() -> RowRoom:
    """Room for two equal shares was asked for, and fits no budget: there are two rounds."""
    room = RowRoom()
    room.widen(2.0, 2)
    assert room.size == (2.0, 1)
    room.note_built(_plan(1.25, 2))
    return room


def test_where_no_more_fits_one_of_more_and_more_steps_sends_rows_at_once() -> None:
    room = _refused()
    room.note_run()
    assert room.size == (1.25, 1)
    room.widen(2.0, 2)
    for _ in range(2):
        assert room.size == (1.25, 2)
        room.note_run()
    assert room.size == (1.25, 1)
    room.note_run()  # in which rows have found room
    room.widen(2.0, 2)
    room.note_run()
    assert room.size == (1.25, 1)


def test_there_are_as_many_rounds_as_are_needed() -> None:
    room = _refused()
    room.widen(2.0, 2)
    assert room.size == (1.25, 3)
    room.note_run()
    room.widen(2.0, 2)
    assert room.size == (1.25, 3)
    for _ in range(5):
        room.widen(2.0, 2)
    with pytest.raises(MemoryBudgetError, match="2 equal shares"):
        room.widen(2.0, 2)
    assert room.size == (1.25, 1)


def test_a_step_that_fits_in_no_way_leaves_what_there_was() -> None:
    room = RowRoom()
    room.widen(2.0, 2)
    room.give_up()
    assert room.size == (1.25, 1)
    room.give_up()
    assert room.size == (1.25, 1)


def test_experts_are_copied_until_rows_have_room_without() -> None:
    room = RowRoom(2)
    assert (room.copies, room.key) == ((0, 0.0), "")
    room.widen(4.0, 4)
    assert (room.size, room.copies) == ((1.25, 1), (2, 4.0))
    assert room.key
    room.note_built(_plan(1.25, num_copies=2))
    room.note_run(4.0)
    assert room.copies == (2, 4.0)
    room.note_run(1.0)
    assert (room.size, room.copies, room.key) == ((1.25, 1), (0, 0.0), "")
    room.widen(4.0, 4)  # at once again: twice as many steps in a row are to have room before the next try
    room.note_run(1.0)
    assert room.copies == (2, 4.0)
    room.note_run(1.0)
    assert room.copies == (0, 0.0)


def test_there_is_room_where_copies_are_no_faster() -> None:
    room = RowRoom(2)
    room.widen(2.0, 4)
    room.note_built(_plan(2.0))
    assert (room.size, room.copies) == ((2.0, 1), (0, 0.0))
    room.widen(4.0, 4)  # for which they may be
    assert (room.size, room.copies) == ((2.0, 1), (2, 4.0))
    room.note_built(_plan(1.25, 4))  # neither pays, nor fits
    assert (room.size, room.copies) == ((1.25, 4), (0, 0.0))


def test_copies_that_are_too_few_have_more_room() -> None:
    room = RowRoom(1)
    room.widen(4.0, 4)
    room.note_built(_plan(1.25, num_copies=1))
    room.widen(2.0, 4)
    assert (room.size, room.copies) == ((2.0, 1), (1, 4.0))
