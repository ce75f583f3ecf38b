"""A compiled step and its model over a life: training, evaluating, changing options, failing, closing."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.users import TOKENS, Tiny, adamw, eager_step, ids, same_parameters, tiny
from zerofx import CompilerError, PlanError, ShardedParametersError, Step, UsageError, ZeroFXWarning, compiler

OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


def compile_eager(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Step:
    return zerofx.compile(model, optimizer, backend="eager", **options)


def momentum(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The source of every step that is built."""
    seen: list[str] = []
    build = compiler.build

    def counted(lowered: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(lowered.emitted.source)
        return build(lowered, *args, **kwargs)

    monkeypatch.setattr("zerofx.building.build", counted)
    return seen


class Pair:
    """The same training twice: by zerofx, and in eager mode."""

    def __init__(self, optimizer: OptimizerOf = adamw, **options: Any) -> None:
        self.model, self.plain = tiny(), tiny()
        self.optimizers = [optimizer(self.model), optimizer(self.plain)]
        self.step = compile_eager(self.model, self.optimizers[0], **options)
        self.count = 0

    def train(self, steps: int = 1, rows: int = 2) -> None:
        """Steps whose losses are equal bit for bit."""
        for _ in range(steps):
            self.count += 1
            x, y = ids(self.count, rows), ids(-self.count, rows)
            loss = self.step(x, labels=y)
            assert torch.equal(loss, eager_step(self.plain, self.optimizers[1], x, labels=y))
            assert not loss.requires_grad

    def set(self, **options: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0].update(options)

    def same(self) -> bool:
        with self.step.full_parameters():
            return same_parameters(self.model, self.plain)


# ------------------------------------------------------------------------------------------------ close


@pytest.mark.parametrize("optimizer", [adamw, momentum])
def test_a_closed_step_leaves_a_model_that_trains_on_in_eager_mode(optimizer: OptimizerOf) -> None:
    pair = Pair(optimizer)
    pair.train(3)
    pair.step.close()
    pair.step.close()
    assert not [k for m in pair.model.modules() for k, v in vars(m).items() if k.endswith("hooks") and v]
    assert not [k for k in vars(pair.model) if "zerofx" in k]
    for seed in range(3):
        mine, theirs = (
            eager_step(model, optimizer, ids(seed), labels=ids(9))
            for model, optimizer in zip((pair.model, pair.plain), pair.optimizers, strict=True)
        )
        assert torch.equal(mine, theirs)
    assert same_parameters(pair.model, pair.plain)
    states = [o.state_dict()["state"] for o in pair.optimizers]
    assert str(states[0]) == str(states[1])
    with pytest.raises(UsageError, match=r"call step\(batch\) before close\(\)"):
        pair.step(ids(), labels=ids(1))
    with pytest.raises(UsageError, match="prepare a step before close"):
        pair.step.prepare(ids(), labels=ids(1))
    with pair.step.full_parameters() as model:
        assert model is pair.model
    pair.step = compile_eager(pair.model, pair.optimizers[0])
    pair.train(2)
    assert pair.same()


def test_a_step_that_never_ran_closes() -> None:
    model = tiny()
    compile_eager(model, adamw(model)).close()
    assert not [name for name in vars(model) if "zerofx" in name]
    assert same_parameters(model, tiny())


def test_a_step_is_not_closed_while_its_parameters_are_shown() -> None:
    pair = Pair()
    pair.train()
    with pair.step.full_parameters(), pytest.raises(UsageError, match=r"close\(\) outside full_parameters"):
        pair.step.close()
    pair.train()


# ------------------------------------------------------------------------------------------------ the model


def test_a_resident_model_is_used_as_it_is() -> None:
    pair = Pair()
    pair.train(2)
    assert torch.equal(pair.model(ids()), pair.plain(ids()))
    assert same_parameters(pair.model, pair.plain)
    full = pair.step.full_state_dict()
    assert all(torch.equal(full[name], tensor) for name, tensor in pair.plain.state_dict().items())
    pair.model.load_state_dict(tiny().state_dict())
    pair.plain.load_state_dict(tiny().state_dict())
    pair.train()
    other = copy.deepcopy(pair.model)
    compile_eager(other, adamw(other))
    assert pickle.loads(pickle.dumps(pair.model)).head.weight.equal(pair.plain.head.weight)


def test_full_parameters_are_those_of_plain_training_and_can_be_written_back() -> None:
    pair = Pair()
    with pair.step.full_parameters() as model:
        assert model is pair.model
    pair.train(2)
    with pair.step.full_parameters(write_back=True), torch.no_grad():
        assert pair.same()
        pair.model.head.bias.zero_()
        with pytest.raises(UsageError, match="found it inside another"), pair.step.full_parameters(write_back=True):
            pass
    with torch.no_grad():
        pair.plain.head.bias.zero_()
    pair.train(2)
    assert pair.same()


def test_a_step_inside_full_parameters_is_refused() -> None:
    pair = Pair()
    pair.train()
    with pair.step.full_parameters(), pytest.raises(UsageError, match=r"step\(batch\) outside full_parameters"):
        pair.step(ids(), labels=ids(1))
    pair.train()


def test_masters_guard_the_model_until_they_are_shown() -> None:
    model = tiny()
    step = compile_eager(model, adamw(model), precision="bf16")
    first = step(ids(), labels=ids(1))
    whole = r"with step.full_parameters\(\)"
    with pytest.raises(ShardedParametersError, match=f"expected Tiny to be called .*{whole}"):
        model(ids())
    with pytest.raises(ShardedParametersError, match="expected Linear to be called"):
        model.head(torch.zeros(1, 4))
    for part in (model, model.head):
        with pytest.raises(ShardedParametersError, match=r"step.full_state_dict\(\)"):
            part.state_dict()
    with pytest.raises(ShardedParametersError, match=r"full_parameters\(write_back=True\)"):
        model.load_state_dict(tiny().state_dict())
    with pytest.raises(ShardedParametersError, match="expected a copy of the model"):
        copy.deepcopy(model)
    with pytest.raises(ShardedParametersError, match="expected the model to be pickled"):
        pickle.dumps(model)
    with step.full_parameters():
        assert model(ids()).isfinite().all()
        other = copy.deepcopy(model)
        read = pickle.loads(pickle.dumps(model))
        assert model.head.weight.dtype == torch.float32
    assert torch.equal(other(ids()), read(ids()))
    assert step.full_state_dict()["head.weight"].equal(other.head.weight)
    with step.full_parameters(write_back=True):
        model.load_state_dict(tiny().state_dict())
    assert torch.equal(step(ids(), labels=ids(1)), first)
    with pytest.raises(RuntimeError, match="size of tensor"), step.full_parameters(write_back=True), torch.no_grad():
        model.head.bias.fill_(1e9).add_(torch.zeros(2, 2))
    assert step.full_state_dict()["head.bias"].abs().max() < 10


class Noisy(Tiny):
    """Tiny with dropout in one layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = self.layers[1]
        assert isinstance(layer, nn.Sequential)
        layer.append(nn.Dropout(0.5))


def test_another_mode_is_another_step() -> None:
    model = Noisy()
    step = compile_eager(model, adamw(model))
    step(ids(), labels=ids(1))
    model.eval()
    with pytest.warns(ZeroFXWarning, match=r"mode: eval \(was train\)"):
        step(ids(), labels=ids(1))
    assert "bernoulli" not in step.source
    model.train()
    step(ids(), labels=ids(1))
    assert "bernoulli" in step.source
    model.layers[1].eval()
    with pytest.warns(ZeroFXWarning, match="mode: train, but eval in layers.1, layers.1.0"):
        step(ids(), labels=ids(1))
    assert "bernoulli" not in step.source


def test_a_parameter_that_is_frozen_or_replaced_is_named() -> None:
    pair = Pair()
    pair.train()
    pair.model.head.bias.requires_grad_(False)
    with pytest.raises(UsageError, match=r"head.bias was trained and is frozen: call step.close\(\)"):
        pair.step(ids(), labels=ids(1))
    pair.model.head.bias.requires_grad_(True)
    pair.train()
    bias = pair.model.head.bias
    pair.model.head.bias = nn.Parameter(torch.zeros(TOKENS))
    with pytest.raises(UsageError, match=r"head\.bias was replaced or moved"):
        pair.step(ids(), labels=ids(1))
    pair.model.head.bias = bias
    pair.train()
    pair.model.double()
    with pytest.raises(UsageError, match=r"embed.weight was replaced or moved since \(by model.to\(\)"):
        pair.step(ids(), labels=ids(1))


# ------------------------------------------------------------------------------------------------ the optimizer


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
    other = tiny()
    optimizer = adamw(other)
    eager_step(other, optimizer, ids(), labels=ids(1))
    optimizer.state[other.head.bias]["step"] += 1
    before = str(optimizer.state)
    step = compile_eager(other, optimizer)
    with pytest.raises(zerofx.OptimizerError, match="expected one value of 'step'"):
        step(ids(), labels=ids(1))
    assert str(optimizer.state) == before
    step.close()
    eager_step(other, optimizer, ids(), labels=ids(1))


def test_param_groups_that_are_added_later_are_refused() -> None:
    pair = Pair()
    pair.train()
    pair.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(UsageError, match=r"expected the 1 param groups .* found 2: call step.close\(\)"):
        pair.step(ids(), labels=ids(1))


def test_stepping_the_optimizer_by_hand_is_refused() -> None:
    pair = Pair()
    pair.train()
    with pytest.raises(UsageError, match=r"step\(batch\) has already updated the parameters"):
        pair.optimizers[0].step()
    with pytest.raises(RuntimeError, match="does not require grad"):
        pair.step(ids(), labels=ids(1)).backward()
    pair.optimizers[0].zero_grad()


# ------------------------------------------------------------------------------------------------ failing steps


@pytest.mark.parametrize("optimizer", [adamw, momentum])
def test_a_step_that_fails_has_not_happened(optimizer: OptimizerOf) -> None:
    pair = Pair(optimizer)
    pair.train(2)
    bad = torch.full((2, 3), TOKENS + 1)
    with pytest.raises(IndexError) as caught:
        pair.step(bad, labels=ids())
    files = [Path(entry.path) for entry in caught.traceback]
    assert pair.step.source_path in files
    line = next(str(entry.statement) for entry in caught.traceback if Path(entry.path) == pair.step.source_path)
    assert "embed_forward" in line
    assert "zerofx: when step 3 failed, nothing had been updated yet" in caught.value.__notes__
    pair.train(2)
    assert pair.same()
    assert pair.step.num_steps == 4


def test_a_step_that_fails_halfway_says_what_was_updated(tmp_path: Path) -> None:
    pair = Pair()
    pair.train()
    lines = pair.step.source.splitlines()
    lines.insert(len(lines) - 1, "    raise KeyboardInterrupt")
    (tmp_path / "step.py").write_text("\n".join(lines))
    pair.step.load(tmp_path / "step.py")
    with pytest.raises(KeyboardInterrupt) as caught:
        pair.step(ids(), labels=ids(1))
    assert "buckets had been updated already (" in caught.value.__notes__[0]
    state = pair.optimizers[0].state_dict()["state"]
    assert {float(entry["step"]) for entry in state.values()} == {2.0}


# ------------------------------------------------------------------------------------------------ edited steps


class Summed(nn.Module):
    """One layer, whose outputs' sum is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.linear(x).sum()
        return loss


def edited(step: Step, path: Path, change: Callable[[str], str]) -> Path:
    path.write_text(change(step.source))
    return path


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_edited_step_runs_in_the_place_of_the_generated(
    backend: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Summed()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.0), backend=backend)
    with pytest.raises(UsageError, match="expected a captured step"):
        step.load(tmp_path / "none.py")
    x = torch.ones(2, 3)
    loss = step(x)
    assert step.source_path.read_text() == step.source
    assert step.stages[0].name == "capture"

    def scale(source: str) -> str:
        head, _, tail = source.rpartition("    return ")
        body = head.replace("aten.sum.default(", "3 * aten.sum.default(", 1)
        assert body != head
        return f"{body}    print('edited')\n    return {tail}"

    path = edited(step, tmp_path / "edited.py", scale)
    step.load(path)
    torch.testing.assert_close(step(x), 3 * loss)
    assert capsys.readouterr().out == "edited\n"
    assert step.source_path == path
    assert "print('edited')" in step.source

    for name, change, match in (
        ("missing.py", None, "found none"),
        ("broken.py", lambda s: s + "\n)(", "that Python can load"),
        ("raises.py", lambda s: "1 / 0\n" + s, "ZeroDivisionError"),
        ("empty.py", lambda s: "", "function step"),
        ("renamed.py", lambda s: re.sub(r"def \w+\(inputs\)", "def other(inputs)", s), "regions in .*found no"),
    ):
        if change is not None:
            edited(step, tmp_path / name, change)
        with pytest.raises(PlanError, match=match):
            step.load(tmp_path / name)
    if backend == "inductor":
        path = edited(step, tmp_path / "bad.py", lambda s: s.replace("3 * aten.sum.default(", "3 * aten.summ(", 1))
        with pytest.raises(CompilerError, match="summ"):
            step.load(path)
    torch.testing.assert_close(step(x), 3 * loss)
    with pytest.warns(ZeroFXWarning) as seen:
        torch.testing.assert_close(step(torch.ones(1, 3)), loss / 2)
    assert any("the edited step" in str(w.message) for w in seen)
    torch.testing.assert_close(step(x), 3 * loss)
