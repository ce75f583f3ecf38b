"""A step with products in fp8 next to everything else that a step does: evaluations, other shapes, checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.lib.runs.fp8 import RECIPES, VOCABULARY, batches, build, compile_in_fp8, convert, loss_of, optimizer_of
from zerofx.choices import Fp8Recipe
from zerofx.driver.opt import phase_passes, rewrite
from zerofx.driver.plan_only import graph_to_save


def _batch(kind: str = "gpt", rows: int = 4, number: int = 0) -> tuple[Any, ...]:
    args, kwargs = next(itertools.islice(batches(kind, number, 1, rows), 1))
    return (*args, *kwargs.values())


def _products(step: Any) -> set[tuple[str, str]]:
    return {(each.weight, each.gives) for each in step.plan.products if each.in_fp8}


def _needs_torchao() -> None:
    pytest.importorskip("torchao", reason="its layers with products in fp8 are trained, where it is installed")


@pytest.mark.days(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_peak_is_as_planned_and_the_source_says_what_is_multiplied(recipe: Fp8Recipe) -> None:
    step = compile_in_fp8("gpt", recipe, build("gpt"))
    batch = tuple(tensor.clone() for tensor in _batch())
    step(*batch)
    assert step.measure(*batch).peak_bytes == step.plan.peak_bytes
    assert "zerofx.fp8_scale.default(" in step.source and "aten._scaled_mm.default(" in step.source
    assert f"products in fp8 ({recipe})" in str(step.plan)
    step.close()


def _check_losses(step: zerofx.Step, plain: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps have the losses of a plain model; the step is closed."""
    for number in range(2):
        batch = _batch(number=number)
        optimizer.zero_grad()
        loss = plain(*batch)
        loss.backward()
        optimizer.step()
        assert torch.equal(step(*batch), loss.detach())
    step.close()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_in_float32_has_the_bits_of_torchao_too(recipe: Fp8Recipe) -> None:
    _needs_torchao()
    plain = convert(build("gpt", torch.float32), recipe)
    optimizer = optimizer_of(plain)
    model = build("gpt", torch.float32)
    step = compile_in_fp8("gpt", recipe, model)
    _check_losses(step, plain, optimizer)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.days(3)
def test_a_number_of_micro_batches_that_a_plan_chooses_has_the_bits_of_one_that_is_asked_for() -> None:
    batch, losses = _batch(rows=8), []
    given: dict[str, Any] = {"recompute": "none", "offload": "none", "tile": "none"}
    half = compile_in_fp8("gpt", "rowwise", build("gpt"), accumulate=2, **given)
    half.prepare(*batch)
    given["memory_budget"] = half.plan.peak_bytes["device"]
    half.close()
    num: Any = "auto"
    for _ in range(2):
        step = compile_in_fp8("gpt", "rowwise", build("gpt"), accumulate=num, **given)
        losses.append([step(*batch).clone() for _ in range(2)])
        num = step.plan.num_micro_batches
        assert num > 1 and _products(step)
        step.close()
    assert losses[0] == losses[1]


