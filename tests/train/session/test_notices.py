"""Warnings of results are told from notices, which change none, by their class; and what some of both say."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx.errors import CaptureError, UsageError


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))


def _step(model: nn.Module) -> zerofx.Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return zerofx.compile(model, optimizer, 0, backend="eager", loss_fn=lambda outputs: outputs.mean())


def test_notices_pass_where_warnings_of_results_are_errors() -> None:
    model = _model()
    step = _step(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("error", zerofx.ResultWarning)
        step(torch.ones(2, 4))
        step(torch.ones(3, 4))
        with pytest.raises(zerofx.ResultWarning, match="the loss is nan"):
            step(torch.full((3, 4), torch.nan))
    assert [warning.category for warning in caught] == [zerofx.ZeroFXNotice]
    assert str(caught[0].message).startswith("a batch of another shape is captured")


def test_another_mode_is_not_another_shape() -> None:
    model = _model()
    step = _step(model)
    step(torch.ones(2, 4))
    model.eval()
    with pytest.warns(zerofx.ZeroFXNotice, match=r"^a batch in another setting is captured.*: training mode: eval"):
        step(torch.ones(2, 4))


def test_a_pattern_is_put_in_a_tuple() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"found 'block' \(give keep_gradients=\('block',\)\)"):
        zerofx.compile(model, optimizer, 0, keep_gradients="block")


class _Leaving(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        values = super().forward(x)
        return values * torch.from_numpy(values.detach().numpy() * 2)


def test_numpy_in_a_forward_is_named() -> None:
    with pytest.raises(CaptureError, match=r"makes a numpy array of a tensor, at\n.*numpy\(\) \* 2.*\n.*with torch"):
        _step(_Leaving(4, 4))(torch.ones(2, 4))


def test_many_names_are_told_in_short() -> None:
    step = zerofx.compile(
        model := _model(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        0,
        backend="eager",
        forward=lambda model, **batch: sum(model(x).mean() for x in batch.values()),
    )
    step(**{f"b{number}": torch.ones(2, 4) for number in range(20)})
    with pytest.warns(zerofx.ZeroFXNotice, match="and 15 more") as caught:
        step(**{f"b{number}": torch.ones(3, 4) for number in range(20)})
    assert len(str(caught[0].message)) < 500


def test_a_setting_of_many_modules_names_a_few_and_is_told_from_others_all_the_same() -> None:
    model = nn.Sequential(*[_model() for _ in range(30)])
    step = _step(model)
    step(torch.ones(2, 4))
    texts = []
    for first in (0, 1):
        for number, part in enumerate(model):
            part.train(number < 6 + first)
        with pytest.warns(zerofx.ZeroFXNotice, match="in another setting") as caught:
            step(torch.ones(2, 4))
        (text,) = [str(warning.message) for warning in caught]
        assert re.search(r"train, but eval in \d.* and 6\d more \(hash \w{8}\)", text), text
        texts.append(text)
    assert texts[0] != texts[1] and max(map(len, texts)) < 400


def test_processes_that_torchrun_starts_are_told_where_no_group_joins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(zerofx.ResultWarning, match=r"torchrun has started 2 processes.*init_process_group\(\) before"):
        _step(_model())
    monkeypatch.setenv("WORLD_SIZE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(_model())
