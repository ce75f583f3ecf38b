"""A compiled step and its model over a life: training, evaluating, failing, closing."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.runs.pairs import OptimizerOf, Pair, compile_eager, momentum
from tests.lib.users import TOKENS, Tiny, adamw, eager_step, ids, same_parameters, tiny
from zerofx import CompilerError, PlanError, ShardedParametersError, Step, UsageError, ZeroFXWarning

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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_parameters_of_whole_numbers_are_hidden_and_shown(dtype: torch.dtype) -> None:
    model, codes = tiny(), torch.arange(4).to(dtype)
    model.codes = nn.Parameter(codes.clone(), requires_grad=False)
    step = compile_eager(model, adamw(model), precision="bf16")
    step(ids(), labels=ids(1))
    with pytest.raises(ShardedParametersError, match=r"torch\.equal"):
        torch.equal(model.codes, codes)
    with step.full_parameters():
        assert torch.equal(model.codes, codes)


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


@pytest.mark.days(3)
def test_autocast_and_the_default_dtype_are_part_of_what_a_step_is_for() -> None:
    class Scaled(Tiny):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
            return self.outputs(ids).square().mean() * torch.full((), 1 / 3)

    model = Scaled()
    step = compile_eager(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def autocast() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = step(ids())
            return found

    def other_default() -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            found: torch.Tensor = step(ids())
            return found
        finally:
            torch.set_default_dtype(torch.float32)

    with torch.autocast("cpu", torch.bfloat16):
        expected = model(ids()).detach()
    assert torch.equal(autocast(), expected)
    with pytest.warns(ZeroFXWarning, match=r"autocast to: none \(was torch.bfloat16 on cpu\)"):
        assert torch.equal(step(ids()), model(ids()).detach())
    with pytest.warns(ZeroFXWarning, match=r"default dtype: torch.float64 \(was torch.float32\)"):
        other_default()
    assert torch.equal(autocast(), expected)


class Numbered(Tiny):
    """Reads a number of its own; counts its calls, and notes the length of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha: Any = 1.0
        self.length = 0

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        self.length = ids.shape[1]
        return super().forward(ids, labels) * self.alpha


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "ASGD"])
def test_a_default_device_is_for_what_the_model_makes_alone(name: str, tmp_path: Path) -> None:
    pair = Pair(lambda model: getattr(torch.optim, name)(model.parameters(), foreach=False))
    batches = [(ids(number), ids(-number)) for number in range(4)]
    expected = [eager_step(pair.plain, pair.optimizers[1], x, labels=y) for x, y in batches]
    with torch.device("meta"):
        losses = [pair.step(x, labels=y) for x, y in batches[:2]]
        pair.step.load_checkpoint(pair.step.save_checkpoint(tmp_path))
        pair.optimizers[0].load_state_dict(pair.optimizers[0].state_dict())
        losses += [pair.step(x, labels=y) for x, y in batches[2:]]
        assert pair.same()
        pair.step.evaluate(batches[0][0], labels=batches[0][1])
        pair.step.measure(batches[0][0], labels=batches[0][1])
    assert all(map(torch.equal, losses, expected))