class _Checkpointed(nn.Module):
    """Layers whose forward eager mode runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)])
        self.head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), y.flatten())


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_that_are_checkpointed_have_the_bits_of_torchao_too(recipe: Fp8Recipe) -> None:
    _needs_torchao()
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(_Checkpointed().bfloat16())
    plain, model = convert(models[0], recipe), models[1]
    optimizer, step = optimizer_of(plain), compile_in_fp8("gpt", recipe, model)
    _check_losses(step, plain, optimizer)


@pytest.mark.days(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_in_float16_a_loss_is_scaled_and_falls_as_in_bfloat16(recipe: Fp8Recipe) -> None:
    losses = []
    for precision in (zerofx.Precision("fp16", fp8=recipe, loss_scale=128.0), zerofx.Precision("bf16", fp8=recipe)):
        step = compile_in_fp8("gpt", recipe, build("gpt", torch.float32), precision=precision)
        losses.append([float(step(*_batch())) for _ in range(3)])
        step.close()
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0][-1] < losses[0][0]


def test_masters_in_float32_are_updated_as_those_of_layers_of_torchao() -> None:
    _needs_torchao()
    losses: list[list[Tensor]] = []
    for converted in (False, True):
        model = build("gpt", torch.float32)
        precision = "bf16" if converted else "fp8"
        step = compile_in_fp8("gpt", "rowwise", convert(model, "rowwise") if converted else model, precision=precision)
        losses.append([step(*_batch(number=number)).clone() for number in range(3)])
        assert all(bucket.dtype == "torch.float32" for bucket in step.plan.buckets)
        step.close()
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:a batch of another shape:zerofx.ZeroFXNotice")
def test_evaluations_and_batches_of_other_shapes_have_the_same_products_in_fp8() -> None:
    _needs_torchao()
    plain, model = convert(build("llama"), "rowwise"), build("llama")
    optimizer, step = optimizer_of(plain), compile_in_fp8("llama", "rowwise", model)
    step.prepare(**next(batches("llama", 0, 1))[1])
    first: set[tuple[str, str]] = set()
    for rows in (4, 2, 3):
        args, kwargs = next(batches("llama", rows, 1, rows))
        with torch.no_grad():
            expected = loss_of(plain.eval()(*args, **kwargs))
        assert torch.equal(loss_of(step.evaluate(*args, **kwargs)), expected)
        optimizer.zero_grad()
        loss = loss_of(plain.train()(*args, **kwargs))
        loss.backward()
        optimizer.step()
        assert torch.equal(step(*args, **kwargs), loss.detach())
        first = first or _products(step)
        assert _products(step) == first
    step.close()


@pytest.mark.filterwarnings("ignore:a batch of another shape:zerofx.ZeroFXNotice")
def test_a_shape_that_cuda_has_not_leaves_what_the_first_one_has_in_fp8() -> None:
    step = compile_in_fp8("gpt", "rowwise", build("gpt"))
    step(*_batch(rows=4))
    first = _products(step)
    step(*(tensor[:, :7].contiguous() for tensor in _batch(rows=4)))  # 28 tokens: 16 does not divide them
    assert _products(step) == {(name, gives) for name, gives in first if gives != "weight gradient"}
    reasons = {each.reason for each in step.plan.products if each.gives == "weight gradient" and not each.in_fp8}
    assert "K = 28 of 32 x 28 x 128 is no multiple of 16" in reasons
    step.close()


def test_a_checkpoint_goes_on_with_the_bits_of_a_run_that_was_not_stopped(tmp_path: Path) -> None:
    model = build("gpt")
    step = compile_in_fp8("gpt", "tensorwise", model)
    step(*_batch())
    step.save_checkpoint(tmp_path / "saved")
    expected = step(*_batch(number=1)).clone()
    step.close()
    again = build("gpt")
    step = compile_in_fp8("gpt", "tensorwise", again, example_batch=_batch())
    step.load_checkpoint(tmp_path / "saved")
    assert torch.equal(step(*_batch(number=1)), expected)
    step.close()


def test_a_step_that_is_kept_and_loaded_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    losses, texts = [], []
    for _ in range(2):
        step = compile_in_fp8("gpt", "rowwise", build("gpt"))
        losses.append(step(*_batch()).clone())
        texts.append((step.source, step.stages[0].text, str(step.plan)))
        step.close()
    assert torch.equal(*losses) and texts[0] == texts[1]
    assert "fp8_cast" in texts[0][1]


def test_a_plan_that_was_made_before_is_carried_out() -> None:
    given: dict[str, Any] = {"stage": 3}
    step = compile_in_fp8("gpt", "rowwise", build("gpt"), **given)
    expected, plan = step(*_batch()).clone(), step.plan
    step.close()
    step = compile_in_fp8("gpt", "rowwise", build("gpt"), plan=plan, **given)
    assert torch.equal(step(*_batch()), expected)
    assert step.plan.products == plan.products
    model = build("gpt")
    saved = graph_to_save(model, optimizer_of(model), _batch(), plan, machine=plan.machine, backend="eager")
    texts: list[str] = []
    rewrite(saved, phase_passes("prepare", plan, saved), plan, lambda name, text, _: texts.append(text))
    assert texts[-1] == step.stages[0].text
    step.close()
