"""Steps that read models that other steps train: eager mode's bits, and what cannot be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.runs.adversarial import (
    Stack,
    batches,
    discriminator_step,
    generator_loss,
    generator_step,
    models,
    optimizer_of,
    steps_of,
    unlike_eager_mode,
    unlike_eager_mode_with_slices,
)
from zerofx import Precision, UsageError
from zerofx.choices import PrecisionWord
from zerofx.precision import dtype_of


@pytest.mark.sweep(1)
@pytest.mark.captures
@pytest.mark.parametrize("stages", [(0, 0), (3, 3)], ids=str)
@pytest.mark.parametrize("norm", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "batch norm"])
def test_the_bits_of_eager_mode(stages: tuple[int, int], norm: bool) -> None:
    assert unlike_eager_mode(3, stages, norm) == []


@pytest.mark.sweep(1)
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_what_is_read_may_lie_in_a_slower_tier(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFX_NVME_DIR", str(tmp_path))
    assert unlike_eager_mode(3, (3, 3), away={"offload": tier, "memory_budget": 44_000}) == []


def test_what_is_read_gets_no_gradient_though_it_requires_one() -> None:
    generator, discriminator = models()
    step, other = steps_of(generator, discriminator)
    (real, noise), *_ = batches(1)
    other(real, noise)
    before = other.full_state_dict()
    step(noise)
    trained = {index for index, bucket in enumerate(step.plan.buckets) if bucket.group is not None}
    assert {step.plan.buckets[index].name for index in trained} == {"first", "layers.0", "layers.1", "layers.2", "last"}
    assert step.compiled.lowered.graph.reduced.keys() == trained
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.full_state_dict().items())


@pytest.mark.filterwarnings("ignore:.*the step is made anew")
def test_a_step_that_is_made_anew_is_read_where_it_has_its_model_then() -> None:
    assert unlike_eager_mode(3, (3, 3), freezes=True) == []


def test_freezing_what_is_read_around_a_step_changes_nothing() -> None:
    losses = []
    for freezes in (False, True):
        generator, discriminator = models()
        step, other = steps_of(generator, discriminator)
        for real, noise in batches(3):
            other(real, noise)
            discriminator.requires_grad_(not freezes)
            losses.append(step(noise))
            discriminator.requires_grad_(True)
    assert losses[:3] == losses[3:]


def test_a_model_that_a_step_has_read_may_be_compiled_later() -> None:
    losses = []
    for compiles in (False, True):
        generator, discriminator = models()
        step = generator_step(generator, discriminator.requires_grad_(False))
        (real, noise), (_, more) = batches(2)
        losses.append(step(noise).clone())
        if compiles:
            discriminator.requires_grad_(True)
            other = discriminator_step(discriminator, generator)
            other.prepare(real, noise)
        losses.append(step(more).clone())
    assert losses[:2] == losses[2:]
    assert any(bucket.lent for bucket in step.plan.buckets)


def test_a_moving_average_of_what_another_step_trains() -> None:
    """A momentum encoder: its step follows the other's parameters, and that one's loss reads it."""

    def distance(model: nn.Module, target: nn.Module) -> Tensor:
        pairs = zip(model.parameters(), target.parameters(), strict=True)
        return torch.stack([0.5 * (a - b.detach()).square().sum() for a, b in pairs]).sum()

    def contrast(model: nn.Module, momentum: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            keys = momentum(x)
        loss: Tensor = (model(x + 0.1) - keys).square().mean() + model(x).sum() * 0.01
        return loss

    def trained(compiles: bool) -> list[Tensor]:
        (encoder, _), (momentum, _) = models(), models()
        rates = {encoder: 0.1, momentum: 0.01}
        optimizers = {m: torch.optim.SGD(m.parameters(), rate, foreach=False) for m, rate in rates.items()}
        losses: dict[nn.Module, Callable[..., Tensor]] = {
            encoder: lambda m, x: contrast(m, momentum, x), momentum: lambda m: distance(m, encoder)
        }  # fmt: skip
        steps = {m: zerofx.compile(m, optimizers[m], 3, forward=losses[m], backend="eager") for m in rates if compiles}
        found = []
        for _, noise in batches(4):
            for model, batch in ((encoder, (noise,)), (momentum, ())):
                if compiles:
                    found.append(steps[model](*batch).clone())
                    continue
                optimizers[model].zero_grad()
                loss = losses[model](model, *batch)
                loss.backward()
                optimizers[model].step()
                found.append(loss.detach())
        return found

    assert trained(True) == trained(False)


def test_updates_that_another_step_has_left_to_the_host_are_done_first() -> None:
    losses = []
    for delays in (False, True):
        generator, discriminator = models()
        step = generator_step(generator, discriminator)
        other = discriminator_step(discriminator, generator, delayed_update=1 if delays else None)
        (real, noise), *_ = batches(1)
        for _ in range(3):
            losses.append(other(real, noise).clone())
            with other.full_parameters():
                pass  # which finishes them too, so that both trainings are one
        losses.append(other(real, noise).clone())
        losses.append(step(noise).clone())
    assert losses[:5] == losses[5:]


def test_an_evaluation_reads_them_too() -> None:
    generator, discriminator = models()
    step, other = steps_of(generator, discriminator)
    for real, noise in batches(2):
        other(real, noise)
        step(noise)
    with step.full_parameters(), other.full_parameters():
        expected = generator_loss(generator, discriminator, noise)
    assert torch.equal(step.evaluate(noise), expected)
    measured = step.measure_evaluation(noise, num_steps=1).peak_bytes
    assert measured == step.evaluation.plan.peak_bytes


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        pytest.param({"accumulate": 2, "max_grad_norm": 1.0}, marks=pytest.mark.slow),
        {"memory_budget": 100_000, "offload": "host"},
    ],
    ids=str,
)
def test_what_steps_are_asked_for_besides(options: dict[str, Any]) -> None:
    generator, discriminator = models()
    step, other = steps_of(generator, discriminator, **options)
    for real, noise in batches(3):
        other(real, noise)
        step(noise)
    for one, batch in ((step, (noise,)), (other, (real, noise))):
        measured = one.measure(*batch, num_steps=1).peak_bytes["device"]
        assert measured == one.plan.peak_bytes["device"] <= options.get("memory_budget", measured)


def test_a_step_whose_models_are_read_is_closed_after_the_one_that_reads() -> None:
    generator, discriminator = models()
    step, other = steps_of(generator, discriminator)
    (real, noise), *_ = batches(1)
    other(real, noise)
    step(noise)
    other.close()
    with pytest.raises(UsageError, match=r"that trains discriminator to be open .* found it closed"):
        step(noise)
    step.close()


def test_one_parameter_has_one_step() -> None:
    generator, discriminator = models()
    step = zerofx.compile(discriminator, optimizer_of(discriminator), backend="eager")
    both = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    with pytest.raises(UsageError, match=r"its part discriminator was compiled before.*use it in forward="):
        zerofx.compile(both, optimizer_of(both))
    generator.last = discriminator.last
    with pytest.raises(UsageError, match=r"last.weight is one of another compiled model.*reads them, untrained"):
        zerofx.compile(generator, optimizer_of(generator))
    step.close()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precisions", [("bf16", None), (None, "bf16"), ("fp16", "bf16")], ids=str)
def test_a_step_computes_in_its_own_precision_with_what_another_computes_with(
    precisions: tuple[PrecisionWord | None, PrecisionWord | None], stage: int
) -> None:
    """The reference casts whole models in front of each step."""
    scale = 1.0 if "fp16" in precisions else None
    assert unlike_eager_mode(3, (stage, stage), precisions=precisions, loss_scale=scale) == []


@pytest.mark.parametrize("stage", [0, 3])
def test_what_another_step_has_in_slices_is_put_together(stage: int) -> None:
    assert unlike_eager_mode_with_slices(3, (stage, stage)) == []


def test_what_is_read_is_the_same_before_its_step_is_prepared() -> None:
    generator, discriminator = models()
    other = discriminator_step(discriminator, generator, precision="bf16")
    step = generator_step(generator, discriminator)
    (real, noise), *_ = batches(1)
    step.prepare(noise)
    early = step.evaluate(noise)
    other.prepare(real, noise)
    assert torch.equal(step.evaluate(noise), early)
    with step.full_parameters(), other.full_parameters():
        exact = generator_loss(generator, discriminator, noise)
        discriminator.bfloat16().float()
        assert torch.equal(generator_loss(generator, discriminator, noise), early) and not torch.equal(exact, early)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x)))
        return y


@pytest.mark.sweep(1)
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_modules_that_their_own_step_keeps_in_float32_are_read_so(precision: PrecisionWord | None) -> None:
    torch.manual_seed(0)
    student, teacher = _Normed(), _Normed()
    nn.init.normal_(teacher.norm.weight)
    dtype = torch.float32 if precision is None else dtype_of(precision)
    own, read = copy.deepcopy(student).to(dtype), copy.deepcopy(teacher)
    for layer in (read.first, read.last):
        layer.bfloat16().to(dtype)
    other = zerofx.compile(
        teacher, optimizer_of(teacher), 3, precision=Precision("bf16", (nn.LayerNorm,)), backend="eager",
        forward=lambda model, x: model(x).square().mean(),
    )  # fmt: skip
    step = zerofx.compile(
        student, optimizer_of(student), 3, precision=precision, backend="eager",
        forward=lambda model, x: (model(x) - teacher(x)).square().mean(),
    )  # fmt: skip
    x = torch.randn(5, 4)
    other.prepare(x)
    step.prepare(x)
    with torch.no_grad():
        y = x.to(dtype)
        theirs = read.last(read.norm(read.first(y).float()).to(dtype))
        expected = (own(y) - theirs).square().mean()
    assert torch.equal(step.evaluate(x), expected)


def test_what_is_read_may_be_handed_out_and_read_as_it_is() -> None:
    generator, discriminator = models()
    step = zerofx.compile(
        generator, optimizer_of(generator), 3, backend="eager",
        forward=lambda model, x: ((model(x) * discriminator.last.bias).mean(), discriminator.last.weight.T),
    )  # fmt: skip
    other = discriminator_step(discriminator, generator, precision="bf16")
    (real, noise), *_ = batches(1)
    weight = discriminator.last.weight.detach().clone()
    other.prepare(real, noise)
    _, handed_out = step(noise)
    assert torch.equal(handed_out, weight.bfloat16().float().T)


def test_a_model_without_values_is_prepared_before_it_is_read() -> None:
    with zerofx.empty_init():
        discriminator = Stack(2, 1)
    generator, _ = models()
    step, other = steps_of(generator, discriminator)
    (real, noise), *_ = batches(1)
    with pytest.raises(UsageError, match=r"step.prepare\(batch\) before"):
        step(noise)
    other.prepare(real, noise)
    step(noise)
