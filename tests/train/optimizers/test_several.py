"""Several optimizers of one model stay the user's, each by itself; lists that cannot be trained with are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.train.optimizers.test_followed import Counting, batch, loss_of, model
from zerofx.errors import CheckpointError, OptimizerError, UsageError


def several(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *others = model.parameters()
    return [Counting([{"params": [first]}], "list"), Counting(others[:1], "attribute"), torch.optim.Adam(others[1:])]


def states(optimizers: list[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]


def same_states(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [each["param_groups"] for each in found] == [each["param_groups"] for each in expected]
    torch.testing.assert_close([each["state"] for each in found], [each["state"] for each in expected], rtol=0, atol=0)


def train_eagerly(trained: nn.Module, optimizers: list[torch.optim.Optimizer], numbers: range) -> None:
    for number in numbers:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(trained(batch(number)), batch(number)).backward()
        for optimizer in optimizers:
            optimizer.step()


class Pair:
    """A model that is trained by zerofx, and one without it, each by several optimizers."""

    def __init__(self, **options: Any) -> None:
        self.model, self.plain = model(), model()
        self.optimizers, self.others = several(self.model), several(self.plain)
        self.step = zerofx.compile(self.model, self.optimizers, loss_fn=loss_of, backend="eager", **options)

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            self.step(batch(number))
        train_eagerly(self.plain, self.others, range(first, last))

    def check(self) -> None:
        whole = self.step.full_state_dict() if not self.step.is_closed else self.model.state_dict()
        torch.testing.assert_close(whole, dict(self.plain.state_dict()), rtol=0, atol=0)
        same_states(states(self.optimizers), states(self.others))


def test_counters_in_groups_and_attributes_of_each_are_followed() -> None:
    pair = Pair()
    pair.train(0, 8)
    pair.check()
    for found, expected in zip(pair.optimizers[:2], pair.others[:2], strict=True):
        assert isinstance(found, Counting) and isinstance(expected, Counting)
        assert (found.count, found.history) == (expected.count, expected.history) and found.count == 8


def test_each_has_its_own_state_dict_and_options() -> None:
    pair = Pair()
    pair.train(0, 2)
    first, second = states(pair.optimizers), states(pair.others)
    pair.train(2, 4)
    for optimizers, saved in ((pair.optimizers, first), (pair.others, second)):
        optimizers[2].load_state_dict(saved[2])  # the others go on
        optimizers[1].param_groups[0]["lr"] = 0.02
    pair.check()
    pair.train(4, 6)
    pair.check()


def test_what_is_closed_goes_on_without_and_with_zerofx() -> None:
    pair = Pair()
    pair.train(0, 3)
    for optimizer in pair.optimizers:
        with pytest.raises(UsageError, match=r"no call of optimizer\.step\(\)"):
            optimizer.step()
        assert not optimizer.state
    pair.step.close()
    pair.check()
    for trained, optimizers in ((pair.model, pair.optimizers), (pair.plain, pair.others)):
        train_eagerly(trained, optimizers, range(3, 5))
    pair.check()
    pair.step = zerofx.compile(pair.model, tuple(pair.optimizers), 1, loss_fn=loss_of, backend="eager")
    pair.train(5, 7)
    pair.check()


def test_frozen_parameters_keep_the_states_that_their_optimizers_have() -> None:
    """They could be in one bucket, were they of one optimizer."""
    trained = model()
    parameters = list(trained.parameters())
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(parameters[at::2]) for at in (0, 1)]
    train_eagerly(trained, optimizers, range(2))
    expected = states(optimizers)
    for parameter in parameters[:2]:
        parameter.requires_grad_(False)
    step = zerofx.compile(trained, optimizers, loss_fn=loss_of, backend="eager")
    step(batch(2))
    found = states(optimizers)
    for mine, before in zip(found, expected, strict=True):
        torch.testing.assert_close(mine["state"][0], before["state"][0], rtol=0, atol=0)
        assert float(mine["state"][1]["step"]) == float(before["state"][1]["step"]) + 1
    optimizers[0].load_state_dict(expected[0])
    same_states(states(optimizers), [expected[0], found[1]])
    step.close()
    same_states(states(optimizers), [expected[0], found[1]])


def test_reports_and_plans_name_all_of_them() -> None:
    pair = Pair()
    text = "Sequential with Counting + Counting + Adam"
    assert str(pair.step).startswith(text)
    pair.train(0, 1)
    assert str(pair.step).startswith(text) and pair.step.optimizers == tuple(pair.optimizers)
    with pytest.raises(UsageError, match=r"found Counting \+ Counting \+ Adam: read step\.optimizers"):
        _ = pair.step.optimizer
    other = model()
    planned = zerofx.plan(other, several(other), (batch(0),), loss_fn=loss_of, machine="cpu", backend="eager")
    assert planned.plan.buckets == pair.step.plan.buckets


@pytest.mark.days(3)
def test_tuning_trains_copies_of_all() -> None:
    trained = model()
    optimizers = several(trained)
    result = zerofx.tune(
        trained, optimizers, (batch(0),), loss_fn=loss_of, backend="eager", num_steps=2, num_candidates=1
    )
    assert result.best.measured is not None and not any(optimizer.state for optimizer in optimizers)


def test_checkpoints_and_state_dictionaries_have_the_states_of_all(tmp_path: Path) -> None:
    pair = Pair()
    pair.train(0, 3)
    pair.step.save_checkpoint(tmp_path)
    saved = copy.deepcopy(states(pair.optimizers))
    whole = pair.step.full_state_dict()

    later = Pair()
    later.step.load_checkpoint(tmp_path)
    for optimizer in later.optimizers:
        with pytest.raises(UsageError, match=r"call step\.prepare\(batch\) first"):
            optimizer.state_dict()
    later.step.prepare(batch(3))
    same_states(states(later.optimizers), saved)

    trained = model()
    swapped = several(trained)[::-1]
    step = zerofx.compile(trained, swapped, loss_fn=loss_of, backend="eager")
    with pytest.raises(
        CheckpointError, match=r"torch\.optim\.adam\.Adam \+ .*Counting \+ .*Counting with 3 param groups"
    ):
        step.load_checkpoint(tmp_path)

    names = [name for name, _ in pair.model.named_parameters()]
    merged = {
        "state": dict(zip(names, [entry for each in saved for entry in each["state"].values()], strict=True)),
        "param_groups": [
            {**group, "params": [names[number + offset] for number in group["params"]]}
            for each, offset in zip(saved, (0, 1, 2), strict=True)
            for group in each["param_groups"]
        ],
    }
    other = Pair()
    other.step.prepare(batch(0))
    other.step.load_state_dict({"model": whole, "optimizer": merged})
    same_states(states(other.optimizers), saved)


def test_kept_steps_are_of_these_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    kept: list[set[Path]] = []
    for _ in range(2):
        pair = Pair()
        pair.train(0, 3)
        pair.check()
        kept.append({path for path in tmp_path.rglob("*") if path.is_file()})
    assert kept[0] and kept[0] == kept[1]
    other = model()
    optimizers = several(other)
    optimizers[1:] = [torch.optim.Adam(list(other.parameters())[1:], lr=0.3)]
    step, plain = zerofx.compile(other, optimizers, loss_fn=loss_of, backend="eager"), model()
    others = [*several(plain)[:1], torch.optim.Adam(list(plain.parameters())[1:], lr=0.3)]
    step(batch(0))
    train_eagerly(plain, others, range(1))
    torch.testing.assert_close(step.full_state_dict(), dict(plain.state_dict()), rtol=0, atol=0)


# ------------------------------------------------------------------------------------ refused


def overlapping(parameters: list[nn.Parameter]) -> list[Any]:
    return [torch.optim.SGD(parameters[:3], lr=0.1), torch.optim.Adam(parameters[2:])]


def twice(parameters: list[nn.Parameter]) -> list[Any]:
    return [torch.optim.Adam(parameters)] * 2


def incomplete(parameters: list[nn.Parameter]) -> list[Any]:
    return [torch.optim.SGD(parameters[:1], lr=0.1), torch.optim.Adam(parameters[2:])]


def hooked(parameters: list[nn.Parameter]) -> list[Any]:
    last = torch.optim.Adam(parameters[1:])
    last.register_step_pre_hook(lambda *_: None)
    return [torch.optim.SGD(parameters[:1], lr=0.1), last]


def sharing(parameters: list[nn.Parameter]) -> list[Any]:
    first, last = Counting(parameters[:1], "list"), Counting(parameters[1:], "list")
    last.history = first.history
    return [first, last]


REFUSED: list[tuple[Callable[[list[nn.Parameter]], Any], str]] = [
    (lambda _: [], "found an empty list"),
    (twice, "each optimizer once in a list of them, found one twice: Adam, Adam"),
    (overlapping, r"found 2\.weight in both SGD \(number 0\) and Adam \(number 1\)"),
    (incomplete, r"every trainable parameter in the optimizer, found 1 that are not: 0\.bias"),
    (lambda parameters: [torch.optim.Adam(parameters), "sgd"], r"expected a torch\.optim\.Optimizer .*, found str"),
    (lambda parameters: [torch.optim.SGD(parameters[:1], lr=0.1), torch.optim.LBFGS(parameters[1:])], "LBFGS"),
    (hooked, "without hooks on its step, found 1"),
    (sharing, "step of Counting changes its 'history', the same object as one of Counting's"),
]


@pytest.mark.parametrize(("make", "match"), REFUSED, ids=[match[:30] for _, match in REFUSED])
def test_lists_that_cannot_be_trained_with_are_refused(make: Callable[..., Any], match: str) -> None:
    trained = model()
    before = copy.deepcopy(trained.state_dict())
    optimizers = make(list(trained.parameters()))
    with pytest.raises(OptimizerError, match=match):
        zerofx.compile(trained, optimizers, loss_fn=loss_of, example_batch=(batch(0),), backend="eager")
    torch.testing.assert_close(trained.state_dict(), before, rtol=0, atol=0)


def test_groups_that_move_between_optimizers_are_refused() -> None:
    pair = Pair()
    pair.train(0, 1)
    first, second = pair.optimizers[:2]
    second.param_groups.insert(0, first.param_groups.pop())
    with pytest.raises(UsageError, match=r"expected the 3 param groups that there were at compile, found other"):
        pair.step(batch(1))
