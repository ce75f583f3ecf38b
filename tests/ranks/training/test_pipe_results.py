"""What steps in stages give, and options, are as on one process; ranks of the axis ``model`` share stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.fp8 import fast_in_fp8
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.stages import MODELS, Run, check_runs, count_labels, train_runs, with_logits
from zerofx import LossScale, Precision

TURNS, FIRST, ALL = ("order", "micro-batch"), ("order", "layer"), ("outputs", "all")
GIVING = [
    Run("telling", {"pipe": 2}, 8, (ALL, TURNS), steps=2),
    Run("telling", {"pipe": 2}, 5, (ALL, FIRST), steps=2),
    Run("gpt2", {"pipe": 2}, 6, (ALL, TURNS), steps=2),
    Run("gpt", {"pipe": 2}, 3, (("forward", with_logits), TURNS), steps=2),
]
FP16 = ("precision", Precision("fp16", loss_scale=LossScale(2.0**18)))  # of which the first steps are left out
WITH_OPTIONS = [
    Run("tagger", {"pipe": 2}, 3, (("lengths", (8, 16)), ("loss_terms", count_labels)), steps=6),
    Run("gpt", {"pipe": 2}, 4, (FP16, TURNS), steps=6),
    Run("dropout", {"pipe": 2}, 2, (FP16, ("max_grad_norm", 0.1), ("grad_norms", True), FIRST), steps=6),
    Run("gpt", {"pipe": 2}, 3, (("average", zerofx.EMA(0.9)), ("grad_norms", True)), steps=3),
    Run("gpt", {"pipe": 2}, 4, (("delayed_update", 2),), steps=5),
    Run("gpt", {"pipe": 2}, 4, (("machine", fast_in_fp8()), ("precision", "fp8"), TURNS), steps=3),
    Run("gpt", {"pipe": 2}, 3, steps=3, optimizer="Adafactor"),
    Run("matrices", {"pipe": 2}, 3, steps=3, optimizer="Muon"),
]
SHARED = (("machine", SHARING), ("reduce", "once"), ("max_grad_norm", 0.1))


@pytest.mark.days(3)
@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_stages_give_what_one_process_gives(num_stages: int) -> None:
    runs = [replace(run, mesh={"pipe": num_stages}) for run in GIVING]
    check_runs(runs, num_stages, [train_runs([run.on(None) for run in runs])])


@pytest.mark.days(3)
def test_options_do_in_stages_what_they_do_on_one_process(tmp_path: Path) -> None:
    torch.manual_seed(7)
    save_model(MODELS["gpt2"](), str(tmp_path / "gpt2.safetensors"))
    runs = [*WITH_OPTIONS, Run("gpt2", {"pipe": 2}, 2, (("weights", tmp_path / "gpt2.safetensors"),), steps=2)]
    check_runs(runs, 2, [train_runs([run.on(None) for run in runs])])


@pytest.mark.days(3)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_ranks_that_share_a_computation_share_its_stages(stage: int) -> None:
    options = (("stage", stage), *SHARED)
    runs = [
        Run("dropout", {"pipe": 2, "model": 2}, 6, (*options, TURNS), 3),
        Run("gpt2", {"pipe": 2, "model": 2}, 3, (*options, FIRST), 3),
        Run("telling", {"pipe": 2, "model": 2}, 8, (*options, ALL, TURNS), 2),
    ]
    check_runs(runs, 4, run_ranks(train_runs, 2, [run.on({"model": 2}) for run in runs]))


@pytest.mark.slow
def test_ranks_with_batches_of_their_own_share_stages() -> None:
    runs = [Run(model, {"pipe": 2, "shard": 2, "model": 2}, 3, SHARED, 3) for model in ("dropout", "llama")]
    check_runs(runs, 8, run_ranks(train_runs, 4, [run.on({"shard": 2, "model": 2}) for run in runs]))
