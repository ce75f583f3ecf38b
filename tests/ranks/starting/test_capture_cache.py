"""A captured graph that was kept is the graph that would be captured, and is not used for any other model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.version
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

from gpt import GPT
from tests.lib.models import CASES, DIM, ROWS, Layer, Regression
from zerofx import CaptureError, ZeroFXWarning
from zerofx.capture import cache as capture_cache
from zerofx.capture.by_layer.by_layer import capture_by_layer
from zerofx.capture.by_layer.forward_record import record_forward
from zerofx.capture.trace import capture
from zerofx.capture.traceable import Forward
from zerofx.disk.cache import DiskCache
from zerofx.ir.batch import Batch
from zerofx.ir.graph import StepGraph
from zerofx.ir.serialise import same_graph
from zerofx.torch_private import capture as torch_capture

pytestmark = pytest.mark.captures

FEATURES = (torch.zeros(ROWS, DIM), torch.zeros(ROWS, DIM))
HIT = "captured by an earlier run, whose forward was the same"


class Fallible(Regression):
    """Two layers, and what a test makes of their result."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())
        self.change = change

    def predict(self, x: Tensor) -> Tensor:
        return self.change(self.layers(x))


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each joint graph that is traced."""
    found: list[Any] = []
    trace = aot_export_joint_with_descriptors

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(args)
        return trace(*args, **kwargs)

    monkeypatch.setattr(torch_capture, "aot_export_joint_with_descriptors", counted)
    return found


def captured(
    folder: Path, model: nn.Module, batch: tuple[Tensor, ...] = FEATURES, *, check: bool = False, **options: Any
) -> tuple[StepGraph, bool]:
    """The graph, and whether it was kept by an earlier call."""
    said: list[str] = []
    forward = Forward(model, Batch.from_call(batch, {}), **options)
    found = capture_by_layer(forward, check=check, say=said.append, cache=DiskCache(folder))
    return found, HIT in said


@pytest.mark.days(3)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", ["tied", "batchnorm", "dropout", "frozen", "arguments"])
def test_models_of_all_kinds(tmp_path: Path, case: str) -> None:
    args, kwargs = CASES[case].batch(torch.Generator().manual_seed(0))
    model, batch = CASES[case].model(), Batch.from_call(args, kwargs)
    found = [capture_by_layer(Forward(model, batch, CASES[case].loss_fn), cache=DiskCache(tmp_path)) for _ in range(2)]
    assert all(same_graph(one, capture(model, batch, loss_fn=CASES[case].loss_fn)) for one in found)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_kept_graph_is_not_captured_again(tmp_path: Path, captures: list[Any]) -> None:
    ids = (torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))
    first, hit = captured(tmp_path, GPT(11, 8, 5, 2, 4), ids)
    assert not hit and captures
    captures.clear()
    again, hit = captured(tmp_path, GPT(11, 8, 5, 2, 4), ids)
    assert hit and not captures
    assert same_graph(first, again) and (first.parameters, first.units) == (again.parameters, again.units)
    assert same_graph(first, capture(GPT(11, 8, 5, 2, 4), Batch.from_call(ids, {})))


def _frozen() -> nn.Module:
    model = Fallible()
    model.layers[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "batch", "options"),
    [
        (lambda: Fallible(torch.relu), FEATURES, {}),
        (lambda: Fallible(lambda x: x * 1.5), FEATURES, {}),
        (lambda: Fallible(lambda x: x.detach() + x), FEATURES, {}),
        (_frozen, FEATURES, {}),
        (Fallible, (torch.zeros(2, DIM), torch.zeros(2, DIM)), {}),
        (Fallible, FEATURES, {"compute_dtype": torch.bfloat16}),
        (Fallible, FEATURES, {"num_micro_batches": 2}),
        (Fallible, FEATURES, {"loss_fn": lambda loss, x, y: loss + 1}),
    ],
)
def test_what_differs_is_captured(
    tmp_path: Path, model: Callable[[], nn.Module], batch: tuple[Tensor, ...], options: dict[str, Any]
) -> None:
    captured(tmp_path, Fallible())
    found, hit = captured(tmp_path, model(), batch, **options)
    assert not hit
    assert same_graph(found, capture(model(), Batch.from_call(batch, {}), **options))
    assert captured(tmp_path, model(), batch, **options)[1]


def test_calls_that_are_composed_of_the_same_operators_are_told_apart(tmp_path: Path) -> None:
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda x: x + F.linear(x, x).sum(),
        lambda x: x + torch.mm(x, x.t()).sum(),
    ]
    batch = Batch.from_call(FEATURES, {})
    records = [record_forward(Forward(Fallible(change), batch)) for change in changes]
    assert records[0].canonical() == records[1].canonical()
    captured(tmp_path, Fallible(changes[0]))
    assert not captured(tmp_path, Fallible(changes[1]))[1]


def test_constants_are_kept_by_value(tmp_path: Path) -> None:
    def scaled(factor: float) -> nn.Module:
        return Fallible(lambda x: x * torch.tensor([factor, 0.1, 1e-30, float("inf")])[:1] + torch.tensor(factor))

    first, _ = captured(tmp_path, scaled(0.3))
    again, hit = captured(tmp_path, scaled(0.3))
    assert hit and first.constants and same_graph(first, again)
    assert same_graph(again, capture(scaled(0.3), Batch.from_call(FEATURES, {})))
    assert not captured(tmp_path, scaled(0.4))[1]


def test_tensors_that_the_model_holds_are_never_kept(tmp_path: Path) -> None:
    held = torch.tensor(0.3)
    for _ in range(2):
        assert not captured(tmp_path, Fallible(lambda x: x * held))[1]
    assert not list(tmp_path.iterdir())


def test_settings_of_torch_count(tmp_path: Path) -> None:
    captured(tmp_path, Fallible())
    torch.use_deterministic_algorithms(True)
    try:
        assert not captured(tmp_path, Fallible())[1]
    finally:
        torch.use_deterministic_algorithms(False)
    assert captured(tmp_path, Fallible())[1]


def test_a_damaged_entry_is_captured_and_written_anew(tmp_path: Path) -> None:
    first, _ = captured(tmp_path, Fallible())
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    again, hit = captured(tmp_path, Fallible())
    assert not hit and same_graph(first, again)
    assert captured(tmp_path, Fallible())[1]


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


@torch.library.custom_op("zerofx_test::triple", mutates_args=())
def _triple(x: Tensor) -> Tensor:
    return x * 3


@_triple.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _through_python(x: Tensor) -> Tensor:
    found = _Double.apply(x)  # type: ignore[no-untyped-call]  # torch's
    assert isinstance(found, Tensor)
    return found


def _through_a_library(x: Tensor) -> Tensor:
    found = _triple(x.detach())
    assert isinstance(found, Tensor)
    return x + found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_through_python, "it calls _DoubleBackward, which is not torch's own"),
        (_through_a_library, "it calls zerofx_test.triple.default, which is not torch's own"),
    ],
)
def test_what_is_not_torch_s_own_is_never_kept_and_says_why(
    tmp_path: Path, change: Callable[[Tensor], Tensor], reason: str
) -> None:
    for _ in range(2):
        said: list[str] = []
        found = capture_by_layer(
            Forward(Fallible(change), Batch.from_call(FEATURES, {})), say=said.append, cache=DiskCache(tmp_path)
        )
        assert [line for line in said if line.startswith("not kept for the next run") and reason in line]
        assert same_graph(found, capture(Fallible(change), Batch.from_call(FEATURES, {})))
    assert not list(tmp_path.iterdir())


def test_a_forward_that_does_something_else_each_time_is_never_kept_and_warns(tmp_path: Path) -> None:
    calls: list[int] = []

    def change(x: Tensor) -> Tensor:
        calls.append(1)
        return x * len(calls)

    for _ in range(2):
        with pytest.warns(ZeroFXWarning, match=r"found aten\.mul\.Tensor\(%\d+, \d+\) in one and aten\.mul"):
            assert not captured(tmp_path, Fallible(change))[1]
    assert not list(tmp_path.iterdir())


class Counting(Fallible):
    """Counts its calls in a number, and keeps what it predicted last."""

    count = 0

    def predict(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = super().predict(x)
        return self.last


def test_a_kept_graph_comes_with_the_warnings_of_its_capture(tmp_path: Path) -> None:
    for run in range(2):
        with pytest.warns(ZeroFXWarning) as seen:
            assert captured(tmp_path, Counting())[1] == (run == 1)
        assert sorted(str(w.message).partition(":")[0] for w in seen) == [
            "expected a forward that changes no Python values of its modules from call to call, found that it changes "
            "count",
            "expected a forward that leaves no tensors on its modules, found that it leaves last",
        ]


class Branching(Fallible):
    """Does something else from its second call on, if it is told to."""

    was_called = False

    def __init__(self, *, branches: bool) -> None:
        super().__init__()
        self.branches = branches

    def predict(self, x: Tensor) -> Tensor:
        x = super().predict(x)
        if self.was_called and self.branches:
            x = torch.relu(x)
        self.was_called = True
        return x


def test_a_kept_graph_of_a_first_call_is_refused_where_later_calls_are_others(tmp_path: Path) -> None:
    assert [captured(tmp_path, Branching(branches=False))[1] for _ in range(2)] == [False, True]
    with pytest.raises(CaptureError, match="found that later ones do something else, by was_called"):
        captured(tmp_path, Branching(branches=True))


def test_what_a_first_forward_remembers_does_not_keep_a_graph_from_being_kept(tmp_path: Path) -> None:
    def remembering() -> nn.Module:
        known: list[bool] = []

        def change(x: Tensor) -> Tensor:
            if not known:
                known.append(x.is_floating_point())
            return x * 2

        return Fallible(change)

    first, hit = captured(tmp_path, remembering())
    assert not hit
    again, hit = captured(tmp_path, remembering())
    assert hit and same_graph(first, again)


def test_a_kept_graph_is_checked_where_all_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured(tmp_path, Fallible())
    other = capture(Fallible(torch.relu), Batch.from_call(FEATURES, {}))
    monkeypatch.setattr(capture_cache, "from_json", lambda *_: other)
    with pytest.raises(AssertionError, match="kept"):
        captured(tmp_path, Fallible(), check=True)
