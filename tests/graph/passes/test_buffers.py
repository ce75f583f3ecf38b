"""Buffers of the model are written in place, and begin the step as rank 0 has them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.lib.graphs import Averaging, TwoBlocks, calls, prepare
from zerofx.ir import ops

aten = torch.ops.aten


def test_a_running_mean_is_written_back(golden: Callable[..., None]) -> None:
    golden(prepare(Averaging()).changes("buffers"))


def test_on_one_rank_nothing_is_broadcast() -> None:
    assert not calls(prepare(Averaging(), num_ranks=1).run("buffers").step, ops.broadcast)


def test_buffers_that_the_step_leaves_alone_are_not_touched() -> None:
    model = TwoBlocks()
    model.register_buffer("unused", torch.zeros(2))
    prepared = prepare(model)
    assert prepared.changes("buffers") == ""
