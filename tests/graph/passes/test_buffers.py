"""Buffers of the model are written in place, and begin the step as rank 0 has them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.lib.graphs import Averaging, TwoBlocks, calls, prepare
from zerofx.ir import ops
from zerofx.ir.edit import consumers

aten = torch.ops.aten


def test_a_running_mean_is_written_back(golden: Callable[..., None]) -> None:
    golden(prepare(Averaging()).changes("buffers"))


def test_a_buffer_is_written_after_the_last_reader_of_its_old_value() -> None:
    prepared = prepare(Averaging()).run("buffers")
    order, buffer = prepared.step.positions(), prepared.node("buffer_mean")
    (write,) = [node for node in calls(prepared.step, aten.copy_.default) if node.args[0] is buffer]
    readers = [node for node in consumers(buffer) if node is not write]
    assert readers and max(order[node] for node in readers) < order[write]
    assert not prepared.step.mutations


def test_buffers_are_broadcast_before_anything_reads_them() -> None:
    prepared = prepare(Averaging()).run("buffers")
    (broadcast,) = calls(prepared.step, ops.broadcast)
    order = prepared.step.positions()
    readers = [node for node in prepared.node("buffer_mean").users if node is not broadcast]
    assert readers and order[broadcast] < min(order[node] for node in readers)


def test_on_one_rank_nothing_is_broadcast() -> None:
    assert not calls(prepare(Averaging(), num_ranks=1).run("buffers").step, ops.broadcast)


def test_buffers_that_the_step_leaves_alone_are_not_touched() -> None:
    model = TwoBlocks()
    model.register_buffer("unused", torch.zeros(2))
    prepared = prepare(model)
    assert prepared.changes("buffers") == ""
