"""What scripts do out of habit around ``loss = step(batch)``: it is right, or an error says what to do instead."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.users import adamw, eager_step, ids, same_parameters, tiny
from zerofx.errors import RankMismatchError, ShardedParametersError, UsageError, ZeroFXWarning
from zerofx.runtime.comm.same_host import channels


def _step(stage: int = 3, **options: Any) -> zerofx.Step:
    model = tiny()
    return zerofx.compile(model, adamw(model), stage, backend="eager", **options)


def _train(step: zerofx.Step, seed: int = 0) -> torch.Tensor:
    loss: torch.Tensor = step(ids(seed), labels=ids(9))
    return loss


def test_gradients_that_are_clipped_or_read_after_a_step_are_an_error_that_says_what_to_give() -> None:
    step = _step()
    _train(step)
    for use in (
        lambda: nn.utils.clip_grad_norm_(step.model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_norm_(step.model.parameters(), 1.0, foreach=False),
        lambda: nn.utils.clip_grad_value_(step.model.parameters(), 1.0),
        lambda: next(step.model.parameters()).grad.add_(1.0),  # type: ignore[union-attr]  # there is a stand-in
        lambda: [parameter.grad.add_(parameter.data, alpha=0.1) for parameter in step.model.parameters()],  # type: ignore[union-attr]  # there is a stand-in
        lambda: next(step.model.parameters()).grad.numpy(),  # type: ignore[union-attr]  # there is a stand-in
        lambda: next(step.model.parameters()).grad.tolist(),  # type: ignore[union-attr]  # there is a stand-in
        lambda: [parameter.grad.mul_(2.0) for parameter in step.model.parameters() if parameter.grad is not None],
    ):
        with pytest.raises(UsageError, match="max_grad_norm="):
            use()
    with pytest.raises(UsageError, match=r"optimizer.step\(\)"):
        step.optimizer.step()
    for set_to_none in (True, False):
        step.optimizer.zero_grad(set_to_none=set_to_none)
        _train(step)


def test_memory_that_is_shared_with_other_processes_is_noticed() -> None:
    step = _step()
    _train(step)
    step.model.share_memory()
    with pytest.raises(UsageError, match=r"was replaced or moved since .*call step.close\(\) before"):
        _train(step)


def test_a_step_is_neither_copied_nor_pickled() -> None:
    step = _step()
    for use in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=r"neither copied nor pickled.*save_checkpoint"):
            use(step)


def test_a_backward_pass_of_the_users_own_finds_no_gradient_before_it() -> None:
    step, plain = _step(stage=0), tiny()
    eager_step(plain, adamw(plain), ids(), labels=ids(9))
    _train(step)
    plain.zero_grad()
    with step.full_parameters() as model:
        for one in (model, plain):
            for _ in range(2):
                one(ids(3), labels=ids(4)).backward()
    for mine, theirs in zip(step.model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad * 1.0, theirs.grad)
    nn.utils.clip_grad_norm_(step.model.parameters(), 0.1)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    step.close()
    for mine, theirs in zip(step.model.parameters(), plain.parameters(), strict=True):
        assert type(mine.grad) is torch.Tensor and theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_a_closed_step_leaves_no_trace_of_gradients() -> None:
    step = _step()
    _train(step)
    step.close()
    assert all(parameter.grad is None for parameter in step.model.parameters())


def _dcp(stage: int) -> None:
    """What DCP's helpers give is what eager mode has, nothing is changed, and what they set is trained on."""
    step, plain = _step(stage), tiny()
    optimizer = adamw(plain)
    for seed in range(2):
        _train(step, seed)
        eager_step(plain, optimizer, ids(seed), labels=ids(9))
    if dist.is_initialized():
        with pytest.raises(ShardedParametersError):
            get_state_dict(step.model, step.optimizer)
    groups = [dict(group) for group in step.optimizer.param_groups]
    with step.full_parameters() as model:
        found = get_state_dict(model, step.optimizer)
        flat = get_optimizer_state_dict(
            model, step.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )
    assert [dict(group) for group in step.optimizer.param_groups] == groups
    expected = get_state_dict(plain, optimizer)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(found[1]["state"], expected[1]["state"], rtol=0, atol=0)
    assert found[1]["param_groups"] == expected[1]["param_groups"]
    other = _step(stage)
    _train(other, 7)
    with other.full_parameters(write_back=True) as model:
        set_state_dict(model, other.optimizer, model_state_dict=found[0], optim_state_dict=found[1])
    fresh = _step(stage)
    _train(fresh, 7)
    with fresh.full_parameters() as model, pytest.raises(UsageError, match="flatten_optimizer_state_dict=False"):
        set_state_dict(model, fresh.optimizer, model_state_dict={}, optim_state_dict=flat)
    fresh.close()
    assert torch.equal(_train(other, 3), eager_step(plain, optimizer, ids(3), labels=ids(9)))
    step.close()
    other.close()
    assert same_parameters(other.model, plain)


def test_checkpoint_helpers_of_torch_see_and_set_what_is_trained() -> None:
    _dcp(3)


def test_checkpoint_helpers_of_torch_on_two_ranks() -> None:
    run_ranks(_dcp, 2, 3)


def _schedule_by_rank() -> str:
    step = _step()
    _train(step)
    step.optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
    before = step.full_state_dict()
    with pytest.raises(RankMismatchError) as caught:
        _train(step)
    assert all(torch.equal(before[name], value) for name, value in step.full_state_dict().items())
    step.optimizer.param_groups[0]["lr"] = 0.1
    _train(step)
    step.close()
    return str(caught.value)


