"""What other steps train is read as they have it, and made what is computed with for each reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tests.lib.graphs import DIM, TwoBlocks, calls, captured, difference, features
from zerofx.ir.facts import Role, origin, placeholder, tensor
from zerofx.ir.graph import StepGraph
from zerofx.passes.prepare.borrow import Borrow

aten = torch.ops.aten
LAYER = "layers.1.linear.weight"


def _read(held: torch.dtype) -> tuple[StepGraph, StepGraph]:
    """A step in float32, and the same where a layer is another step's, which computes with it in another dtype."""
    step = captured(TwoBlocks(), *features())
    read = step.clone()
    (info,) = (info for info in read.parameters if info.name == LAYER)
    Borrow({LAYER: [replace(info, compute_dtype=held)]}).run(read)
    return step, read


def test_a_cast_stands_before_each_reader(golden: Callable[..., None]) -> None:
    step, read = _read(torch.bfloat16)
    golden(difference(step.text(), read.text()))


def test_slices_are_cast_once_they_are_put_together(golden: Callable[..., None]) -> None:
    step = captured(TwoBlocks(), *features())
    read = step.clone()
    (info,) = (info for info in read.parameters if info.name == LAYER)
    bounds = ((0, 1), (1, DIM))
    slices = [
        replace(
            info, name=f"{LAYER}[{start}:{end}]", shape=(end - start, DIM), stride=(DIM, 1), whole=LAYER,
            first_row=start, compute_dtype=torch.bfloat16,
        )
        for start, end in bounds
    ]  # fmt: skip
    Borrow({LAYER: slices}).run(read)
    assert [info.name for info in read.parameters if info.source == LAYER] == [info.name for info in slices]
    golden(difference(step.text(), read.text()))


def test_nothing_waits_for_backward() -> None:
    _, read = _read(torch.bfloat16)
    (node,) = (node for node in read.placeholders(Role.PARAMETER) if placeholder(node).name == LAYER)
    casts = calls(read, aten._to_copy.default)
    assert tensor(node).dtype is torch.bfloat16 and set(node.users) == set(casts) and len(casts) > 1
    for cast in casts:
        assert all(origin(user).phase is origin(cast).phase for user in cast.users)
    assert {info.compute_dtype for info in read.parameters if info.name == LAYER} == {torch.bfloat16}


def test_what_is_there_as_it_is_computed_with_stays() -> None:
    step, read = _read(torch.float32)
    assert step.text() == read.text()
