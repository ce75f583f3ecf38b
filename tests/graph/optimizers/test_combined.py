"""Parameters that lie on several ranks are combined by numbers that are sent to all, in the order of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zerofx.errors import OptimizerError
from zerofx.optimizers.whole.combined import Combined, check_apart, owner_of, set_owner


def _owned(owner: int, *shape: int) -> Tensor:
    tensor = torch.randn(shape)
    set_owner(tensor, owner)
    return tensor


def _run(compute: Callable[[], Tensor]) -> tuple[Tensor, list[tuple[int, tuple[int, ...]]]]:
    """The result, and what was sent: by whom, of which shape."""
    sent: list[tuple[int, tuple[int, ...]]] = []

    def share(tensor: Tensor, owner: int) -> Tensor:
        sent.append((owner, tuple(tensor.shape)))
        return tensor.clone()

    with Combined("Mine", share):
        result = compute()
    return result, sent


def test_sums_of_norms_have_the_order_of_parameters_and_are_sent_where_owners_meet() -> None:
    parameters = [_owned(owner, 30, 30) for owner in (1, 0, 1)]

    def compute() -> Tensor:
        total = torch.zeros(())
        for each in parameters:
            total = total + each.norm() ** 2
        return total

    found, sent = _run(compute)
    assert sent == [(1, ()), (0, ())] and owner_of(found) == 1  # the last term is of a rank that has the sum already
    assert torch.equal(found, compute())


def test_what_all_ranks_have_may_be_added_to_in_place() -> None:
    parameters, total = [_owned(owner, 6) for owner in (0, 1)], torch.zeros(6)

    def compute() -> Tensor:
        for each in parameters:
            total.add_(each)
        return total

    found, sent = _run(compute)
    assert found is total and owner_of(total) is None and sent == [(0, (6,)), (1, (6,))]


def test_what_is_computed_of_one_parameter_stays_with_its_owner() -> None:
    parameter, factor = _owned(1, 100, 100), torch.tensor(0.5)
    found, sent = _run(lambda: parameter.mul_(factor) @ parameter)
    assert owner_of(found) == 1 and sent == []


def test_a_number_that_is_read_is_sent_to_all() -> None:
    parameter = _owned(1, 100, 100)
    _, sent = _run(lambda: torch.tensor(parameter.norm().item()))
    assert sent == [(1, ())]


def test_lists_of_tensors_are_worked_on_one_by_one() -> None:
    parameters = [_owned(owner, 5) for owner in (0, 1)]
    norms, sent = _run(lambda: torch.stack(torch._foreach_norm(parameters)))
    assert sent == [(0, ()), (1, ())]
    assert torch.equal(norms, torch.stack([each.norm() for each in parameters]))


def test_whole_tensors_of_two_owners_are_not_mixed() -> None:
    one, other = _owned(0, 80, 80), _owned(1, 80, 80)
    with pytest.raises(OptimizerError, match=r"combines parameters by numbers alone, found that Mine calls aten\.add"):
        _run(lambda: one + other)


def test_tensors_of_one_owner_are_not_kept_in_groups() -> None:
    check_apart([{"lr": torch.tensor(0.1)}], "Mine")
    with pytest.raises(OptimizerError, match=r"expected Mine to keep .* in state\[p\], found a tensor of shape \[3\]"):
        check_apart([{"last": _owned(0, 3)}], "Mine")