def test_another_default_device_is_another_step() -> None:
    class Positioned(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) + torch.arange(3.0)).square().mean()

    model = Positioned(3, 3)
    step = compile_eager(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(torch.ones(2, 3))
    batch = torch.ones(2, 3)
    told = pytest.warns(ZeroFXWarning, match=r"default device: meta \(was cpu\)")
    with torch.device("meta"), told, pytest.raises(zerofx.CaptureError, match="meta"):
        step(batch)
    step(torch.ones(2, 3))


def test_a_number_that_is_changed_on_a_module_is_computed_with() -> None:
    model = Numbered()
    step = compile_eager(model, torch.optim.SGD(model.parameters(), lr=0.0))
    first = step(ids(), labels=ids(1))
    with pytest.warns(ZeroFXWarning, match="a batch of another shape"):
        step(ids(length=5), labels=ids(1, length=5))
    before = step.compiled
    step(ids(), labels=ids(1))  # forward's own note of the length is no change
    step(ids(length=5), labels=ids(1, length=5))
    assert step.compiled is before
    model.alpha = 2.0
    assert torch.equal(step(ids(), labels=ids(1)), 2 * first)
    captured = step.compiled
    model.alpha = 1.0
    assert torch.equal(step(ids(), labels=ids(1)), first)
    model.alpha = 2.0
    assert torch.equal(step(ids(), labels=ids(1)), 2 * first)
    assert step.compiled is captured


@pytest.mark.parametrize("value", [torch.ones(()), True, 3], ids=["tensor", "bool", "int"])
def test_whatever_takes_the_place_of_a_number_is_computed_with(value: Any) -> None:
    models = [Numbered() for _ in range(2)]
    for model in models:
        model.layers[1] = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
        model.alpha = 3.0
    models[1].load_state_dict(models[0].state_dict())
    step = compile_eager(models[0], torch.optim.SGD(models[0].parameters(), lr=0.0))
    step(ids(), labels=ids(1))
    for model in models:
        model.alpha = value
        model.layers[1][1].p = 1.0  # type: ignore[index]  # a Sequential
    losses = step(ids(), labels=ids(1)), models[1](ids(), labels=ids(1))
    assert torch.equal(losses[0], losses[1].detach())


def test_a_plain_tensor_is_read_as_it_is_and_where_another_is_in_its_place() -> None:
    model = Numbered()
    model.alpha = torch.ones(3)
    step = compile_eager(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn=lambda outputs, _: outputs.sum())
    first = step(ids(), labels=ids(1)).clone()
    model.alpha.fill_(2.0)
    assert torch.equal(step(ids(), labels=ids(1)), 2 * first)
    model.alpha = torch.full((3,), 4.0)
    assert torch.equal(step(ids(), labels=ids(1)), 4 * first)


def test_numbers_of_a_loss_function_that_is_a_module_are_watched() -> None:
    model, loss_fn = nn.Linear(3, 3), nn.CrossEntropyLoss()
    step = compile_eager(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn=loss_fn)
    batch = torch.arange(6.0).reshape(2, 3), torch.tensor([0, 2])
    step(*batch)
    expected = [loss_fn(model(batch[0]), batch[1]).item()]
    loss_fn.label_smoothing = 0.5
    expected.append(loss_fn(model(batch[0]), batch[1]).item())
    assert step(*batch).item() == expected[1] != expected[0]


def test_a_parameter_that_is_given_a_hook_is_named() -> None:
    pair = Pair()
    pair.train()
    handle = pair.model.head.bias.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(UsageError, match=r"without hooks of their own, found one on head\.bias"):
        pair.step(ids(), labels=ids(1))
    handle.remove()
    pair.train()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_steps_run_without_gradients_and_in_inference_mode(mode: Callable[[], AbstractContextManager[None]]) -> None:
    plain, model = tiny(), tiny()
    optimizer, own = adamw(plain), adamw(model)
    step = zerofx.compile(model, own, backend="eager")
    for inside in (True, True, False):
        with mode() if inside else nullcontext():
            loss = step(ids(), labels=ids(1))
        assert torch.equal(loss, eager_step(plain, optimizer, ids(), labels=ids(1)))
    step.close()
    assert torch.equal(*(eager_step(a, b, ids(), labels=ids(1)) for a, b in ((plain, optimizer), (model, own))))


def test_a_parameter_that_is_replaced_is_named() -> None:
    pair = Pair()
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


def test_a_parameter_where_there_was_none_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1))
    step = compile_eager(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=torch.mean)
    step(torch.ones(2, 3))
    model[0].bias = nn.Parameter(torch.ones(3))
    with pytest.raises(UsageError, match=r"found that 0\.bias was replaced"):
        step(torch.ones(2, 3))


def test_parameters_that_are_replaced_in_a_block_are_named() -> None:
    pair = Pair()
    pair.train()
    with pair.step.full_parameters(write_back=True):
        pair.model.load_state_dict(tiny().state_dict(), assign=True)
    with pytest.raises(UsageError, match=r"was replaced or moved since \(by .*load_state_dict\(assign=True\)\)"):
        pair.step(ids(), labels=ids(1))


def test_a_module_that_is_replaced_is_named() -> None:
    pair = Pair()
    pair.train()
    head = pair.model.head
    pair.model.head = nn.Linear(head.in_features, head.out_features)
    for use in (pair.step, pair.step.evaluate):
        with pytest.raises(UsageError, match=r"modules that the step was built with, found that head was replaced"):
            use(ids(), labels=ids(1))
    pair.model.head = head
    pair.train()


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
    pair.step.load_source(tmp_path / "step.py")
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
        step.load_source(tmp_path / "none.py")
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
    step.load_source(path)
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
            step.load_source(tmp_path / name)
    if backend == "inductor":
        path = edited(step, tmp_path / "bad.py", lambda s: s.replace("3 * aten.sum.default(", "3 * aten.summ(", 1))
        with pytest.raises(CompilerError, match="summ"):
            step.load_source(path)
    torch.testing.assert_close(step(x), 3 * loss)
    with pytest.warns(ZeroFXWarning) as seen:
        torch.testing.assert_close(step(torch.ones(1, 3)), loss / 2)
    assert any("the edited step" in str(w.message) for w in seen)
    torch.testing.assert_close(step(x), 3 * loss)
