"""Bad input gets an error that says what to do, and leaves model and optimizer as they were."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zerofx
from tests.users import DIM, Tiny, adamw, eager_step, ids, tiny, untouched
from zerofx import CaptureError, OptimizerError, UsageError, ZeroFXError, ZeroFXWarning


class Returns(nn.Module):
    """A linear layer whose loss is made by a function."""

    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.result = result

    def forward(self, x: Tensor) -> Any:
        return self.result(self.linear(x))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def compile_eager(model: Any, optimizer: Any, **options: Any) -> zerofx.Step:
    return zerofx.compile(model, optimizer, backend="eager", **options)


def refused_step(
    model: nn.Module, batch: tuple[Any, ...], error: type[ZeroFXError], match: str, **options: Any
) -> None:
    """Both ways to the first capture refuse; after the first the model is free, after both it trains eagerly."""
    optimizer = sgd(model)
    with untouched(model, optimizer):
        with pytest.raises(error, match=match):
            compile_eager(model, optimizer, example_batch=batch, **options)
        step = compile_eager(model, optimizer, **options)
        with pytest.raises(error, match=match):
            step(*batch)
        step.close()


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


@pytest.mark.parametrize("stage", [-1, 4, True, "3", 3.0, None, torch.tensor(3)])
def test_a_stage_that_is_none_is_refused(stage: Any) -> None:
    model = tiny()
    with untouched(model), pytest.raises(UsageError, match="expected stage 0"):
        compile_eager(model, adamw(model), stage=stage)


OPTIONS: dict[str, tuple[Any, str]] = {
    "backend": ("cuda", "'inductor' or 'eager'"),
    "precision": ("fp8", "'bf16'"),
    "prefetch": (-1, "0 or more"),
    "max_shapes": (True, "at least 1"),
    "keep_gathered": ("head", "'all' or names of buckets"),
    "loss_fn": (3, "callable"),
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


# ------------------------------------------------------------------------------------------------ optimizers


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = tiny(), tiny()
    with untouched(model), pytest.raises(OptimizerError, match=r"shape \[11, 4\] in param group 0 \(number 0\)"):
        compile_eager(model, adamw(other))


@pytest.mark.parametrize("given", ["parameters", "class", "scheduler", "none"])
def test_what_is_no_optimizer_is_refused(given: str) -> None:
    model = tiny()
    optimizer = {
        "parameters": model.parameters(),
        "class": torch.optim.AdamW,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(adamw(model)),
        "none": None,
    }[given]
    with untouched(model), pytest.raises(OptimizerError, match=r"such as torch.optim.AdamW\(model.parameters\(\)\)"):
        compile_eager(model, optimizer)


def test_a_parameter_missing_from_the_optimizer_is_named() -> None:
    model = tiny()
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if n != "head.bias"], lr=0.1)
    step = compile_eager(model, optimizer)
    with pytest.raises(OptimizerError, match=r"found 1 that are not: head\.bias"):
        step(ids(), ids(1))
    step.close()
    with untouched(model, optimizer), pytest.raises(OptimizerError, match=r"found 1 that are not: head\.bias"):
        compile_eager(model, optimizer, example_batch=(ids(), ids(1)))


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon"])
def test_an_optimizer_that_needs_whole_tensors_is_refused_by_name(name: str) -> None:
    model = nn.Linear(DIM, DIM, bias=False)
    optimizer = getattr(torch.optim, name)(model.parameters())
    with untouched(model, optimizer), pytest.raises(OptimizerError, match=name):
        compile_eager(model, optimizer)


# ------------------------------------------------------------------------------------------------ models


class Wrapped(nn.Module):
    """A plain module around one that cannot be captured."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


@pytest.fixture
def one_rank(tmp_path: Any) -> Any:
    torch.distributed.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def refused_model(model: nn.Module, match: str, error: type[ZeroFXError] = UsageError) -> None:
    optimizer = sgd(model) if any(p.requires_grad for p in model.parameters()) else sgd(nn.Linear(1, 1))
    with untouched(model, optimizer), pytest.raises(error, match=match):
        compile_eager(model, optimizer)


