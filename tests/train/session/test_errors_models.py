"""Models and optimizers that cannot be trained are refused with what to do, and left as they were."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.lib.runs.pairs import compile_eager
from tests.lib.runs.refusals import refused_step, sgd
from tests.lib.users import DIM, Tiny, adamw, ids, tiny, untouched
from zerofx import CaptureError, OptimizerError, UsageError, ZeroFXError

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
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        refused_model(torch.jit.script(tiny()), "before torch.jit.script or trace")


def test_a_model_without_parameters_to_train_is_refused() -> None:
    refused_model(nn.ReLU(), "none with requires_grad=True among 0 in ReLU")
    refused_model(tiny().requires_grad_(False), "none with requires_grad=True among 7 in Tiny")


def test_a_model_that_is_not_one_is_refused() -> None:
    with pytest.raises(UsageError, match=r"expected an nn\.Module, found function"):
        compile_eager(lambda x: x, adamw(tiny()))


def test_a_model_on_two_devices_is_refused() -> None:
    model = tiny()
    model.head.to("meta")
    refused_model(model, "embed.weight on cpu, head.weight on meta")


def test_complex_and_lazy_parameters_are_refused() -> None:
    refused = r"imaginary parts of a complex parameter .* found that SGD does not"
    refused_model(nn.Linear(2, 2, dtype=torch.complex64), refused, OptimizerError)
    lazy = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(UsageError, match=r"0.weight is not initialized: call the lazy model once"):
        compile_eager(lazy, sgd(lazy))


@pytest.mark.parametrize("second", ["parameter", "frozen parameter", "transposed", "rows", "buffer", "itself"])
def test_what_shares_the_memory_of_a_parameter_is_refused(second: str) -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    first, last = model[0].get_parameter("weight"), model[1]
    if second == "buffer":
        model.register_buffer("again", first.detach()[1:])
    elif second == "itself":
        model.register_buffer("again", first)
    else:
        shared = {"transposed": first.data.t(), "rows": first.data[2:]}.get(second, first.data)
        last.weight = nn.Parameter(shared, requires_grad=second != "frozen parameter")
    refused_model(model, "found that 0.weight and (1.weight|again) share some")


def test_what_shares_memory_that_is_not_trained_or_lies_next_to_another_is_not_refused() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    both, frozen = torch.randn(2, DIM, DIM), torch.randn(DIM)
    for layer, own in zip(model, both, strict=True):
        layer.weight = nn.Parameter(own)
        layer.bias = nn.Parameter(frozen, requires_grad=False)
    model.register_buffer("bias", frozen)
    model[0].weight, model[1].weight = map(nn.Parameter, torch.randn(DIM, 2 * DIM).split(DIM, dim=1))
    compile_eager(model, adamw(model)).abandon()


def test_sparse_gradients_are_refused() -> None:
    model = tiny()
    model.embed.sparse = True
    refused_model(model, r"Embedding\(sparse=True\) at embed: build it with sparse=False")


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(register: str) -> None:
    model = tiny()
    handle = getattr(model.head.bias, register)(lambda _: None)
    refused_model(model, r"without hooks of their own, found one on head\.bias")
    handle.remove()
    compile_eager(model, adamw(model)).abandon()


class SparseFunction(Tiny):
    """Asks for a sparse gradient where no module says so."""

    def outputs(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(nn.functional.embedding(ids, self.embed.weight, sparse=True))
        return logits


def test_sparse_gradients_of_a_function_are_refused() -> None:
    refused_step(SparseFunction(), (ids(), ids(1)), CaptureError, "sparse")


@torch.library.custom_op("test_errors_models::doubled_", mutates_args=("x",))
def doubled_(x: Tensor) -> None:
    """Writes to what it is given, which torch wraps in an operator that calls it on a copy."""
    x.mul_(2)


class Doubled(Tiny):
    """Calls a custom operator that writes to a value of the step."""

    def outputs(self, ids: Tensor) -> Tensor:
        logits = super().outputs(ids)
        scale = logits.detach().clone()
        doubled_(scale)
        return logits * scale


def test_custom_operators_that_write_are_refused() -> None:
    refused_step(Doubled(), (ids(), ids(1)), CaptureError, r"doubled_\.default, which changes its arguments in place")


class Neighbours(Tiny):
    """Adds up tokens along edges, with a matrix that is sparse: where it is made, or in each step."""

    def __init__(self, *, made_in_step: bool) -> None:
        super().__init__()
        self.edges = [torch.eye(3).flip(0) if made_in_step else torch.eye(3).flip(0).to_sparse()]

    def outputs(self, ids: Tensor) -> Tensor:
        edges = self.edges[0] if self.edges[0].is_sparse else self.edges[0].to_sparse()
        return torch.stack([torch.sparse.mm(edges, tokens) for tokens in super().outputs(ids)])


@pytest.mark.parametrize("made_in_step", [False, True])
def test_sparse_tensors_are_refused(made_in_step: bool) -> None:
    model = Neighbours(made_in_step=made_in_step)
    refused_step(model, (ids(), ids(1)), CaptureError, "found one of layout torch.sparse_coo in the model")


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
