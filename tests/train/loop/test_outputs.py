"""What a model returns with its loss: handed back after a step, as it is asked for, with the training that was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.runs.pairs import compile_eager
from tests.lib.users import Tiny, adamw, ids, same_parameters


class Telling(Tiny):
    """Returns its loss with metrics, logits, and what is no tensor."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.outputs(ids)
        assert labels is not None
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        right = (logits.argmax(-1) == labels).float().mean()
        return {"loss": loss, "accuracy": right, "logits": logits, "of": (logits.detach().norm().reshape(1), "norm")}


def telling() -> Telling:
    torch.manual_seed(3)
    return Telling()


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Any:
    """One step of plain training; returns what the model did."""
    optimizer.zero_grad()
    returned = model(ids(seed), labels=ids(-seed))
    returned["loss"].backward()
    optimizer.step()
    return returned


@pytest.mark.parametrize("outputs", ["numbers", "all", "none"])
def test_outputs_of_a_step(outputs: Any) -> None:
    model, plain = telling(), telling()
    step, optimizer = compile_eager(model, adamw(model), outputs=outputs), adamw(plain)
    for seed in (1, 2, 3):
        loss, expected = step(ids(seed), labels=ids(-seed)), eager(plain, optimizer, seed)
        assert torch.equal(loss, expected["loss"])
        found = step.outputs
        assert (found is None) == (outputs == "none")
        if outputs == "none":
            continue
        assert list(found) == ["loss", "accuracy", "logits", "of"]
        for name in ("loss", "accuracy"):
            assert torch.equal(found[name], expected[name]), name
            assert not found[name].requires_grad
        assert torch.equal(found["of"][0], expected["of"][0])
        assert found["of"][1] == "norm"
        assert (found["logits"] is None) == (outputs == "numbers")
        if outputs == "all":
            assert torch.equal(found["logits"], expected["logits"])
    with step.full_parameters():
        assert same_parameters(model, plain)
    assert ("not kept of what the model returns" in str(step)) == (outputs != "all")


def test_each_micro_batch_has_outputs() -> None:
    model, plain = telling(), telling()
    step = compile_eager(model, adamw(model), accumulate=4)
    step(ids(1, rows=4), labels=ids(2, rows=4))
    with torch.no_grad():
        expected = [plain(a, labels=b) for a, b in zip(ids(1, rows=4).chunk(4), ids(2, rows=4).chunk(4), strict=True)]
    assert [found["accuracy"].item() for found in step.outputs] == [one["accuracy"].item() for one in expected]
    assert [found["loss"].item() for found in step.outputs] == [one["loss"].item() for one in expected]


def test_each_micro_batch_hands_out_the_buffers_that_it_leaves() -> None:
    """A buffer that an extra shows is given to the next micro-batch, too."""

    class Counting(Tiny):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
            self.count.add_(1)
            return {"loss": super().forward(ids, labels), "count": self.count}

    model = Counting()
    step = compile_eager(model, adamw(model), accumulate=4)
    for first in (1, 5):
        step(ids(1, rows=4), labels=ids(2, rows=4))
        assert [given["count"].item() for given in step.outputs] == list(range(first, first + 4))


def test_a_loss_alone_has_no_outputs() -> None:
    class Lonely(Tiny):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
            return {"loss": super().forward(ids, labels), "logits": self.outputs(ids)}

    torch.manual_seed(3)
    model = Lonely()
    step = compile_eager(model, adamw(model))
    step(ids(), labels=ids(1))
    assert step.outputs is None


def test_a_loss_function_may_return_metrics_too() -> None:
    class Predicting(Tiny):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
            return self.outputs(ids)

    def loss_fn(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "largest": logits.max()}

    torch.manual_seed(3)
    model = Predicting()
    expected = model(ids()).max()
    step = compile_eager(model, adamw(model), loss_fn=loss_fn)
    step(ids(), ids(1))
    assert torch.equal(step.outputs["largest"], expected)


def test_views_of_a_batch_are_handed_out_as_copies_with_their_values(tmp_path: Path, monkeypatch: Any) -> None:
    """A copy of a view with gaps, or of one that repeats what it shows, has other strides than the view has."""

    def forward(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        y = model(x)
        views = [x[:, ::2], x.t(), x[1:3], x[3:].expand(2, 4), x.diagonal(), y[:, 1::2], y.t(), y[:1].expand(4, 4)]
        return y.sum(), views

    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    x = torch.arange(16.0).view(4, 4)
    for _ in range(2):  # built, and as an earlier run has kept it
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        expected = [view.detach() for view in forward(model, x)[1]]
        step = compile_eager(model, adamw(model), forward=forward)
        step.prepare(x)
        for _, found in (step.evaluate(x), step(x)):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_step_that_is_left_out_has_none() -> None:
    class Bursting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            return y.square().mean(), y.abs().max().detach()

    model = Bursting()
    step = compile_eager(model, torch.optim.SGD(model.parameters(), lr=0.1), on_nonfinite="skip")
    step(torch.ones(2, 2))
    lengths = [len(step.outputs)]
    with pytest.warns(zerofx.ZeroFXWarning, match="finite loss"):
        assert not step(torch.full((2, 2), float("inf"))).isfinite()
    assert lengths == [2]
    assert step.outputs is None


def test_averages_are_of_numbers() -> None:
    model = telling()
    step = compile_eager(model, adamw(model))
    step(ids(), labels=ids(1))
    means = step.average(step.outputs)
    assert means == {"loss": step.outputs["loss"].item(), "accuracy": step.outputs["accuracy"].item(), "logits": None,
                     "of": (step.outputs["of"][0].item(), "norm")}  # fmt: skip
    assert step.average(torch.tensor(2.0)) == 2.0
    assert step.average([1, "word", True]) == [1.0, "word", True]