@pytest.mark.usefixtures("one_rank")
def test_models_that_are_distributed_already_are_refused() -> None:
    model = nn.parallel.DistributedDataParallel(tiny())
    refused_model(model, r"DistributedDataParallel: give zerofx the module inside \(model.module\)")
    refused_model(Wrapped(model), "DistributedDataParallel at inner")
    sharded = nn.Linear(DIM, DIM)
    mesh = init_device_mesh("cpu", (1,))
    sharded.weight = nn.Parameter(DTensor.from_local(sharded.weight.detach(), mesh))
    refused_model(sharded, "weight is a DTensor: give zerofx an undivided model")


def test_models_that_are_compiled_already_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, from the import of Inductor
        compiled = torch.compile(tiny())
    assert isinstance(compiled, nn.Module)
    refused_model(compiled, "compiled by torch.compile: .*model._orig_mod")
    model = tiny()
    model.layers[1].compile()
    refused_model(model, r"Sequential at layers.1 on which .compile\(\) was called")


def test_a_model_without_parameters_to_train_is_refused() -> None:
    refused_model(nn.ReLU(), "none with requires_grad=True among 0 in ReLU")
    refused_model(tiny().requires_grad_(False), "none with requires_grad=True among 7 in Tiny")


def test_a_model_that_is_not_one_is_refused() -> None:
    with pytest.raises(UsageError, match=r"expected an nn\.Module, found function"):
        compile_eager(lambda x: x, adamw(tiny()))


def test_a_model_on_meta_is_refused() -> None:
    with torch.device("meta"):
        refused_model(Tiny(), r"embed.weight on the meta device: .*zerofx.plan")


def test_a_model_on_two_devices_is_refused() -> None:
    model = tiny()
    model.head.to("meta")
    refused_model(model, "head.weight on the meta device")


def test_complex_and_lazy_parameters_are_refused() -> None:
    refused_model(nn.Linear(2, 2, dtype=torch.complex64), "complex64", OptimizerError)
    lazy = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(UsageError, match=r"0.weight is not initialized: call the lazy model once"):
        compile_eager(lazy, sgd(lazy))


def test_sparse_gradients_are_refused() -> None:
    model = tiny()
    model.embed.sparse = True
    refused_model(model, r"Embedding\(sparse=True\) at embed: build it with sparse=False")


class SparseFunction(Tiny):
    """Asks for a sparse gradient where no module says so."""

    def outputs(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(nn.functional.embedding(ids, self.embed.weight, sparse=True))
        return logits


def test_sparse_gradients_of_a_function_are_refused() -> None:
    refused_step(SparseFunction(), (ids(), ids(1)), CaptureError, "sparse")


def test_a_loss_function_with_parameters_is_refused() -> None:
    model = tiny()
    with untouched(model), pytest.raises(UsageError, match="found weight, bias in Linear: make it a part of the model"):
        compile_eager(model, adamw(model), loss_fn=nn.Linear(1, 1))


# ------------------------------------------------------------------------------------------------ compiling twice


def test_a_model_is_compiled_once() -> None:
    model = tiny()
    optimizer = adamw(model)
    step = compile_eager(model, optimizer)
    with (
        untouched(model, optimizer),
        pytest.raises(UsageError, match=r"compiled before: use that step, or .* close\(\)"),
    ):
        compile_eager(model, optimizer)
    outer = Wrapped(model)
    with pytest.raises(UsageError, match="found that its part inner was compiled before"):
        compile_eager(outer, adamw(outer))
    step.close()
    step.close()
    again = compile_eager(model, optimizer, example_batch=(ids(), ids(1)))
    again(ids(), ids(1))
    with pytest.raises(UsageError, match="compiled before"):
        compile_eager(model, optimizer)
    again.close()
    compile_eager(model, optimizer)


def test_a_step_that_was_dropped_before_it_ran_frees_its_model() -> None:
    model = tiny()
    step = compile_eager(model, adamw(model))
    gone = weakref.ref(step)
    del step
    assert gone() is None
    compile_eager(model, adamw(model))


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
        with pytest.raises(CaptureError, match="TypeError"):
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
        ("ZEROFX_DISABLE", "shard", r"passes that can be left out \(.*prefetch, simplify.*\), found shard"),
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
from tests.users import tiny, adamw, untouched
model = tiny()
optimizer = adamw(model)
with untouched(model, optimizer):
    try:
        zerofx.compile(model, optimizer)
    except zerofx.CompilerError as error:
        print(error)
"""


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
