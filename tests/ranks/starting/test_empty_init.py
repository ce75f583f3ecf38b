"""Training a model that never existed whole: the bits of a normal construction, and the memory of a slice."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.lib.chains import Equal
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, batches
from tests.lib.runs.offloads import placing, prepare_case
from tests.lib.runs.training import build, differences, train_compiled
from tests.lib.users import Tiny, adamw, facts, ids, tiny
from zerofx import OptimizerError, UsageError
from zerofx.deferred import DeferredTensor
from zerofx.scheduler.cost.cpu.peaks import CpuPeak


def deferred(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with zerofx.empty_init():
            return model()

    return build


@pytest.mark.parametrize("name", sorted(CASES))
def test_models_have_the_values_of_a_normal_construction(name: str) -> None:
    expected, found = build(CASES[name]), build(replace(CASES[name], model=deferred(CASES[name].model)))
    for tensors in ("named_parameters", "named_buffers"):
        real = dict(getattr(expected, tensors)(remove_duplicate=False))
        other = dict(getattr(found, tensors)(remove_duplicate=False))
        assert real.keys() == other.keys()
        for key, tensor in real.items():
            assert isinstance(other[key], DeferredTensor), key
            assert torch.equal(other[key].materialise(), tensor), key


@pytest.mark.sweep(2)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2", "mixed dtypes", "parametrised", "torch layers"])
def test_training_is_the_same_to_the_bit(name: str, stage: int) -> None:
    case = CASES[name]
    other = replace(case, model=deferred(case.model))
    assert not differences(train_compiled(case, stage, 2), train_compiled(other, stage, 2))


def _on_ranks(runs: list[tuple[str, int, str | None]]) -> list[str]:
    wrong = []
    for name, stage, precision in runs:
        case = CASES[name]
        expected = train_compiled(case, stage, 2, precision=precision)
        for model in (_with_seed_of_rank(deferred(case.model)), _deferred_on_one_rank(case.model)):
            wrong += differences(expected, train_compiled(replace(case, model=model), stage, 2, precision=precision))
    return wrong


def _with_seed_of_rank(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Every rank but the first builds another model: rank 0's values count."""

    def build() -> nn.Module:
        if dist.get_rank():
            torch.manual_seed(dist.get_rank())
        return model()

    return build


