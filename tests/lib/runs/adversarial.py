"""Two models that are trained against each other, each by a step that reads the other, and the same in eager mode."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.runs.training import world
from zerofx.choices import PrecisionWord
from zerofx.precision import dtype_of

Dtypes: TypeAlias = tuple[torch.dtype | None, torch.dtype | None]


class Stack(nn.Module):
    """Layers of their own between two others. `norm`: with a statistic each, and a bound on the norm of the first, for
    which a forward puts other tensors in the places of buffers."""

    def __init__(self, inputs: int, outputs: int, *, depth: int = 3, dim: int = 24, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.BatchNorm1d(dim) if norm else nn.Identity(), nn.LeakyReLU(0.2))
            for _ in range(depth)
        )
        self.last = nn.Linear(dim, outputs)
        if norm:
            nn.utils.parametrizations.spectral_norm(self.first)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.last(x)
        return result


def models(**options: Any) -> tuple[Stack, Stack]:
    """A generator and a discriminator; the same on every rank."""
    torch.manual_seed(0)
    return Stack(4, 2, **options), Stack(2, 1, **options)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01, foreach=False)


def discriminator_loss(discriminator: nn.Module, generator: nn.Module, real: Tensor, noise: Tensor) -> Tensor:
    with torch.no_grad():
        fakes = generator(noise)
    return F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fakes)).mean()


def generator_loss(generator: nn.Module, discriminator: nn.Module, noise: Tensor) -> Tensor:
    return F.softplus(-discriminator(generator(noise))).mean()


def batches(steps: int, size: int = 6, *, sharing: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's samples and noise, and those of all of its group of `sharing` ranks."""
    draw = torch.Generator().manual_seed(1 + world()[0] // sharing)
    for _ in range(steps):
        yield torch.randn(size, 2, generator=draw), torch.randn(size, 4, generator=draw)


def average_gradients(model: nn.Module, sharing: int = 1) -> None:
    """As data parallelism does; neighbours' are summed first, as on a mesh whose inner axis has two ranks. Of each
    `sharing` ranks the first counts."""
    ranks = world()[1]
    for parameter in model.parameters() if ranks > 1 else ():
        if parameter.grad is None:
            continue
        sums = [torch.empty_like(parameter.grad) for _ in range(ranks)]
        dist.all_gather(sums, parameter.grad)
        sums = sums[::sharing]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
        parameter.grad = sums[0] / (ranks // sharing)


def freeze(discriminator: nn.Module, number: int) -> None:
    """Freeze a layer and a part of another for the second round."""
    for name, parameter in discriminator.named_parameters():
        parameter.requires_grad_(number != 1 or not name.startswith(("layers.0", "layers.1.0.bias")))


def in_eager_mode(
    steps: int, *, freezes: bool = False, dtypes: Dtypes = (None, None), sharing: int = 1, **options: Any
) -> tuple[list[Tensor], Stack, Stack]:
    """Losses and models of plain code. `dtypes` are what the generator's step computes in, and the other's: each with
    a copy of its own model in that, and a copy in that of what the other computes with; None for the models
    themselves."""
    generator, discriminator = models(**options)
    optimizers = {model: optimizer_of(model) for model in (generator, discriminator)}
    computed = dict(zip((generator, discriminator), dtypes, strict=True))
    copies = {model: model if dtype is None else copy.deepcopy(model).to(dtype) for model, dtype in computed.items()}
    losses = []
    for number, (real, noise) in enumerate(batches(steps, sharing=sharing)):
        if freezes:
            freeze(discriminator, number)
        for model, other in ((discriminator, generator), (generator, discriminator)):
            optimizers[model].zero_grad()
            dtype, low = computed[model] or real.dtype, copies[model]
            read = copies[other] if computed == dict.fromkeys(computed) else copy.deepcopy(copies[other]).to(dtype)
            if model is discriminator:
                loss = discriminator_loss(low, read, real.to(dtype), noise.to(dtype))
            else:
                loss = generator_loss(low, read, noise.to(dtype))
            loss.backward()
            average_gradients(low, sharing)
            if low is not model:
                _give_gradients(low, model)
            optimizers[model].step()
            if low is not model:
                low.load_state_dict(model.state_dict())
            losses.append(loss.detach())
    return losses, generator, discriminator


def _give_gradients(low: nn.Module, master: nn.Module) -> None:
    for its, parameter in zip(low.parameters(), master.parameters(), strict=True):
        assert its.grad is not None
        parameter.grad, its.grad = its.grad.to(parameter.dtype), None


def generator_step(generator: nn.Module, discriminator: nn.Module, stage: int = 3, **options: Any) -> zerofx.Step:
    """A step on the eager backend, unless options differ, that trains a generator and reads a discriminator."""
    return zerofx.compile(
        generator, optimizer_of(generator), stage,
        forward=lambda model, noise: generator_loss(model, discriminator, noise), **{"backend": "eager", **options},
    )  # fmt: skip


def discriminator_step(discriminator: nn.Module, generator: nn.Module, stage: int = 3, **options: Any) -> zerofx.Step:
    """The other way round."""
    return zerofx.compile(
        discriminator, optimizer_of(discriminator), stage,
        forward=lambda model, real, noise: discriminator_loss(model, generator, real, noise),
        **{"backend": "eager", **options},
    )  # fmt: skip


def steps_of(generator: nn.Module, discriminator: nn.Module, **options: Any) -> tuple[zerofx.Step, zerofx.Step]:
    """Those of both."""
    return generator_step(generator, discriminator, **options), discriminator_step(discriminator, generator, **options)


def unlike_eager_mode(
    steps: int,
    stages: tuple[int, int],
    norm: bool = False,
    freezes: bool = False,
    away: Mapping[str, Any] | None = None,
    precisions: tuple[PrecisionWord | None, PrecisionWord | None] = (None, None),
    loss_scale: float | None = None,
    **options: Any,
) -> list[str]:
    """What of a training is not as in eager mode, in words: losses, parameters, buffers, and the peak of both steps.

    `stages` and `precisions` are the generator's and the other's. `away`: options with which the other has its
    parameters in a slower tier.
    """
    first, second = (None if precision is None else dtype_of(precision) for precision in precisions)
    sharing = options.get("mesh", {}).get("model", 1)
    expected, *plain = in_eager_mode(steps, norm=norm, freezes=freezes, dtypes=(first, second), sharing=sharing)
    generator, discriminator = models(norm=norm)
    own, others = (zerofx.Precision(word, loss_scale=loss_scale) for word in precisions)
    of_generator = generator_step(generator, discriminator, stages[0], precision=own, **options)
    of_discriminator = discriminator_step(
        discriminator, generator, stages[1], precision=others, **options, **(away or {})
    )
    losses = []
    for number, (real, noise) in enumerate(batches(steps, sharing=sharing)):
        if freezes:
            freeze(discriminator, number)
        losses += [of_discriminator(real, noise).clone(), of_generator(noise).clone()]
    # Ranks that share a computation add up in another order; what has next to no gradient Adam divides by itself, so
    # that a hundredth of an update is let through.
    near = functools.partial(torch.allclose, rtol=2e-5, atol=1e-4) if sharing > 1 else torch.equal
    near_loss = functools.partial(torch.allclose, rtol=2e-6, atol=0) if sharing > 1 else torch.equal
    pairs = enumerate(zip(expected, losses, strict=True))
    wrong = [f"loss {i} is {b}, not {a}" for i, (a, b) in pairs if not near_loss(a, b)]
    for model, step in zip(plain, (of_generator, of_discriminator), strict=True):
        found = step.full_state_dict()
        wrong += [f"{name} is another" for name, t in model.state_dict().items() if not near(t, found[name])]
    lent = [place for place, bucket in enumerate(of_generator.plan.buckets) if bucket.lent]
    if away and not {decision.bucket for decision in of_generator.plan.parameters} & set(lent):
        wrong.append("all that is read lies on the device")
    in_parts = [
        s for s in of_generator.plan.shardings if s.parameter.startswith("discriminator") and s.outputs != ("R",)
    ]
    if sharing > 1 and not in_parts:
        wrong.append("nothing that is read lies in parts")
    (real, noise), *_ = batches(1, sharing=sharing)
    for step, batch in ((of_generator, (noise,)), (of_discriminator, (real, noise))):
        measured, predicted = step.measure(*batch, num_steps=1).peak_bytes, step.plan.peak_bytes
        wrong += [] if measured == predicted else [f"{measured} are taken, not {predicted}"]
    for step in (of_generator, of_discriminator):
        step.close()
    return wrong


SLICES = {"first.weight": 2, "layers.1.0.weight": 3}


def unlike_eager_mode_with_slices(steps: int, stages: tuple[int, int], **options: Any) -> list[str]:
    """What of a generator's training is not as in eager mode, in words, where the step of the discriminator, which has
    trained once, has parameters in slices. `options` are the generator's."""
    generator, discriminator = models()
    own = copy.deepcopy(generator)
    step = generator_step(generator, discriminator, stages[0], **options)
    other = discriminator_step(discriminator, generator, stages[1], tile=SLICES)
    (real, noise), *_ = batches(1)
    other(real, noise)
    with other.full_parameters():
        read = copy.deepcopy(discriminator)
    optimizer, wrong = optimizer_of(own), []
    for _, noise in batches(steps):
        optimizer.zero_grad()
        expected = generator_loss(own, read, noise)
        expected.backward()
        average_gradients(own)
        optimizer.step()
        loss = step(noise)
        wrong += [] if torch.equal(loss, expected) else [f"a loss is {loss}, not {expected}"]
    found = step.full_state_dict()
    wrong += [f"{name} is another" for name, t in own.state_dict().items() if not torch.equal(t, found[name])]
    in_slices = sum(bucket.lent and "[" in bucket.name for bucket in step.plan.buckets)
    wrong += [] if in_slices == sum(SLICES.values()) else [f"{in_slices} slices are read"]
    measured, predicted = step.measure(noise, num_steps=1).peak_bytes, step.plan.peak_bytes
    wrong += [] if measured == predicted else [f"{measured} are taken, not {predicted}"]
    step.close()
    other.close()
    return wrong