def test_a_learning_rate_that_differs_by_rank_is_an_error_on_all_with_both_values() -> None:
    zero, one = run_ranks(_schedule_by_rank, 2)
    assert zero == one
    assert (
        "lr of param group 0: 0.1" in zero
        and "rank 1: lr of param group 0: 0.2" in zero
        and "mean of all ranks' losses" in zero
    )


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _drop() -> tuple[list[int], list[int]]:
    descriptors, threads = [], []
    for _ in range(5):
        _train(_step())
        gc.collect()
        dist.barrier()
        descriptors.append(_num_descriptors())
        threads.append(_num_threads())
    return descriptors, threads


@pytest.mark.days(3)
def test_steps_that_are_dropped_without_close_leave_no_descriptors_and_threads() -> None:
    for descriptors, threads in run_ranks(_drop, 2):
        assert descriptors[-1] <= descriptors[1] and threads[-1] <= threads[1], (descriptors, threads)


def _apart(monkeypatched: bool) -> tuple[str, list[str]]:
    if monkeypatched:
        channels._can_read = lambda words, machine: False  # as between containers of one machine
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ZeroFXWarning)
        step = _step()
        for _ in range(2):
            _train(step)
    text = str(step)
    step.close()
    return text, [str(one.message) for one in caught]


@pytest.mark.parametrize("apart", [False, True])
def test_ranks_of_a_machine_that_cannot_read_each_other_are_told_so_once(apart: bool) -> None:
    for rank, (text, told) in enumerate(run_ranks(_apart, 2, apart)):
        notice = f"rank {rank} and rank {1 - rank} run on one machine and cannot read each other's memory"
        assert (notice in text) is apart
        assert [notice in one for one in told] == [True] * apart


class Spoilt(nn.Module):
    """Its loss is not finite where a number of the batch is not; it counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _spoil(mode: str, stage: int, accumulate: int) -> tuple[str, list[str]]:
    """Of three steps the second has a loss that is not finite, on the last rank alone."""
    torch.manual_seed(1)
    good, other = torch.randn(4, 8), torch.randn(4, 8)
    last = not dist.is_initialized() or dist.get_rank() == 1
    spoilt = torch.full_like(good, torch.nan) if last else good

    def new(**options: Any) -> zerofx.Step:
        model = Spoilt()
        model.norm.momentum = 0.0  # the batch that is left out leaves no statistics
        return zerofx.compile(model, adamw(model), stage, backend="eager", accumulate=accumulate, **options)

    step, reference = new(on_nonfinite=mode), new()
    assert torch.equal(step(good), reference(good))
    before = step.full_state_dict()
    text = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ZeroFXWarning)
        try:
            loss = step(spoilt)
            assert loss.isfinite() == (not last)
        except zerofx.NonFiniteLossError as error:
            text = str(error)
    after = step.full_state_dict()
    trained = [name for name, _ in step.model.named_parameters()]
    assert all(torch.equal(before[name], after[name]) for name in trained)
    assert (step.num_skipped, step.num_steps) == ((1, 1) if mode == "skip" else (0, 1))
    assert torch.equal(step(other), reference(other))
    states = [one.optimizer.state_dict()["state"] for one in (step, reference)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    measured = step.measure(other)
    assert measured.peak_bytes["device"] == step.plan.peak_bytes["device"]
    if not dist.is_initialized() or dist.get_rank() == 0:  # which alone sends buffers, as is predicted
        assert measured.wire_bytes == step.plan.wire_bytes
    step.close()
    reference.close()
    return text, [str(one.message) for one in caught]


def _check_spoilt(text: str, told: list[str], mode: str) -> None:
    expected = "expected a finite loss on every rank in step 2"
    assert (expected in text) is (mode == "raise")
    assert [expected in one for one in told] == [True] * (mode == "skip")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", ["skip", "raise"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_not_finite_stops_before_the_update(mode: str, accumulate: int) -> None:
    _check_spoilt(*_spoil(mode, 3, accumulate), mode)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("mode", "stage"), [("skip", 3), ("raise", 0), ("skip", 2)])
def test_a_loss_that_is_not_finite_on_one_rank_stops_all(mode: str, stage: int) -> None:
    for text, told in run_ranks(_spoil, 2, mode, stage, 1):
        _check_spoilt(text, told, mode)


class Noting(nn.Module):
    """Puts features aside in a list of its own; its hook does in a dict of the script's."""

    def __init__(self, notes: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.features = nn.Linear(4, 4), list[torch.Tensor]()
        self.linear.register_forward_hook(lambda _, given, found: notes.update(linear=found))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features.append(self.linear(x).tanh())
        loss: torch.Tensor = self.features[-1].square().mean()
        return loss


def test_features_that_a_forward_puts_aside_are_told_once_with_what_to_do() -> None:
    model = Noting({})
    step = zerofx.compile(model, torch.optim.SGD(model.parameters()), backend="eager")
    with (
        pytest.warns(ZeroFXWarning, match=r"found some in notes.*forward=lambda model, \*batch"),
        pytest.warns(ZeroFXWarning, match=r"leaves features: .*return from forward= what is to be looked at"),
    ):
        step(torch.ones(2, 4))
    assert model.features == []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(torch.ones(2, 4))
        step(torch.ones(3, 4))
    texts = [str(warning.message) for warning in told]
    assert len(texts) == 2 and "another shape" in texts[0] and "leaves features" in texts[1]
