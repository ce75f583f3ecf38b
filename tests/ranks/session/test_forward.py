"""``forward=``: what a training step may compute besides calling its model once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks

# Importing Inductor makes torch warn of what it deprecates itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*script_method:DeprecationWarning", "ignore:.*torch.jit:DeprecationWarning"
)

DIM, ROWS, CLASSES = 8, 4, 5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@dataclass
class Seen:
    """What a training loop logs."""

    logits: Tensor
    rest: dict[str, Any]


class Distilled:
    """A teacher that follows the model, noise, two calls of the model, and a temperature that can change."""

    def __init__(self, depth: int = 2) -> None:
        self.teacher = Net(depth)
        self.temperature = torch.tensor(2.0)

    def __call__(self, model: Net, x: Tensor, y: Tensor, *, weight: Tensor) -> tuple[Tensor, Seen]:
        logits, clean = model(x + 0.1 * torch.randn_like(x)), model(x)
        with torch.no_grad():
            wanted = (self.teacher(x) / self.temperature).softmax(-1)
        hard = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        soft = -((clean / self.temperature).log_softmax(-1) * wanted).sum(-1).mean()
        loss = hard + weight * soft
        return loss, Seen(logits, {"hard": hard, "x": x, "head": model.head.weight, "names": ("hard", 3)})

    def follow(self, model: nn.Module) -> None:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), model.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)


def _batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS, 3, DIM, generator=generator)
    return x, torch.randint(0, CLASSES, (ROWS, 3), generator=generator)


def _check(stage: int, accumulate: int, backend: Any = "eager", **options: Any) -> dict[str, int]:
    """Train with and without zerofx, the same on every rank, and compare all that is handed out."""
    torch.manual_seed(0)
    model, forward = Net(), Distilled()
    plain = copy.deepcopy(model)
    optimizer, other = (torch.optim.AdamW(m.parameters(), foreach=False) for m in (model, plain))
    step = zerofx.compile(model, optimizer, stage, forward=forward, backend=backend, accumulate=accumulate, **options)
    same = torch.equal if backend == "eager" else torch.allclose
    weight = torch.tensor(0.5)
    for number in range(4):
        x, y = _batch(number)
        torch.manual_seed(number)
        expected = []
        for one, target in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            loss, seen = forward(plain, one, target, weight=weight)
            (loss / accumulate).backward()
            seen.rest["head"] = plain.head.weight.detach().clone()
            expected.append((loss.detach() / accumulate, seen))
        other.step()
        other.zero_grad()
        torch.manual_seed(number)
        loss, extras = step(x, y, weight=weight)
        assert same(loss, functools.reduce(torch.add, [part for part, _ in expected]))
        for (_, wanted), found in zip(expected, [extras] if accumulate == 1 else extras, strict=True):
            assert isinstance(found, Seen) and same(found.logits, wanted.logits) and not found.logits.requires_grad
            assert found.rest["names"] == ("hard", 3)
            assert all(same(found.rest[name], wanted.rest[name]) for name in ("hard", "x", "head"))
        forward.follow(plain)
        if number == 1:
            forward.temperature = torch.tensor(3.0)
            forward.teacher = copy.deepcopy(forward.teacher)
        if number == 2:
            forward.teacher.head = nn.Linear(DIM, CLASSES)
    measured = step.measure(x, y, weight=weight)
    if backend == "eager":
        assert measured.peak_bytes == step.plan.peak_bytes
    found_bytes = dict(measured.peak_bytes)
    step.close()
    return found_bytes


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("stage", "accumulate"), [(0, 1), (3, 2), (2, 4)])
def test_a_step_may_do_anything_and_hand_out_what_it_likes(stage: int, accumulate: int) -> None:
    _check(stage, accumulate)


@pytest.mark.slow
def test_a_compiled_step_hands_out_the_same() -> None:
    _check(3, 1, "inductor")


@pytest.mark.sweep(1)
@pytest.mark.filterwarnings("ignore:all 2 ranks draw the same random numbers")  # which is compared with one process
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_hand_out_their_own(stage: int) -> None:
    run_ranks(_check, 2, stage, 2)


def test_extras_count_in_the_budget() -> None:
    model, forward = Net(), Distilled()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = {"x": torch.zeros(64, 3, DIM), "y": torch.zeros(64, 3, dtype=torch.long), "weight": torch.tensor(1.0)}

    def alone(model: Net, **batch: Any) -> Tensor:
        return forward(model, **batch)[0]

    def peak(given: Callable[..., Any]) -> int:
        planned = zerofx.plan(model, optimizer, batch, machine="cpu", forward=given, backend="eager")
        return planned.plan.peak_bytes["device"]

    assert peak(forward) > peak(alone)


def _sgd(model: nn.Module, forward: Callable[..., Any], **options: Any) -> zerofx.Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return zerofx.compile(model, optimizer, forward=forward, backend="eager", **options)


X = torch.ones(ROWS, DIM)


def test_what_is_not_of_the_model_is_not_trained() -> None:
    head = nn.Linear(CLASSES, 1)
    with pytest.raises(zerofx.CaptureError, match=r"found that it has one for head.weight, .*requires_grad_\(False\)"):
        _sgd(Net(), lambda model, x: head(model(x)).mean())(X)
    head.requires_grad_(False)
    _sgd(Net(), lambda model, x: head(model(x)).mean())(X)


def test_what_is_not_of_the_model_is_not_changed() -> None:
    norm = nn.BatchNorm1d(CLASSES, affine=False)
    with pytest.raises(
        zerofx.CaptureError, match=r"found that it changes norm.(running|num).* in place: call eval\(\)"
    ):
        _sgd(Net(), lambda model, x: norm(model(x)).square().mean())(X)
    bounded = nn.utils.parametrizations.spectral_norm(nn.Linear(CLASSES, 1)).requires_grad_(False)
    buffers = dict(bounded.named_buffers())
    with pytest.raises(zerofx.CaptureError, match=r"puts another tensor in the place of bounded.*\._u: call eval\(\)"):
        _sgd(Net(), lambda model, x: bounded(model(x)).mean())(X)
    assert all(buffer is buffers[name] for name, buffer in bounded.named_buffers())
    _sgd(Net(), lambda model, x: bounded.eval()(model(x)).mean())(X)


def test_another_kind_of_tensor_in_the_same_place_is_an_error() -> None:
    target = [torch.zeros(CLASSES)]
    step = _sgd(Net(), lambda model, x: (model(x) - target[0]).square().mean())
    before = step(X)
    target[0] = torch.ones(CLASSES)
    assert step(X) != before
    target[0] = torch.zeros(1, CLASSES)
    with pytest.raises(zerofx.UsageError, match=r"target\[0\].*float32\[5\].*\[1, 5\]"):
        step(X)
    target[0] = torch.zeros(CLASSES)
    step(X)


def test_parameters_that_are_reached_past_the_model_are_trained() -> None:
    model = Net()
    plain, weights = copy.deepcopy(model), [one for one in model.parameters() if one.dim() == 2]

    def penalised(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean() + sum(one.square().sum() for one in weights)  # type: ignore[no-any-return]

    step = _sgd(model, penalised)
    step(X)
    weights = [one for one in plain.parameters() if one.dim() == 2]
    penalised(plain, X).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    step.close()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_mode_of_a_module_that_is_used_is_seen() -> None:
    dropout = nn.Dropout(0.5)
    step = _sgd(Net(), lambda model, x: (model(x) * dropout(torch.ones(CLASSES))).square().mean())
    torch.manual_seed(0)
    noisy = [float(step(X)) for _ in range(3)]
    dropout.eval()
    with pytest.warns(zerofx.errors.ZeroFXWarning, match="training mode"):
        step(X)
    assert len(set(noisy)) == 3


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (lambda model, x: model(x), r"expected a scalar loss from forward, found a tensor of shape \[4, 5\]"),
        (lambda model, x: {"loss": model(x).mean()}, r"a pair \(loss, extras\), found a dict with keys \['loss'\]"),
        (lambda model, x: (model(x).mean(), {"model": model}), "after its loss, .*found a Net as extras"),
        (lambda x: x.mean(), r"called as forward\(model, Tensor\[4, 8\]\).*<lambda>\(x\): too many"),
    ],
)
def test_a_forward_that_gives_something_else_is_told_what_to_give(given: Callable[..., Any], what: str) -> None:
    with pytest.raises(zerofx.ZeroFXError, match=what):
        _sgd(Net(), given)(X)


def test_forward_is_a_function() -> None:
    model = Net()
    with pytest.raises(zerofx.UsageError, match=r"function forward\(model, \*batch\).*found a Net"):
        _sgd(model, Net())


def test_layers_are_stamped_out_and_steps_are_kept_with_a_teacher_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        step, (x, y) = _sgd(Net(depth=12), Distilled(depth=1)), _batch(0)
        loss, extras = step(x, y, weight=torch.tensor(1.0))
        losses.append(loss)
        assert extras.logits.shape == (ROWS, 3, CLASSES)
        step.close()
    assert torch.equal(*losses)
    monkeypatch.setenv("ZEROFX_DEBUG", "1")
    step = _sgd(Net(depth=12), Distilled(depth=1))
    step(x, y, weight=torch.tensor(1.0))
    assert "captured by an earlier run" in capsys.readouterr().err


class Returning(Net):
    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return {"loss": logits.mean(), "logits": logits}


def test_what_a_model_returns_besides_its_loss_is_listed() -> None:
    model = Returning()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters()), backend="eager")
    step(X)
    assert "not kept of what the model returns: ['logits'] float32[4, 5]" in str(step)
