"""Products in fp8 where ranks share one computation: scales of whole factors, products of what each rank has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.fp8 import RECIPES, batches, build, compile_in_fp8, convert, fast_in_fp8, loss_of, optimizer_of
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import world
from zerofx.choices import Fp8Recipe
from zerofx.scheduler.cost.machine import Machine

STEPS = 3
Values = tuple[list[Tensor], dict[str, Tensor]]
Linear = Callable[[Tensor, Tensor, str], Tensor]


def _sharing() -> Machine:
    """A machine on which ranks share what they can, and multiply in fp8 whatever they can."""
    return replace(SHARING, device=replace(SHARING.device, peak=fast_in_fp8().device.peak))


class Block(nn.Module):
    """A product whose weight ranks have by columns, and one by rows, next to what goes around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)
        self.linear: Linear | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.linear is None:
            narrow: Tensor = self.down(F.gelu(self.up(x)))
            return x + narrow
        return x + self.linear(F.gelu(self.linear(x, self.up.weight, "column")), self.down.weight, "row")


class Net(nn.Module):
    """Two of them, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def _build() -> Net:
    torch.manual_seed(0)
    return Net().bfloat16()


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(32, 64, generator=generator).bfloat16() for _ in range(STEPS)]


def _train(model: nn.Module) -> Values:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for x in _inputs():
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    whole = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in model.named_parameters()}
    return losses, {name: value.detach().clone() for name, value in whole.items()}


def _train_shared(recipe: Fp8Recipe, **options: Any) -> Values:
    model = _build()
    step = zerofx.compile(
        model, torch.optim.SGD(model.parameters(), 0.1), backend="eager", machine=_sharing(), mesh={"model": 2},
        precision=zerofx.Precision(fp8=recipe), shardings={"*.up": "column", "*.down": "row"}, **options,
    )  # fmt: skip
    losses = [step(x).clone() for x in _inputs()]
    with step.full_parameters():
        values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gives = [each.gives for each in step.plan.products if each.in_fp8]
    assert len(gives) == (7 if recipe == "rowwise_with_gw_hp" else 11), gives  # no gradient of the batch
    step.close()
    return losses, values


def _scale(values: Tensor, dtype: torch.dtype, dim: int | None, recipe: str) -> Tensor:
    largest = values.abs().max() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / largest.double().clamp(min=1e-12)).float()
    return scale if recipe == "tensorwise" else scale.log2().floor().exp2()


def _multiply(left: Tensor, right: Tensor, recipe: str, parts_of: str, gradient: int | None = None) -> Tensor:
    """A product as two ranks have it: of two parts of the casts of whole factors, along the inner size or another.

    ``gradient``: which factor is one.
    """
    casts, scales = list[Tensor](), list[Tensor]()
    for number, (values, dim) in enumerate(((left, 1), (right, 0))):
        dtype = torch.float8_e5m2 if recipe == "tensorwise" and number == gradient else torch.float8_e4m3fn
        is_whole = recipe == "tensorwise" or (recipe == "rowwise_with_gw_hp" and (number, gradient) == (1, 0))
        scale, largest = _scale(values, dtype, None if is_whole else dim, recipe), torch.finfo(dtype).max
        casts.append((values.float() * scale).clamp(-largest, largest).to(dtype))
        scales.append(scale)
    dims = {"inner": (1, 0), "rows": (0, None), "columns": (None, 1)}[parts_of]
    is_scaled_after = recipe != "tensorwise" and gradient is not None
    parts = []
    for part in range(2):
        low, inverse = [], []
        for cast, scale, cut in zip(casts, scales, dims, strict=True):
            low.append(cast if cut is None else cast.chunk(2, cut)[part])
            is_split = cut is not None and scale.dim() == 2 and scale.shape[cut] > 1
            inverse.append((scale.chunk(2, cut or 0)[part] if is_split else scale).reciprocal().contiguous())
        left, right = [torch.ones(()), torch.ones(())] if is_scaled_after else inverse
        product = torch._scaled_mm(
            low[0].contiguous(), low[1].t().contiguous().t(), left, right, out_dtype=torch.bfloat16,
            use_fast_accum=gradient is None,
        )  # fmt: skip
        parts.append((product * (inverse[0] * inverse[1])).bfloat16() if is_scaled_after else product)
    if parts_of == "inner":
        return parts[0] + parts[1]
    return torch.cat(parts, 0 if parts_of == "rows" else 1)


class _InParts(torch.autograd.Function):
    """A linear layer in fp8 as two ranks have it, that have the weight by columns or by rows of the product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str, lies: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.lies = recipe, lies
        return _multiply(x, weight.t(), recipe, "columns" if lies == "column" else "inner")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        by_columns = ctx.lies == "column"
        of_input = _multiply(gradient, weight, ctx.recipe, "inner" if by_columns else "columns", 0)
        if ctx.recipe == "rowwise_with_gw_hp":
            of_weight = gradient.t() @ x
        else:
            of_weight = _multiply(gradient.t(), x, ctx.recipe, "rows" if by_columns else "columns", 0)
        return of_input, of_weight, None, None


