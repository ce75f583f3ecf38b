"""Steps on a GPU train the bits of eager mode, also where copies run on streams of their own, in the memory planned."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.devices import deterministic, moved
from tests.lib.models import CASES, Case
from tests.lib.runs.training import Trained, differences, train_compiled, train_plain, without_key_biases
from zerofx.scheduler.plan.plan import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")]

DEVICE = torch.device("cuda")
VOCAB, BLOCK = 512, 128


def _tokens(generator: torch.Generator) -> Any:
    ids = torch.randint(VOCAB, (8, BLOCK + 1), generator=generator)
    return (ids[:, :-1], ids[:, 1:]), {}


LARGER = Case(lambda: GPT(VOCAB, dim=256, depth=6, heads=4, block=BLOCK), _tokens, steps=4)


@pytest.mark.parametrize(
    "name", ["gpt", "tied", "batchnorm", "dropout", "buffers", "param groups", "mixed dtypes", "llama"]
)
def test_bits_are_those_of_eager_mode(name: str) -> None:
    case = moved(CASES[name], DEVICE)
    with deterministic():
        assert differences(train_plain(case, 6), train_compiled(case, 3, 6)) == []


@pytest.mark.parametrize("name", ["gpt", "batchnorm", "llama"])
def test_compiled_regions_train_alike(name: str) -> None:
    # Adam divides a gradient that is nothing but rounding, of a bias before a norm or of keys, by itself.
    case = replace(moved(CASES[name], DEVICE), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    with deterministic():
        trained = train_compiled(case, 3, 6, backend="inductor")
        assert differences(train_plain(case, 6), trained, tolerance=1e-3) == []
        assert differences(trained, train_compiled(case, 3, 6, backend="inductor")) == []


def _within(share: float, **options: Any) -> tuple[Trained, bool]:
    """Training within a share of what the step takes without a budget, and whether the host updates some of it."""
    case = moved(LARGER, DEVICE)
    batch = case.batch(torch.Generator())[0]

    def planned(**asked: Any) -> Plan:
        model = case.model()
        with contextlib.closing(
            zerofx.compile(model, case.optimizer(model), example_batch=batch, backend="eager", **asked)
        ) as step:
            return step.plan

    budget = int(share * planned().peak_bytes["device"])
    on_host = any(decision.update == "host" for decision in planned(memory_budget=budget, **options).states)
    return train_compiled(case, 3, memory_budget=budget, **options), on_host


@pytest.mark.parametrize(
    "options",
    [
        {"offload": "none"},
        {"offload": "host", "recompute": "none", "tile": "none"},
        {"offload": "nvme", "recompute": "none", "tile": "none"},
        {"offload": "auto", "precision": "bf16"},
    ],
    ids=lambda options: ", ".join(map(str, options.values())),
)
def test_what_leaves_the_device_comes_back_the_same(options: dict[str, Any], drive: Path) -> None:
    share = 0.9 if options["offload"] == "none" else 0.7
    free = {key: value for key, value in options.items() if key == "precision"}
    with deterministic():
        expected = train_compiled(moved(LARGER, DEVICE), 3, **free)
        trained, on_host = _within(share, **options)
    # The host's vector instructions round an update otherwise than the device's kernel.
    tolerance = 1e-4 if on_host else 0.0
    assert differences(without_key_biases(expected), without_key_biases(trained), tolerance) == []


@pytest.mark.parametrize("share", [None, 0.7])
def test_an_arena_reserves_what_is_planned_and_changes_no_bits(share: float | None) -> None:
    case = replace(moved(LARGER, DEVICE), steps=3)
    with deterministic():
        expected = train_compiled(case, 3, backend="inductor")
        assert differences(expected, train_compiled(case, 3, backend="inductor", arena=True)) == []
    batch = (torch.randn(4096, 1024, device=DEVICE),)
    batch[0] @ batch[0].T  # what libraries keep from their first use on
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    model = _layers().to(DEVICE)

    def compiled(**options: Any) -> zerofx.Step:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return zerofx.compile(
            model, optimizer, loss_fn=_mean_square, example_batch=batch, backend="inductor", arena=True, **options
        )

    step = compiled()
    if share is not None:
        budget = int(share * step.plan.peak_bytes["device"])
        step.close()
        step = compiled(memory_budget=budget)
        assert step.plan.peak_bytes["device"] <= budget
    for _ in range(3):
        step(*batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(*batch)
    reserved = torch.cuda.max_memory_reserved() - before + batch[0].nbytes
    assert reserved == pytest.approx(step.plan.peak_bytes["device"], rel=0.01)
    step.close()


def _layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8)))


def _mean_square(y: Tensor, x: Tensor) -> Tensor:
    return y.square().mean()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("share", [None, 0.7, 0.5])
def test_peaks_are_those_predicted(backend: Any, share: float | None) -> None:
    model = _layers().to(DEVICE)
    batch = (torch.randn(4096, 1024, device=DEVICE),)
    compile_step = partial(
        zerofx.compile, model, torch.optim.AdamW(model.parameters(), fused=True), loss_fn=_mean_square,
        example_batch=batch, backend=backend,
    )  # fmt: skip
    step = compile_step()
    if share is not None:
        budget = int(share * step.plan.peak_bytes["device"])
        step.close()
        step = compile_step(memory_budget=budget)
    step(*batch)
    step(*batch)
    predicted, measured = step.plan.peak_bytes["device"], step.measure(*batch).peak_bytes["device"]
    assert 0.98 * predicted <= measured <= 1.02 * predicted
