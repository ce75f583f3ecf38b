"""A rank is killed while it saves, next to a full drive or a second run: nobody hangs, and what is there is whole."""

from __future__ import annotations

import pytest

from tests.nets.saves import NUM_CASES, Case, run


@pytest.mark.sweep(1)
@pytest.mark.parametrize("number", range(4))
def test_a_kill_while_saving_leaves_whole_checkpoints(number: int) -> None:
    assert run(Case.of(number)).detail == ""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_CASES))
def test_every_kill(number: int) -> None:
    assert run(Case.of(number)).detail == ""
