"""Bad input gets an error that says what to do, and leaves model and optimizer as they were."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.runs.pairs import compile_eager
from tests.lib.runs.refusals import refused_step, sgd
from tests.lib.users import DIM, adamw, eager_step, ids, tiny, untouched
from zerofx import CaptureError, UsageError, ZeroFXError, ZeroFXWarning


class Returns(nn.Module):
    """A linear layer whose loss is made by a function."""

    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.result = result

    def forward(self, x: Tensor) -> Any:
        return self.result(self.linear(x))


LOSSES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "vector": (lambda y: y.sum(0), r"scalar loss from the model, found a tensor of shape \[4\]"),
    "dict": (lambda y: {"logits": y}, r"found a dict with keys \['logits'\]"),
    "two scalars": (lambda y: (y.sum(), y.mean()), "found a tuple of"),
    "integer": (lambda y: y.sum().long(), r"dtype torch.int64"),
    "none": (lambda y: None, "found a NoneType"),
    "detached": (lambda y: y.sum().detach(), "depends on a trainable parameter"),
    "constant": (lambda y: torch.zeros((), requires_grad=True) * 2, "depend"),
}


@pytest.mark.parametrize(("result", "match"), LOSSES.values(), ids=LOSSES.keys())
def test_a_model_without_a_loss_is_refused(result: Callable[[Tensor], Any], match: str) -> None:
    model = Returns(result)
    refused_step(model, (torch.randn(2, DIM),), CaptureError, match)
    eager_step(nn.Sequential(model.linear, Returns(lambda y: y.sum())), sgd(model), torch.randn(2, DIM))


def test_a_loss_that_depends_on_frozen_parameters_alone_is_refused() -> None:
    model = Returns(lambda y: y.sum())
    model.linear.requires_grad_(False)
    model.unused = nn.Linear(DIM, DIM)
    refused_step(model, (torch.randn(2, DIM),), CaptureError, "depends on a trainable parameter")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_a_product_of_several_dtypes_is_refused_with_its_layer(dtype: torch.dtype) -> None:
    model, kind = Returns(lambda y: y.sum()), str(dtype).removeprefix("torch.")
    refused_step(model, (torch.ones(2, DIM, dtype=dtype),), CaptureError, rf"one dtype, found .*{kind}\[.* in linear:")


def test_an_error_while_tracing_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    refused_step(Returns(lambda y: y.sum()), (torch.ones(2, DIM + 1),), CaptureError, "same reduction dim")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("budget", [0, -1.0, float("nan"), True, "much"])
def test_a_budget_that_is_none_is_refused(budget: Any) -> None:
    model = tiny()
    with untouched(model), pytest.raises(UsageError, match="expected "):
        compile_eager(model, adamw(model), memory_budget=budget)


@pytest.mark.parametrize("stage", [-1, 4, True, "3", 3.0, None, torch.tensor(3)])
def test_a_stage_that_is_none_is_refused(stage: Any) -> None:
    model = tiny()
    with untouched(model), pytest.raises(UsageError, match="expected stage to be a whole number, 0 to 3, found"):
        compile_eager(model, adamw(model), stage=stage)


OPTIONS: dict[str, tuple[Any, str]] = {
    "backend": ("cuda", "'inductor' or 'eager'"),
    "precision": ("fp4", "'bf16'"),
    "prefetch": (-1, "0 or more"),
    "max_shapes": (True, "a whole number, 1 or more"),
    "keep_gathered": ("head", "'all', or names.*: names of buckets"),
    "loss_fn": (3, "to be a function, or a module"),
    "machine": ("abacus", "abacus"),
    "plan": ({}, "expected plan to be a Plan"),
    "recompute": ("some", "'full'"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_cannot_be_is_refused(option: str) -> None:
    model = tiny()
    value, match = OPTIONS[option]
    with untouched(model), pytest.raises(ZeroFXError, match=match):
        zerofx.compile(model, adamw(model), **{option: value})


def test_a_bucket_that_is_not_there_is_refused_with_those_that_are() -> None:
    match = "found layers.7: the buckets are .*layers.1"
    refused_step(tiny(), (ids(), ids(1)), UsageError, match, keep_gathered=["layers.7"])


@pytest.mark.parametrize("batch", [torch.zeros(2, 3, dtype=torch.long), "ids", 3, (x for x in range(2))])
def test_an_example_batch_of_another_kind_is_refused(batch: Any) -> None:
    model = tiny()
    with untouched(model), pytest.raises(UsageError, match="example_batch to be a tuple"):
        compile_eager(model, adamw(model), example_batch=batch)


# ------------------------------------------------------------------------------------------------ batches


def test_a_batch_on_another_device_is_named() -> None:
    model = tiny()
    step = compile_eager(model, adamw(model))
    match = r"batch on cpu like the model's parameters, found labels on meta: .*\.to\('cpu'\)"
    with pytest.raises(UsageError, match=match):
        step(ids(), labels=ids(1).to("meta"))
    step(ids(), labels=ids(1))
    with pytest.raises(UsageError, match=r"found batch\[0\] on meta"):
        step(ids().to("meta"), labels=ids(1))


def test_batches_of_other_kinds_are_refused_by_name() -> None:
    model = Returns(lambda y: y.sum())
    step = compile_eager(model, sgd(model))
    x = torch.randn(2, DIM)
    with untouched(model):
        with pytest.raises(UsageError, match=r"that batch\[0\] requires one: detach\(\) it"):
            step(x.requires_grad_() * 1)
        with pytest.raises(UsageError, match=r"found a ndarray as batch\[0\]: .*torch.from_numpy"):
            step(np.zeros((2, DIM)))
        with pytest.raises(UsageError, match=r"found a object as batch\[1\]\['extra'\]"):
            step(x.detach(), {"extra": object()})
        with pytest.raises(UsageError, match=r"batch\[0\] has layout torch.sparse_coo"):
            step(x.detach().to_sparse())
        with pytest.raises(UsageError, match=r"Returns.forward\(x\) can be called with, found Returns\(\): missing"):
            step()
        with pytest.raises(CaptureError, match=r"mat1 and mat2 shapes|a and b must have same reduction dim"):
            step(torch.randn(2, DIM + 1))
    step(x.detach())


def test_a_batch_of_another_shape_is_captured_anew_until_there_are_too_many() -> None:
    model = tiny()
    step = compile_eager(model, adamw(model), max_shapes=2)
    first = step(ids(), labels=ids(1))
    match = r"batch\[0\]: int64\[1, 3\] on cpu \(was int64\[2, 3\] on cpu\), labels: "
    with pytest.warns(ZeroFXWarning, match=match) as seen:
        step(ids(rows=1), labels=ids(1, rows=1))
    assert seen[0].filename == __file__
    match = r"at most 2 batch shapes, found another: (?s:.)*Captured so far:\n.*\n.*\[1, 3\]"
    with pytest.raises(UsageError, match=match):
        step(ids(rows=3), labels=ids(1, rows=3))
    assert step(ids(rows=1), labels=ids(1, rows=1)).shape == first.shape == ()


def test_a_shape_that_cannot_be_captured_is_not_counted() -> None:
    model = Returns(lambda y: y.sum())
    step = compile_eager(model, sgd(model), max_shapes=1)
    with pytest.raises(CaptureError):
        step(torch.randn(2, DIM + 1))
    step(torch.randn(2, DIM))


def test_a_number_that_changes_is_captured_anew_by_name() -> None:
    model = Returns(lambda y: y)
    step = compile_eager(model, sgd(model), loss_fn=lambda y, x, scale: (y * scale).sum())
    x = torch.ones(1, DIM)
    one = step(x, 1)
    with pytest.warns(ZeroFXWarning, match=r"batch\[1\]: 3 \(was 1\)"):
        assert not torch.equal(step(x, 3), one)


# ------------------------------------------------------------------------------------------------ surroundings


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("ZEROFX_DEBUG", "9", "ZEROFX_DEBUG to be a whole number from 0 to 5, found '9'"),
        ("ZEROFX_DISABLE", "shard", r"what can be left out \(.*prefetch, simplify.*\), found shard"),
        ("ZEROFX_VERIFY", "yes", "ZEROFX_VERIFY"),
    ],
)
def test_a_switch_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, match: str) -> None:
    monkeypatch.setenv(name, value)
    model = tiny()
    with untouched(model), pytest.raises(UsageError, match=match):
        compile_eager(model, adamw(model))


def test_a_folder_that_cannot_be_written_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZEROFX_DUMP_DIR", str(tmp_path / "file"))
    refused_step(tiny(), (ids(), ids(1)), UsageError, "set ZEROFX_DUMP_DIR")


_WITHOUT_COMPILER = """
import torch, zerofx
from tests.lib.users import tiny, adamw, untouched
model = tiny()
optimizer = adamw(model)
with untouched(model, optimizer):
    try:
        zerofx.compile(model, optimizer)
    except zerofx.CompilerError as error:
        print(error)
"""


@pytest.mark.days(3)
def test_inductor_without_a_compiler_says_what_to_install() -> None:
    environment = {**os.environ, "PATH": "/nowhere", "CXX": "no-such-compiler", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_COMPILER], env=environment, capture_output=True, text=True, check=True
    )
    assert "apt-get install g++" in done.stdout
    assert "backend='eager'" in done.stdout


def test_a_loss_that_is_not_finite_is_reported_once() -> None:
    model = Returns(lambda y: y.sum().log())
    step = compile_eager(model, sgd(model))
    with torch.no_grad():
        model.linear.weight.fill_(1)
        model.linear.bias.fill_(0)
    x = torch.full((1, DIM), -1.0)
    step(-x)
    with pytest.warns(ZeroFXWarning, match="the loss is nan on rank 0 in step 2") as seen:
        loss = step(x)
    assert loss.isnan()
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step(x).isnan()
