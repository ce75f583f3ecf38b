"""What cannot be captured names its line, and says what to do."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.lib.models import CASES, DIM, ROWS, Layer, Regression, batches
from zerofx.capture.trace import capture
from zerofx.errors import CaptureError
from zerofx.ir.batch import Batch
from zerofx.ir.graph import StepGraph


def _capture(model: nn.Module) -> StepGraph:
    case = CASES["stack"]
    args, kwargs = next(batches(case, 0, 1))
    return capture(model, Batch.from_call(args, kwargs), loss_fn=case.loss_fn)


class _Item(Regression):
    def predict(self, x: Tensor) -> Tensor:
        return x * x.sum().item()  # the line to blame


class _Float(Regression):
    def predict(self, x: Tensor) -> Tensor:
        return x * float(x.mean())  # the line to blame


class _If(Regression):
    def predict(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line to blame
            return x
        return -x


class _NonZero(Regression):
    def predict(self, x: Tensor) -> Tensor:
        return x[x > 0].sum() + 0 * x  # the line to blame


class _InPlace(Regression):
    def predict(self, x: Tensor) -> Tensor:
        x.add_(1)  # the line to blame
        return x


class _Assigned(Regression):
    def predict(self, x: Tensor) -> Tensor:
        x[0] = 0.0  # the line to blame
        return x


class _InFunction(Regression):
    def predict(self, x: Tensor) -> Tensor:
        return torch.nn.functional.relu(x, inplace=True)  # the line to blame


class _Rescaled(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(DIM, DIM, max_norm=1.0)

    def predict(self, x: Tensor) -> Tensor:
        row: Tensor = self.table(torch.arange(DIM))[0]  # the line to blame
        return x + row


class _Cond(Regression):
    def predict(self, x: Tensor) -> Tensor:
        y: Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # the line to blame
        return y


class _Data(Regression):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def predict(self, x: Tensor) -> Tensor:
        self.mean.data = x.mean(0)  # the line to blame
        return x + self.mean


class _Wrong(Regression):
    def predict(self, x: Tensor) -> Tensor:
        return x @ x  # the line to blame


def _line_to_blame(cls: type[nn.Module]) -> int:
    lines, first = inspect.getsourcelines(cls)
    return next(first + i for i, line in enumerate(lines) if "the line to blame" in line)


def _with_layer(predict: Regression) -> Regression:
    """`predict` of what a layer makes of the features: there is something to train."""

    class Model(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.inner = predict
            self.layer = Layer()

        def predict(self, x: Tensor) -> Tensor:
            return self.layer(self.inner.predict(x))  # type: ignore[no-any-return]  # what calling a module gives is untyped

    return Model()


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (_Item, "reads a tensor's value"),
        (_Float, "reads a tensor's value"),
        (_If, "reads a tensor's value"),
        (_NonZero, "shapes do not depend on values, found aten.nonzero"),
        (_InPlace, "in-place change"),
        (_Assigned, "in-place change"),
        (_InFunction, "in-place change"),
        (_Rescaled, r"in-place change of parameter [\s\S]*without max_norm"),
        (_Data, "tensor.data assigned"),
        (_Cond, r"found cond, which holds functions [\s\S]*torch\.where"),
        (_Wrong, "torch refuses an operation"),
    ],
)
def test_what_cannot_be_captured_names_its_line(cls: type[Regression], what: str) -> None:
    with pytest.raises(CaptureError, match=what) as caught:
        _capture(_with_layer(cls()))
    assert re.search(rf"{re.escape(Path(__file__).name)}:{_line_to_blame(cls)}\b", str(caught.value)), caught.value


class _Keywords(nn.Module):
    """As models of transformers are called: the batch's entries by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return nn.functional.mse_loss(self.layer(x), x if y is None else y)


def test_a_dict_given_by_position_is_told_how_it_is_given_by_name() -> None:
    batch = {"x": torch.randn(ROWS, DIM), "y": torch.randn(ROWS, DIM)}
    model = _Keywords()
    with pytest.raises(CaptureError, match=r"step\(\*\*batch\) gives its entries by name"):
        capture(model, Batch.from_call((batch,), {}))
    with pytest.raises(CaptureError) as other:
        capture(model, Batch.from_call((batch, batch), {}))
    assert "by name" not in str(other.value)
    capture(model, Batch.from_call((), batch))


class _Decoded(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(DIM, 2, DIM), 1)

    def predict(self, x: Tensor) -> Tensor:
        found: Tensor = self.decoder(x, x, tgt_mask=x[:, :ROWS])
        return found


class _Averaged(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM, momentum=None)

    def predict(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x)
        return found


@pytest.mark.parametrize(
    ("cls", "advice"),
    [
        (_Decoded, r"is_causal=True or False"),
        (_Averaged, r"give the norm a momentum"),
    ],
)
def test_where_torch_itself_reads_values_it_says_what_keeps_it_from_that(cls: type[Regression], advice: str) -> None:
    with pytest.raises(CaptureError, match=f"reads a tensor's value[\\s\\S]*{advice}"):
        _capture(_with_layer(cls()))


class _LeftOut(Regression):
    layerdrop = 0.1

    def predict(self, x: Tensor) -> Tensor:
        if torch.rand([]) < self.layerdrop:  # the line to blame
            return x
        return -x


def test_layers_that_are_left_out_at_random_are_told_how_to_stay() -> None:
    with pytest.raises(CaptureError, match=r"set the probability of that \(layerdrop\) to 0") as caught:
        _capture(_with_layer(_LeftOut()))
    assert f":{_line_to_blame(_LeftOut)}:" in str(caught.value)


class _Masked(Regression):
    def predict(self, x: Tensor) -> Tensor:
        mask = None if torch.compiler.is_compiling() else torch.ones(DIM) * float(x.sum())
        return x * mask[None]  # type: ignore[index]  # the line to blame


def test_what_is_left_out_while_compiling_is_explained() -> None:
    with pytest.raises(CaptureError, match=r"is_compiling\(\).*pass it in the batch") as caught:
        _capture(_with_layer(_Masked()))
    assert f":{_line_to_blame(_Masked)}:" in str(caught.value)


class _Counting(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.seen = [torch.zeros(DIM)]

    def predict(self, x: Tensor) -> Tensor:
        return x + self.seen[0].add_(1)


def test_a_change_of_a_tensor_that_is_no_buffer_is_told_what_to_make_of_it() -> None:
    with pytest.raises(CaptureError, match=r"found add_ on a tensor .* elsewhere: register it as a buffer"):
        _capture(_with_layer(_Counting()))


class _Printed(Regression):
    def predict(self, x: Tensor) -> Tensor:
        torch.ops.aten._print("here")
        return x


class _Unread(Regression):
    def predict(self, x: Tensor) -> Tensor:
        torch.linalg.inv(x.t() @ x)
        return x


@pytest.mark.parametrize(("model", "effect"), [(_Printed, "_print"), (_Unread, "_linalg_check_errors")])
def test_an_operator_with_an_effect_is_named(model: type[Regression], effect: str) -> None:
    with pytest.raises(CaptureError, match=f"{effect}.*leave it out"):
        _capture(_with_layer(model()))


def test_a_failure_leaves_the_model_as_it_was() -> None:
    model = _with_layer(_Item())
    before = dict(model.named_parameters())
    with pytest.raises(CaptureError):
        _capture(model)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    loss = model(torch.randn(ROWS, DIM), torch.randn(ROWS, DIM)) if not isinstance(model, _Item) else None
    assert loss is not None and loss.dim() == 0
