"""Python's garbage collector while a step is built: what the caller has set is as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from zerofx.garbage import limit_garbage_collection


@pytest.fixture
def frozen() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()


def test_what_was_there_before_is_frozen_only_while_it_is_open() -> None:
    thresholds, num_before = gc.get_threshold(), gc.get_freeze_count()
    with limit_garbage_collection():
        assert gc.get_freeze_count() > num_before + 10_000
        assert gc.get_threshold()[0] > thresholds[0]
    assert gc.get_freeze_count() <= num_before
    assert gc.get_threshold() == thresholds


@pytest.mark.usefixtures("frozen")
def test_what_the_caller_has_frozen_stays_so_and_nothing_else_is_frozen() -> None:
    thresholds, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    with limit_garbage_collection():
        assert gc.get_freeze_count() <= num_frozen  # fewer where some of them have gone
        assert gc.get_threshold()[0] > thresholds[0]
    assert 0 < gc.get_freeze_count() <= num_frozen
    assert gc.get_threshold() == thresholds


def test_a_collector_that_is_switched_off_stays_so() -> None:
    gc.disable()
    try:
        with limit_garbage_collection():
            assert not gc.isenabled()
    finally:
        gc.enable()
