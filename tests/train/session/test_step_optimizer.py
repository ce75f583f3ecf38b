"""A compiled step and its optimizer: options and states that change, are loaded, or do not fit."""

from __future__ import annotations

import copy
import re
import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.lib.runs.pairs import OptimizerOf, Pair, compile_eager, momentum
from tests.lib.users import adamw, eager_step, ids, tiny
from zerofx import UsageError, ZeroFXWarning
from zerofx.driver import driver
from zerofx.lowering.load import build


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The source of every step that is built."""
    seen: list[str] = []

    def counted(lowered: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(lowered.emitted.source)
        return build(lowered, *args, **kwargs)

    monkeypatch.setattr(driver, "build", counted)
    return seen


@pytest.mark.filterwarnings("error")
def test_options_that_change_between_steps_change_the_update_as_in_eager_mode(builds: list[str]) -> None:
    pair = Pair()
    pair.train(2)
    pair.set(lr=0.01, betas=(0.8, 0.9))
    pair.train(2)
    assert len(builds) == 1
    pair.set(weight_decay=0.0)
    pair.train(2)
    pair.set(weight_decay=0.1, maximize=True)
    pair.train(2)
    number = len(builds)
    assert number > 1
    pair.set(weight_decay=0.0, maximize=False)
    pair.train(1)
    pair.set(weight_decay=0.1, maximize=True)
    pair.train(1)
    assert len(builds) == number, "updates that were built before are used again"
    assert pair.same()


def test_another_update_is_no_other_shape(builds: list[str]) -> None:
    pair = Pair(max_shapes=2)
    pair.train()
    with pytest.warns(ZeroFXWarning, match="another shape"):
        pair.train(rows=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.set(maximize=True)
        pair.train()
        pair.train(rows=1)
        pair.set(maximize=False)
        pair.train()
        pair.train(rows=1)
    assert len(builds) == 4
    assert pair.same()


def test_momentum_is_built_for_its_first_step_and_for_the_others(builds: list[str]) -> None:
    pair = Pair(momentum)
    pair.train(6)
    assert len(builds) == 2
    assert pair.same()


def test_a_scheduler_changes_the_learning_rate(builds: list[str]) -> None:
    pair = Pair()
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in pair.optimizers]
    for _ in range(3):
        pair.train()
        for scheduler in schedulers:
            scheduler.step()
    assert pair.same()
    assert len(builds) == 1


@pytest.mark.parametrize("optimizer", [adamw, momentum])
def test_a_loaded_optimizer_goes_on_where_it_was(optimizer: OptimizerOf, builds: list[str]) -> None:
    model = tiny()
    first = optimizer(model)
    for seed in range(2):
        eager_step(model, first, ids(seed), labels=ids(9))
    pair = Pair(optimizer)
    for m, o in ((pair.model, pair.optimizers[0]), (pair.plain, pair.optimizers[1])):
        m.load_state_dict(model.state_dict())
        o.load_state_dict(copy.deepcopy(first.state_dict()))
    pair.train(2)
    assert len(builds) == 1
    pair.optimizers[0].load_state_dict(copy.deepcopy(first.state_dict()))
    pair.optimizers[1].load_state_dict(copy.deepcopy(first.state_dict()))
    pair.train(2)
    assert pair.same()


def test_a_state_that_does_not_fit_is_refused_and_the_states_are_kept() -> None:
    pair = Pair()
    pair.train(2)
    wrong = copy.deepcopy(pair.optimizers[0].state_dict())
    del wrong["state"][6]["exp_avg"]
    with pytest.raises(zerofx.OptimizerError, match=r"state 'exp_avg' for every parameter of head, .*\['head.bias'\]"):
        pair.optimizers[0].load_state_dict(wrong)
    pair.train()


def test_parameters_that_were_trained_in_other_steps_are_updated_apart() -> None:
    losses, steps = [], []
    for compiles in (False, True):
        model = tiny()
        optimizer = adamw(model)
        eager_step(model, optimizer, ids(), labels=ids(1))
        optimizer.state[model.head.bias]["step"] += 1
        step = compile_eager(model, optimizer) if compiles else None
        for _ in range(2):
            batch = ids(), ids(1)
            loss = (
                eager_step(model, optimizer, batch[0], labels=batch[1])
                if step is None
                else step(batch[0], labels=batch[1])
            )
            losses.append(loss.detach().clone())
        steps.append([float(entry["step"]) for entry in optimizer.state_dict()["state"].values()])
    assert losses[:2] == losses[2:]
    assert steps[0] == steps[1] and len(set(steps[0])) == 2


@pytest.mark.parametrize("make", [adamw, momentum])
def test_a_state_from_before_the_first_step_has_the_optimizer_begin_anew(make: OptimizerOf) -> None:
    pair = Pair(make)
    start = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
    pair.train(3)
    for optimizer, state in zip(pair.optimizers, start, strict=True):
        optimizer.load_state_dict(state)
    pair.train(3)
    assert pair.same()
    of_head = [i for i, (name, _) in enumerate(pair.plain.named_parameters()) if name.startswith("head")]
    for optimizer in pair.optimizers:
        state = copy.deepcopy(optimizer.state_dict())
        for index in of_head:
            del state["state"][index]
        optimizer.load_state_dict(state)
    pair.train(3)
    assert pair.same()


def test_param_groups_that_are_added_later_are_refused() -> None:
    pair = Pair()
    pair.train()
    pair.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(UsageError, match=r"expected the 1 param groups .* found 2: call step.close\(\)"):
        pair.step(ids(), labels=ids(1))


def test_parameters_that_change_their_group_later_are_refused() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 0.0}])
    step = zerofx.compile(model, optimizer, loss_fn=torch.sum, backend="eager")
    step(torch.ones(2, 3))
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]
    before = step.full_state_dict()
    with pytest.raises(UsageError, match=r"expected the 2 param groups .* found other parameters in them"):
        step(torch.ones(2, 3))
    assert all(torch.equal(value, before[name]) for name, value in step.full_state_dict().items())
    first["params"], second["params"] = second["params"], first["params"]
    step(torch.ones(2, 3))


def test_stepping_the_optimizer_by_hand_is_refused() -> None:
    pair = Pair()
    pair.train()
    with pytest.raises(UsageError, match=r"step\(batch\) has already updated the parameters"):
        pair.optimizers[0].step()
    with pytest.raises(RuntimeError, match="does not require grad"):
        pair.step(ids(), labels=ids(1)).backward()
    pair.optimizers[0].zero_grad()


def test_hooks_on_the_optimizers_step_are_refused() -> None:
    pair = Pair()
    register = (pair.optimizers[0].register_step_pre_hook, pair.optimizers[0].register_step_post_hook)
    for one in register:
        handle = one(lambda *_: None)
        with pytest.raises(zerofx.OptimizerError, match=r"without hooks on its step, found 1: step\(batch\) updates"):
            pair.train()
        handle.remove()
        pair.train()
    pair.step.close()
    register[1](lambda *_: None)
    with pytest.raises(zerofx.OptimizerError, match="without hooks on its step, found 1"):
        compile_eager(pair.model, pair.optimizers[0])


def test_who_works_on_the_states_that_a_step_has_is_told_where_they_are() -> None:
    pair = Pair()
    pair.train(2)
    optimizer, weight = pair.optimizers[0], pair.model.head.weight
    for work in (
        lambda: optimizer.state[weight]["exp_avg"],
        lambda: optimizer.state.__setitem__(weight, {}),
        optimizer.state.clear,
    ):
        with pytest.raises(UsageError, match=r"a step has the states in slices, found .*: read them by optimizer\.sta"):
            work()
    assert not optimizer.state and copy.deepcopy(optimizer).state[weight] == {}
    pair.train()
    for each in pair.optimizers:
        each.state = defaultdict(dict)
    pair.train(2)
    pair.step.close()
    assert torch.equal(optimizer.state[weight]["exp_avg"], pair.optimizers[1].state[pair.plain.head.weight]["exp_avg"])


class _Wrapper(torch.optim.Optimizer):
    """As libraries have them, without torch's own ``__init__``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.state, self.param_groups = inner, inner.state, inner.param_groups


def test_an_optimizer_that_torch_has_not_set_up_is_refused() -> None:
    model = tiny()
    with pytest.raises(
        zerofx.OptimizerError, match=r"found _Wrapper, whose own does not call it: give zerofx.compile the"
    ):
        compile_eager(model, _Wrapper(adamw(model)))


def test_a_step_made_anew_computes_what_the_first_did_where_the_model_has_no_values() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(2), nn.Linear(64, 8), nn.Linear(8, 1)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's overloads lack it
    step = zerofx.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), precision="bf16", backend="eager",
        loss_fn=lambda outputs, x: outputs.square().mean(),
    )  # fmt: skip
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)

    def computed() -> list[str]:
        step(x)
        return [
            line for line in step.source.splitlines() if re.search(r"aten\.(addmm|mm|convolution|as_strided)", line)
        ]

    first, second = computed(), computed()
    assert any("addmm" in line for line in first)
    with pytest.raises(zerofx.ShardedParametersError, match="isfinite"):
        model[0].weight.isfinite()
    assert second == first
