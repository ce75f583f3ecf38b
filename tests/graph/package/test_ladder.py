"""Ladders of lengths: few rungs, none that wastes much above the even ones, and what is no ladder."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerofx import UsageError
from zerofx.ladder import MOST_WASTE, Ladder, check_lengths, fitted_lengths, ladder_up_to, multiple_for


@pytest.mark.parametrize("longest", [1, 2, 7, 8, 9, 100, 511, 512, 513, 4096, 11264, 131072])
def test_a_ladder_has_even_rungs_and_then_wastes_little(longest: int) -> None:
    rungs, multiple = ladder_up_to(longest).rungs, multiple_for(longest)
    assert rungs[-1] == longest
    assert all(rung % multiple == 0 for rung in rungs[:-1])
    before = 0
    for rung in rungs:
        waste = rung - (before + 1)
        assert waste <= MOST_WASTE * rung or rung - before <= multiple
        before = rung
    assert len([rung for rung in rungs if rung <= 512]) <= 8


def test_lengths_up_to_512_have_eight_rungs() -> None:
    assert ladder_up_to(512).rungs == (64, 128, 192, 256, 320, 384, 448, 512)
    assert ladder_up_to(32).rungs == (4, 8, 12, 16, 20, 24, 28, 32)
    assert ladder_up_to(1024).rungs[8:] == (576, 640, 704, 768, 832, 896, 960, 1024)


def test_what_a_length_is_padded_to() -> None:
    ladder = Ladder((128, 256, 512))
    assert [ladder.rung_of(n) for n in (1, 128, 129, 256, 257, 512)] == [128, 128, 256, 256, 512, 512]
    assert ladder.sizes(4) == [(512, 4), (256, 4), (128, 4)]
    given = check_lengths({512: 2, 64: 32})
    assert isinstance(given, Ladder)
    assert given.sizes(4) == [(64, 32), (512, 2)]


@pytest.mark.parametrize("asked", ["any", 0, -1, True, 1.5, [], [0, 1], [64, "128"], {64: 0}, {}, {"64": 1}, object()])
def test_what_is_no_ladder(asked: Any) -> None:
    with pytest.raises(UsageError, match="expected lengths to be numbers of tokens"):
        check_lengths(asked)


def test_what_is_one() -> None:
    assert check_lengths([256, 128, 256]) == Ladder((128, 256))
    assert [check_lengths(asked) for asked in (None, "auto", 512)] == [None, "auto", 512]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 4), st.sampled_from((4, 8)))
def test_fitted_rungs_pad_least(lengths: list[int], num_rungs: int, multiple: int) -> None:
    fitted = fitted_lengths(lengths, num_rungs, multiple=multiple)
    top = -(-max(lengths) // multiple) * multiple
    others = [
        (*lower, top) for size in range(num_rungs) for lower in combinations(range(multiple, top, multiple), size)
    ]
    assert fitted in others
    padded = [sum(Ladder(rungs).rung_of(length) for length in lengths) for rungs in (fitted, *others)]
    assert padded[0] == min(padded)


def test_fitted_rungs_pad_log_uniform_lengths_less_than_even_ones() -> None:
    lengths = [round(17 * (512 / 17) ** (position / 999)) for position in range(1000)]
    fitted = Ladder(fitted_lengths(lengths))
    even = ladder_up_to(512)
    assert len(fitted.rungs) == len(even.rungs)
    wastes = [1 - sum(lengths) / sum(map(ladder.rung_of, lengths)) for ladder in (fitted, even)]
    assert wastes[0] < 0.16 < 0.175 < wastes[1]


@pytest.mark.parametrize(("lengths", "num_rungs"), [([], 8), ([5], 0), ([0, 5], 8)])
def test_lengths_that_no_rungs_fit_are_refused(lengths: list[int], num_rungs: int) -> None:
    with pytest.raises(UsageError, match="expected lengths of samples"):
        fitted_lengths(lengths, num_rungs)
