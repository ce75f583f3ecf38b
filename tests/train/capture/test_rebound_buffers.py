"""A forward may put other tensors in the places of its buffers, and leave tensors on its modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.lib.models import DIM, Case, Regression, batches, rows
from tests.lib.runs.training import differences, train_compiled, train_plain
from zerofx.capture.trace import capture
from zerofx.errors import CaptureError, ZeroFXWarning
from zerofx.ir.batch import Batch
from zerofx.ir.graph import StepGraph


def _capture(model: nn.Module) -> StepGraph:
    args, keywords = next(batches(Case(lambda: model, rows), 0, 1))
    return capture(model, Batch.from_call(args, keywords))


class _Rebinding(Regression):
    """Puts other tensors in the places of its buffers, one of which it has changed in place before."""

    count: Tensor
    a: Tensor
    b: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("a", torch.zeros(DIM))
        self.register_buffer("b", torch.ones(DIM))

    def predict(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.b + self.a * self.count
        self.count += 1
        self.count = self.count * 2
        self.a, self.b = self.b, self.a
        self.b = 0.9 * self.b + y.detach().mean(0)
        return y


class _Keeping(_Rebinding):
    """Makes tables in its first call, and keeps them for the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.grid: list[Tensor] | None = None
        self.by_length: dict[int, Tensor] = {}
        self.notes: list[str] = []

    def predict(self, x: Tensor) -> Tensor:
        if self.grid is None:
            self.grid = [torch.arange(DIM) / DIM]
        if len(x) not in self.by_length:
            self.by_length[len(x)] = torch.linspace(0, 1, len(x))[:, None]
        self.notes.append("ran")
        return super().predict(x + self.grid[0] + self.by_length[len(x)])


class _Leaving(_Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cached", None)
        self.last: Tensor | None = None
        self.ran = False

    def predict(self, x: Tensor) -> Tensor:
        y = super().predict(x)
        self.last, self.cached, self.ran = y, torch.zeros(3), True
        return y


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_buffer_that_gets_another_tensor_has_its_values_behind_the_step(num_micro_batches: int) -> None:
    case = Case(_Rebinding, rows)
    expected = train_plain(case, 4, num_micro_batches)
    assert differences(expected, train_compiled(case, 3, 4, accumulate=num_micro_batches)) == []


def test_tensors_that_a_forward_leaves_on_its_modules_go_with_the_capture_and_are_named() -> None:
    model = _Leaving()
    with pytest.warns(ZeroFXWarning, match=r"leaves grid, last, cached, by_length: .*register as a buffer what"):
        assert set(_capture(model).mutations) == {"count", "a", "b"}
    assert model.last is None and model.cached is None and model.grid is None and model.by_length == {}
    assert not model.ran and set(model.notes) == {"ran"}


@pytest.mark.filterwarnings("ignore:expected a forward that leaves no tensors on its modules")
def test_what_a_forward_makes_once_and_keeps_is_made_in_each_step() -> None:
    case = Case(_Keeping, rows)
    assert differences(train_plain(case, 3), train_compiled(case, 3, 3)) == []


class _Counted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x)


class _Noted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.num_rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_rows = x.shape[0]
        return super().forward(x)