def _train_in_parts(recipe: str) -> Values:
    """By hand, on one process."""
    model = _build()
    for layer in model.layers:
        assert isinstance(layer, Block)
        layer.linear = lambda x, weight, lies: _InParts.apply(x, weight, recipe, lies)  # type: ignore[no-untyped-call]
    return _train(model)


def _train_by_torchao() -> Values:
    """With torchao's own layers of tensor parallelism, in eager mode on these ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    model, mesh = convert(_build(), "tensorwise"), init_device_mesh("cpu", (2,))
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, {"up": Float8ColwiseParallel(), "down": Float8RowwiseParallel()})
    return _train(model)


def _unlike(expected: Values, trained: Values) -> list[str]:
    """Losses, which each rank sums a part of, are alike; parameters are the same."""
    torch.testing.assert_close(trained[0], expected[0], rtol=1e-6, atol=0)
    return [name for name, value in expected[1].items() if not torch.equal(value, trained[1][name])]


RUNS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 3": {"stage": 3},
    "stage 3, computed again": {"stage": 3, "recompute": "full"},
    "stage 3, nothing ahead": {"stage": 3, "prefetch": 0},
}


def _compare(by_hand: bool) -> dict[str, list[str]]:
    wrong = {}
    for recipe in RECIPES if by_hand else RECIPES[:1]:
        expected = _train_in_parts(recipe) if by_hand else _train_by_torchao()
        for label, options in RUNS.items() if by_hand else [("stage 3", RUNS["stage 3"])]:
            wrong[f"{recipe}, {label}"] = _unlike(expected, _train_shared(recipe, **options))
    return {label: unlike for label, unlike in wrong.items() if unlike}


@pytest.mark.slow
def test_ranks_multiply_their_parts_of_the_casts_of_whole_factors() -> None:
    for rank, wrong in enumerate(run_ranks(_compare, 2, True)):
        assert wrong == {}, f"rank {rank}"


def test_the_bits_are_those_of_tensor_parallelism_of_torchao() -> None:
    pytest.importorskip("torchao", reason="its layers are trained in parts too, where it is installed")
    for rank, wrong in enumerate(run_ranks(_compare, 2, False)):
        assert wrong == {}, f"rank {rank}"


def _train_llama(recipe: Fp8Recipe) -> dict[str, Any]:
    """Losses of torchao's layers, and of ranks that share the model at two stages, with bytes above the plan's peak."""
    (rank, _), found = world(), dict[str, Any]()
    for label, options in {"stage 0": {"stage": 0}, "stage 3": {"stage": 3}}.items():
        model = build("llama")
        step = compile_in_fp8("llama", recipe, model, machine=_sharing(), mesh={"shard": 2, "model": 2}, **options)
        each = list(batches("llama", rank // 2, STEPS))
        found[label] = [float(loss_of(step(*args, **kwargs))) for args, kwargs in each]
        found[f"{label}, products"] = sum(decision.in_fp8 for decision in step.plan.products)
        measured = step.measure(*each[0][0], **each[0][1]).peak_bytes["device"]
        found[f"{label}, above"] = measured - step.plan.peak_bytes["device"]
        step.close()
    losses = []
    if recipe == "rowwise":
        plain = convert(build("llama"), recipe)
        optimizer = optimizer_of(plain)
        for args, kwargs in batches("llama", rank // 2, STEPS):
            optimizer.zero_grad()
            loss = loss_of(plain(*args, **kwargs))
            loss.backward()
            for parameter in plain.parameters():
                assert parameter.grad is not None
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= 4
            optimizer.step()
            losses.append(float(loss.detach()))
    return {**found, "torchao": losses}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_model_of_transformers_trains_so_next_to_data_parallel_ranks(recipe: Fp8Recipe) -> None:
    pytest.importorskip("torchao", reason="its layers are trained next to it")
    for found in run_ranks(_train_llama, 4, recipe):
        assert found["stage 0"] == found["stage 3"]
        assert found["stage 0, products"] > 30 and found["stage 0, above"] == found["stage 3, above"] == 0
        if found["torchao"]:
            assert found["torchao"] == pytest.approx(found["stage 3"], rel=0.01)
