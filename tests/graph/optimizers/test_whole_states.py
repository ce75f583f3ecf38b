"""States of whole parameters are taken apart into tensors and the rest, and put together again, also from JSON."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from zerofx.errors import OptimizerError
from zerofx.optimizers.whole.states import (
    TensorAt,
    join_tensors,
    kinds_in,
    paths_in,
    split_tensors,
    tree_from_plain,
    tree_to_plain,
)


class Projector:
    """An object such as libraries keep among states."""

    def __init__(self) -> None:
        self.rank, self.basis = 4, torch.randn(3, 2)


def _entry() -> dict[str, Any]:
    return {
        "step": torch.tensor(3.0),
        "number": 7,
        "factors": [torch.randn(2, 2), [torch.randn(3), None], ()],
        "by name": {"inner": {"row": torch.randn(4)}, 5: torch.randn(1, 2)},
        "history": deque([torch.randn(2), 1.5], maxlen=3),
        "of a library": Projector(),
        "codes": TwoTensor(torch.randn(2, 3), torch.randn(2, 3)),
        "dtype": torch.bfloat16,
        "shape": torch.Size([2, 3]),
        "limits": (float("inf"), -float("inf")),
        "flag": torch.tensor(True),
    }


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, TwoTensor):
        return torch.equal(one.a, other.a) and torch.equal(one.b, other.b)
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Projector):
        return _same(vars(one), vars(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def test_what_is_taken_apart_is_put_together_again() -> None:
    entry = _entry()
    tree, tensors = split_tensors(entry)
    assert sorted(paths_in(tree)) == sorted(tensors)
    assert {"factors.0", "factors.1.0", "by name.inner.row", "by name.5", "history.0", "codes.a"} <= tensors.keys()
    assert tensors["by name.inner.row"].data_ptr() == entry["by name"]["inner"]["row"].data_ptr()
    assert _same(join_tensors(tree, tensors), entry)


def test_a_tree_is_the_same_after_json() -> None:
    tree, tensors = split_tensors(_entry())
    text = json.dumps(tree_to_plain(tree), allow_nan=False)
    assert _same(join_tensors(tree_from_plain(json.loads(text), kinds_in(tree)), tensors), join_tensors(tree, tensors))


def test_what_a_step_changes_in_an_entry_is_its_own() -> None:
    tree, tensors = split_tensors({"step": torch.tensor(1.0), "list": [1, 2], "deque": deque([1], maxlen=2)})
    first = join_tensors(tree, tensors)
    first["step"] += 1
    first["list"].append(3)
    first["deque"].append(4)
    assert _same(join_tensors(tree, tensors), {"step": torch.tensor(1.0), "list": [1, 2], "deque": deque([1], 2)})


def test_tensors_without_dimensions_are_taken_out_where_all_are_asked_for() -> None:
    step = torch.tensor(3.0)
    tree, tensors = split_tensors({"step": step}, all_tensors=True)
    assert tree == {"step": TensorAt("step")} and tensors["step"] is step


def test_ordered_dicts_keep_their_class() -> None:
    tree, tensors = split_tensors(OrderedDict(a=torch.ones(2)))
    assert type(join_tensors(tree, tensors)) is OrderedDict


@pytest.mark.parametrize(
    "value", [lambda: None, {1, 2}, iter(()), object()], ids=["function", "set", "iterator", "object"]
)
def test_what_can_be_neither_saved_nor_moved_is_refused(value: Any) -> None:
    with pytest.raises(OptimizerError, match=r"found a .* at kept\.0: it can be neither saved nor moved"):
        split_tensors({"kept": [value]})


def test_states_of_another_class_are_refused() -> None:
    plain = tree_to_plain(split_tensors({"of a library": Projector()})[0])
    with pytest.raises(OptimizerError, match=r"that this optimizer makes \(plain tensors\), found .*Projector"):
        tree_from_plain(plain, {})