class _With(Regression):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def predict(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def test_a_number_that_each_forward_changes_is_named() -> None:
    with pytest.warns(ZeroFXWarning, match=r"changes linear\.num_calls: .* register what is to change as a buffer"):
        _capture(_With(_Counted()))


def test_a_number_that_a_second_forward_leaves_as_it_is_is_none_to_warn_of_and_stays() -> None:
    linear = _Noted()
    _capture(_With(linear))
    assert linear.num_rows > 0


class _Once(Regression):
    """Does something in its first call alone, and notes how far it has come in a number or a flag."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("table", torch.zeros(16, DIM), persistent=False)
        self.num_rows, self.is_ready, self.num_hooks = 0, False, 0

    def predict(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.set_up(x)
            self.num_rows, self.is_ready = len(x), True
        y: Tensor = self.linear(x) + self.table[: self.num_rows]
        return y

    def set_up(self, x: Tensor) -> None:
        """Make a table, as rotary embeddings do, and have a hook."""
        self.table[: len(x)] = torch.linspace(0, 1, len(x))[:, None]
        self.linear.register_forward_hook(lambda _module, _args, result: 2 * result)


class _ByBatch(_Once):
    def set_up(self, x: Tensor) -> None:
        self.table[: len(x)] = x.detach()


class _FirstOther(_Once):
    def predict(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x if self.is_ready else 2 * x)
        self.is_ready = True
        return y


class _FirstScaled(_Once):
    scale = 2.0

    def predict(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scale
        self.scale = 1.0
        return y


def test_a_table_that_the_first_call_makes_is_made_in_each_step() -> None:
    case = Case(_Once, rows)
    expected, found = train_plain(case, 3), train_compiled(case, 3, 3)
    assert differences(expected, found) == []
    model = _Once()
    assert set(_capture(model).mutations) == {"table"}
    assert (model.num_rows, model.is_ready, len(model.linear._forward_hooks)) == (0, False, 0)


class _OnceOfTwo(_Once):
    """Its table is in a module of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = _Once()

    def predict(self, x: Tensor) -> Tensor:
        return self.first.predict(x) + self.second.predict(x)


def test_a_table_that_the_first_call_makes_in_a_shared_module_is_made_in_each_step() -> None:
    case = Case(_OnceOfTwo, rows)
    assert differences(train_plain(case, 3), train_compiled(case, 3, 3)) == []


@pytest.mark.parametrize("model", [_ByBatch, _FirstOther, _FirstScaled])
def test_a_first_call_that_no_other_is_like_is_refused_until_it_was_made(model: type[nn.Module]) -> None:
    def ready() -> nn.Module:
        made = model()
        args, keywords = next(batches(Case(model, rows), 1, 1))
        made(*args, **keywords)
        return made

    with pytest.raises(CaptureError, match=r"by (is_ready|num_rows, is_ready.*|scale): call the model once before"):
        _capture(model())
    case = Case(ready, rows)
    assert differences(train_plain(case, 3), train_compiled(case, 3, 3)) == []


class _Growing(_Rebinding):
    def predict(self, x: Tensor) -> Tensor:
        self.a = torch.cat([self.a, self.a])
        y: Tensor = self.linear(x)
        return y


class _Undetached(_Rebinding):
    def predict(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.a = self.a + y.mean(0)
        return y


@pytest.mark.parametrize(("kind", "found"), [(_Growing, r"shape \[16\]"), (_Undetached, "with a gradient")])
def test_a_buffer_that_gets_what_it_cannot_hold_is_refused(kind: type[_Rebinding], found: str) -> None:
    with pytest.raises(CaptureError, match=rf"{found}.* in the place of a, .*shape \[8\]"):
        _capture(kind())


class _Scaled(nn.Module):
    """Scales by a mean over all that it has seen, kept in a buffer that may be another module's too."""

    mean: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.add_(x.detach().mean(0))
        y: Tensor = self.linear(x) * self.mean.clone()
        return y


class _Sharing(Regression):
    """Modules that share a buffer, which each of them changes in place."""

    def __init__(self) -> None:
        super().__init__()
        mean = torch.ones(DIM)
        self.layers = nn.Sequential(*(_Scaled(mean) for _ in range(4)))

    def predict(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class _Reading(_Sharing):
    """Reads what modules share, and has a name of its own for it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", self.layers[0].get_buffer("mean"))

    def predict(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.get_submodule("linear")(x) * layer.get_buffer("mean")
        return x * self.get_buffer("scale")


class _Parting(_Sharing):
    """Puts another tensor in one of the places of a buffer that modules share."""

    def predict(self, x: Tensor) -> Tensor:
        last = self.layers[-1]
        assert isinstance(last, _Scaled)
        last.mean = last.mean * 2
        return super().predict(x)


@pytest.mark.parametrize("model", [_Sharing, _Reading])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_modules_may_share_a_buffer(model: type[nn.Module], num_micro_batches: int) -> None:
    case = Case(model, rows)
    found = train_compiled(case, 3, 3, accumulate=num_micro_batches)
    assert differences(train_plain(case, 3, num_micro_batches), found) == []


def test_a_buffer_that_modules_share_stays_one() -> None:
    with pytest.raises(CaptureError, match=r"layers.3.mean.*layers.0.mean, layers.1.mean, layers.2.mean"):
        _capture(_Parting())


class _Overlapping(_Rebinding):
    """Changes a buffer whose last row is the first of another."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.zeros(3, DIM)
        self.register_buffer("upper", rows[:2])
        self.register_buffer("lower", rows[2:] if self.apart else rows[1:])

    apart = False

    def predict(self, x: Tensor) -> Tensor:
        self.get_buffer("upper").add_(x.detach().mean(0))
        y: Tensor = self.linear(x) + self.get_buffer("lower").sum(0)
        return y


class _NextToEachOther(_Overlapping):
    apart = True


def test_a_buffer_that_changes_has_memory_of_its_own() -> None:
    assert set(_capture(_NextToEachOther()).mutations) == {"upper"}
    with pytest.raises(CaptureError, match="changes one of upper and lower, which share some"):
        _capture(_Overlapping())


@pytest.mark.parametrize("change", [Tensor.t_, lambda buffer: buffer.resize_(2), lambda buffer: buffer.unsqueeze_(0)])
def test_a_buffer_that_changes_its_layout_in_place_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    class Changing(_Rebinding):
        def predict(self, x: Tensor) -> Tensor:
            change(self.get_buffer("table"))
            y: Tensor = self.linear(x) + self.get_buffer("table").sum()
            return y

    model = Changing()
    model.register_buffer("table", torch.ones(DIM, DIM))
    with pytest.raises(CaptureError, match=r"leaves each buffer its shape and strides, found .* of table"):
        _capture(model)


def test_traced_parameters_are_parameters() -> None:
    class Asking(_Rebinding):
        def predict(self, x: Tensor) -> Tensor:
            weight = self.get_parameter("linear.weight")
            del self.linear.weight
            self.linear.weight = 2 * weight
            y: Tensor = self.linear(x)
            del self.linear.weight
            self.linear.weight = weight
            return y if isinstance(weight, nn.Parameter) else -y

    case = Case(Asking, rows)
    assert differences(train_plain(case, 3), train_compiled(case, 3, 3)) == []
