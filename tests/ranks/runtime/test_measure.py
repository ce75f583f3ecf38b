"""What a plan predicts is what is measured: allocations to the byte, and bytes on the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.distributed import run_ranks
from zerofx.choices import PrecisionWord
from zerofx.runtime.measure.measure import Measurement, persistent_bytes

# Small things that operators keep to themselves are not predicted; with these shapes there is next to nothing.
TOLERANCE = 0.001


def gpt_step(stage: int, precision: PrecisionWord | None = None) -> tuple[zerofx.Step, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = GPT(vocab=64, dim=32, depth=3, heads=4, block=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = zerofx.compile(model, optimizer, stage, precision=precision, backend="eager")
    return step, (torch.randint(64, (2, 16)), torch.randint(64, (2, 16)))


def conv_step(stage: int) -> tuple[zerofx.Step, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.Flatten(),
        nn.Linear(64 * 16, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    step = zerofx.compile(model, optimizer, stage, loss_fn=lambda y, x, target: F.mse_loss(y, target), backend="eager")
    return step, (torch.randn(16, 16, 16, 16), torch.randn(16, 4))


def llama_step(stage: int) -> tuple[zerofx.Step, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    step = zerofx.compile(model, torch.optim.AdamW(model.parameters()), stage, backend="eager")
    ids = torch.randint(64, (2, 32))
    return step, {"input_ids": ids, "labels": ids.clone()}


def test_a_measurement_says_in_words_what_it_is() -> None:
    measured = Measurement({"device": 3 * 2**20, "host": 2**30}, 2**20, 2**10, 0.012, 0.002, 3, between_seconds=1e-4)
    assert str(measured).splitlines() == [
        "per rank                                   measured, 3 steps",
        "---------------------------------------  -------------------",
        "peak on the device                                   3.0 MiB",
        "peak on the host                                     1.0 GiB",
        "time of a step                                      12.00 ms",
        "waits for communication                              2.00 ms",
        "neither computes nor waits                            100 µs",
        "sent in a step                                       1.0 KiB",
        "parameters, gradients, optimizer states              1.0 MiB",
    ]


def check(step: zerofx.Step, found: Measurement) -> None:
    plan = step.plan
    assert found.peak_bytes["device"] == pytest.approx(plan.peak_bytes["device"], rel=TOLERANCE)
    assert found.wire_bytes == plan.wire_bytes
    assert found.model_state_bytes == plan.model_state_bytes
    assert found.step_seconds > found.exposed_seconds >= 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("make", [gpt_step, conv_step])
def test_one_rank(make: object) -> None:
    assert callable(make)
    step, batch = make(0)
    check(step, step.measure(*batch))


@pytest.mark.days(3)
def test_llama() -> None:
    step, batch = llama_step(0)
    check(step, step.measure(**batch))


def _measure_on_ranks() -> list[tuple[int, int]]:
    taken = []
    for stage in (0, 3):
        step, batch = gpt_step(stage)
        found = step.measure(*batch, num_steps=2)
        # What ranks tell each other before a step's first collective is no part of the plan.
        assert found.peak_bytes["device"] == pytest.approx(step.plan.peak_bytes["device"], rel=TOLERANCE, abs=4096)
        assert found.wire_bytes == step.plan.wire_bytes > 0
        assert found.model_state_bytes == step.plan.model_state_bytes
        assert 0 < found.exposed_seconds < found.step_seconds
        # Slices that the ranks of a host read where they lie count as sent, but nothing moves them.
        gathers = [row for row in step.schedule().rows if row.op == "all_gather"]
        moved = found.wire_bytes - (sum(row.wire_bytes for row in gathers) if "in_place=True" in step.source else 0)
        assert (moved < found.wire_bytes) == (stage == 3)
        use = found.streams["collective"]
        assert use.num_bytes == moved and 0 < use.busy_seconds < found.step_seconds
        made = found.transfers["collective"]
        assert sum(one.num_bytes for one in made) == moved  # of the one step that the profiler left alone
        assert all(one.seconds > 0 for one in made)
        taken.append((found.wire_bytes, found.model_state_bytes))
    return taken


@pytest.mark.days(3)
def test_two_ranks() -> None:
    first, second = run_ranks(_measure_on_ranks, 2)
    assert first == second


def test_what_runs_between_regions_is_told_from_them(tmp_path: Path) -> None:
    step, batch = gpt_step(0)
    step(*batch)
    quick = step.measure(*batch, num_steps=3)
    assert 0 < quick.between_seconds < 0.2  # which the step below sleeps
    head, last = step.source.rsplit("\n    return ", 1)
    path = tmp_path / "step.py"
    path.write_text(f"import time\n{head}\n    time.sleep(0.2)\n    return {last}")
    step.load_source(path)
    slow = step.measure(*batch, num_steps=3)
    assert slow.between_seconds >= 0.2
    assert sum(slow.region_seconds.values()) < 0.2


def test_measuring_trains_that_many_steps() -> None:
    step, batch = gpt_step(0)
    step(*batch)
    before = step.full_state_dict()
    assert step.measure(*batch, num_steps=1).num_steps == 1
    assert step.num_steps == 2
    after = step.full_state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    other, _ = gpt_step(0)
    for _ in range(2):
        other(*batch)
    expected = other.full_state_dict()
    assert all(torch.equal(expected[name], after[name]) for name in expected)


def test_a_step_is_measured_at_least_once() -> None:
    step, batch = gpt_step(0)
    with pytest.raises(zerofx.UsageError, match="num_steps to be how often to measure a step, 1 or more, found 0"):
        step.measure(*batch, num_steps=0)


def test_persistent_bytes_counts_memory_once() -> None:
    base = torch.zeros(100)
    values = [base[10:20], base[15:40], base[60:70], base.view(10, 10)[6], torch.zeros(0), 3.0]
    assert persistent_bytes(values) == 4 * (30 + 10)