def _deferred_on_one_rank(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return deferred(model) if dist.get_rank() else model


@pytest.mark.sweep(1)
@pytest.mark.parametrize("run", [("stack", 3, None), ("stack", 0, "bf16")])
def test_two_ranks(run: tuple[str, int, str | None]) -> None:
    assert run_ranks(_on_ranks, 2, [run]) == [[], []]


@pytest.mark.slow
def test_other_stages_on_two_ranks() -> None:
    runs = [(name, stage, precision) for name in ("gpt", "llama") for stage in range(4) for precision in (None, "bf16")]
    assert run_ranks(_on_ranks, 2, runs) == [[], []]


@pytest.mark.usefixtures("drive")
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_values_go_to_the_tier_of_the_plan(tier: str) -> None:
    case = CASES["gpt"]
    prepared = prepare_case(case, 0, 1)
    plan = placing(prepared, tier, "host")
    expected = train_compiled(case, 0, 2)
    assert not differences(expected, train_compiled(replace(case, model=deferred(case.model)), 0, 2, plan=plan))


DEPTH = 12
_M_MMAP_THRESHOLD = -3  # a parameter of mallopt(3), from glibc's <malloc.h>


def _prepared(width: int) -> zerofx.Step:
    with zerofx.empty_init():
        model = Equal(DEPTH, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return zerofx.compile(model, optimizer, 3, backend="eager", example_batch=(torch.ones(1, width),))


def test_one_parameter_beyond_the_model_is_allocated() -> None:
    one = 128 * 128 * 4
    small = (DEPTH + 1) * 5056 + 4096  # the state of the generator for each parameter, and small tensors
    with CpuPeak() as peak:
        held = _prepared(128).tiers()["device"]
    assert held == DEPTH * one and held + one <= peak.num_bytes < held + one + small


def _resident(name: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def _growth(width: int) -> tuple[int, int]:
    """Bytes by which resident memory grew at most while a model was made, and what its step holds."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 100_000)  # so that glibc gives back at once what is freed
    _prepared(8)  # what is loaded once
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    step = _prepared(width)
    return _resident("VmHWM") - before, step.tiers()["device"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of resident memory")
def test_one_parameter_beyond_the_slice_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    one = 2048 * 2048 * 4
    # Allocations are not counted here: gloo's threads free some, unseen by the profiler.
    for peak, held in run_ranks(_growth, 2, 2048):
        assert held == DEPTH * one // 2
        assert held < peak < held + one + one // 2 < DEPTH * one


class Scale(nn.Module):
    """A parameter that no method initializes."""

    def __init__(self, value: Tensor | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3) if value is None else value)
        self.table: Tensor
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale * self.table).sum()


def compile_eager(model: nn.Module, stage: int = 3, **options: Any) -> zerofx.Step:
    return zerofx.compile(model, adamw(model), stage, backend="eager", **options)


def tiny_deferred() -> Tiny:
    torch.manual_seed(3)
    with zerofx.empty_init():
        return Tiny()


def test_what_has_no_values_is_refused() -> None:
    with pytest.raises(UsageError, match=r"found none for scale: initialize them \(nn.init.normal_\(...\)\) inside"):
        compile_eager(deferred(Scale)())


def test_what_cannot_be_replayed_is_refused_before_anything_is_changed() -> None:
    table = torch.ones(3)
    model = deferred(lambda: Scale(torch.zeros(3).add_(table)))()
    table.add_(1)
    with pytest.raises(UsageError, match=r"found one of shape \[3\] changed in place since"):
        compile_eager(model)
    assert isinstance(model.scale, DeferredTensor) and isinstance(model.table, DeferredTensor)
    table.sub_(1)
    with pytest.raises(UsageError, match="changed in place since"):
        compile_eager(model)


def test_parameters_that_are_weakly_referred_to_are_refused() -> None:
    model = tiny_deferred()
    kept = weakref.ref(model.head.weight)
    with pytest.raises(UsageError, match=r"found that head.weight is: drop what holds it"):
        compile_eager(model)
    assert kept() is model.head.weight


def test_there_are_no_full_parameters_before_the_first_step() -> None:
    model = tiny_deferred()
    step = compile_eager(model)
    with pytest.raises(UsageError, match=r"call step.prepare\(batch\) first"), step.full_parameters():
        pass
    step.prepare(ids(), labels=ids(1))
    expected = tiny().state_dict()
    found = step.full_state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    step.close()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


class Holding(nn.Linear):
    """Tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__(3, 1, bias=False)
        self.table = torch.arange(3.0)
        self.more: dict[str, Any] = {"pair": (self.table, torch.tensor(2.0))}
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.weight * self.table * self.more["pair"][1]
        return y.sum()


def test_tensors_that_modules_hold_are_made() -> None:
    with zerofx.empty_init():
        model = Holding()
    step = compile_eager(model)
    assert type(model.table) is Tensor and model.more["pair"][0] is model.table
    assert step(torch.ones(3)).item() == 6


@pytest.mark.parametrize("name", ["llama", "stack", "batchnorm"])
def test_models_on_meta_are_initialized_by_their_modules(name: str) -> None:
    case = CASES[name]
    expected = build(case)
    with torch.device("meta"):
        model = case.model()
    torch.manual_seed(7)
    step = zerofx.compile(model, case.optimizer(model), 3, loss_fn=case.loss_fn, backend="eager")
    args, kwargs = next(batches(case, 0, 1))
    step.prepare(*args, **kwargs)
    found = step.full_state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.state_dict().items())
    assert all(torch.equal(*pair) for pair in zip(expected.buffers(), model.buffers(), strict=True))


def test_tensors_that_modules_hold_on_meta_are_refused() -> None:
    with torch.device("meta"):
        model = Holding()
    with pytest.raises(UsageError, match=r"Holding with an attribute table"):
        compile_eager(model)


def test_deferred_models_are_planned_and_tuned() -> None:
    with zerofx.empty_init():
        model = Holding()
    batch = (torch.ones(3),)
    built = Holding()
    real = zerofx.plan(built, adamw(built), batch, machine="cpu", backend="eager")
    assert zerofx.plan(model, adamw(model), batch, machine="cpu", backend="eager").plan == real.plan
    zerofx.tune(model, adamw(model), batch, backend="eager", machine="cpu", num_steps=2)
    assert isinstance(model.weight, DeferredTensor)


def test_states_of_an_optimizer_without_values_are_refused() -> None:
    model = tiny_deferred()
    optimizer = adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with pytest.raises(OptimizerError, match=r"found a exp_avg of shape \[11, 4\] that has none"):
        zerofx.compile(model, optimizer, backend="eager")


def test_modules_on_meta_that_cannot_initialize_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Scale(torch.ones(3)))
    before = facts(model, None)
    with pytest.raises(UsageError, match=r"found none for Scale at 1 \(1.scale, 1.table\): give them reset_parameters"):
        compile_eager(model)
    assert facts(model, None) == before and model[0].weight.is_meta


def test_a_reset_that_fails_is_named() -> None:
    class Failing(nn.Linear):
        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                raise ValueError("no seed")

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Failing(3, 3))
    with pytest.raises(UsageError, match=r"Failing at 1 to initialize .* found ValueError: no seed"):
        compile_eager(model)
    assert all(parameter.is_meta for parameter in model.parameters())
