"""The fixed order of moves: best rate first, each item's menu in order, prefixes as levels."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zerofx.scheduler.decide.ledger import Level
from zerofx.scheduler.search.order import last_moves, order_moves

MENUS = st.lists(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), max_size=5).map(
        lambda steps: [
            Level(1000 - sum(freed for freed, _ in steps[:n]), float(sum(spent for _, spent in steps[:n])))
            for n in range(len(steps) + 1)
        ]
    ),
    max_size=5,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MENUS)
def test_each_item_goes_down_its_menu_in_order_and_all_moves_are_there(menus: list[list[Level]]) -> None:
    moves = order_moves(menus)
    for item, menu in enumerate(menus):
        mine = [move for move in moves if move.item == item]
        assert [move.level for move in mine] == list(range(1, len(menu)))
        assert sum(move.freed_bytes for move in mine) == menu[0].num_bytes - menu[-1].num_bytes
        assert sum(move.extra_seconds for move in mine) == menu[-1].seconds - menu[0].seconds


def test_what_frees_most_for_a_second_goes_first_and_of_equals_the_earlier_item() -> None:
    cheap, dear = [Level(100, 0.0), Level(0, 1.0)], [Level(100, 0.0), Level(0, 4.0)]
    assert [move.item for move in order_moves([dear, cheap, cheap])] == [1, 2, 0]


def test_a_move_that_costs_nothing_comes_before_all_others() -> None:
    free = [Level(10, 0.0), Level(5, 0.0)]
    assert order_moves([[Level(1000, 0.0), Level(0, 1e-9)], free])[0].item == 1


def test_a_better_move_behind_a_worse_one_counts_together_with_it() -> None:
    menu = [Level(100, 0.0), Level(99, 1.0), Level(0, 1.5)]  # 100 bytes for 1.5 seconds in all
    cheaper, dearer = [Level(100, 0.0), Level(30, 1.0)], [Level(100, 0.0), Level(40, 1.0)]
    assert [(move.item, move.level) for move in order_moves([dearer, menu, cheaper])] == [
        (2, 1), (1, 1), (1, 2), (0, 1),
    ]  # fmt: skip


def test_one_item_goes_all_the_way_that_belongs_together_before_the_next_begins() -> None:
    menu = [Level(100, 0.0), Level(99, 1.0), Level(0, 1.5)]
    assert [(move.item, move.level) for move in order_moves([menu, menu])] == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_the_last_move_of_an_item_is_its_level() -> None:
    menu = [Level(100, 0.0), Level(40, 1.0), Level(0, 3.0)]
    moves = order_moves([menu, menu])
    assert {item: move.level for item, move in last_moves(moves[:3]).items()} == {0: 2, 1: 1}
    assert last_moves([]) == {}
