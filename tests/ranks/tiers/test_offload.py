"""Steps that offload activations: the same bits as without, and the bytes that were predicted, tier by tier."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import pytest
import torch

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES
from tests.lib.runs.offloads import offloading, prepare_case, recomputing, trains_and_holds_as_planned
from tests.lib.runs.training import differences, step_of, train_compiled, train_plain

pytestmark = pytest.mark.usefixtures("drive", "verified")

TIERS = {"host": ["host"], "nvme": ["nvme"], "both": ["host", "nvme"]}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("name", ["gpt", "batchnorm", "llama", "dropout"])
def test_training_is_the_same_to_the_bit(name: str, tiers: str) -> None:
    case = CASES[name]
    prepared = prepare_case(case, 0, 1)
    plan = offloading(prepared, prepared.plan, TIERS[tiers])
    assert plan.offloads
    assert not differences(train_plain(case, 4), train_compiled(case, 0, 4, plan=plan))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("name", ["gpt", "llama", "stack"])
def test_what_is_computed_again_reads_what_was_reloaded(name: str, near: bool) -> None:
    case = CASES[name]
    prepared = prepare_case(case, 0, 1)
    plan = offloading(prepared, recomputing(prepared), ["host", "nvme"], near=near)
    assert plan.offloads and plan.recomputes
    assert not differences(train_plain(case, 4), train_compiled(case, 0, 4, plan=plan))


def _on_a_rank(drive: str) -> list[str]:
    os.environ["ZEROFX_NVME_DIR"] = drive
    prepared = prepare_case(CASES["gpt"], 3, 2)
    return trains_and_holds_as_planned("gpt", 3, offloading(prepared, recomputing(prepared), ["host", "nvme"]))


def test_stage_3_on_two_ranks(drive: Path) -> None:
    assert run_ranks(_on_a_rank, 2, str(drive)) == [[], []]
    assert not list(drive.iterdir())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("tiers", TIERS)
def test_bytes_in_every_tier_are_those_predicted(tiers: str) -> None:
    prepared = prepare_case(CASES["gpt"], 0, 1)
    plan = offloading(prepared, prepared.plan, TIERS[tiers])
    step, args = step_of("gpt", plan=plan)
    kept, _ = step_of("gpt")
    found, without = step.measure(*args), kept.measure(*args)
    assert found.peak_bytes == {
        **step.plan.peak_bytes,
        "device": pytest.approx(step.plan.peak_bytes["device"], rel=0.001),
    }
    assert found.link_bytes == step.plan.link_bytes
    moved = sum(decision.num_bytes for decision in plan.offloads)
    assert found.link_bytes["to_host"] == found.link_bytes["to_device"] == moved
    nvme = sum(decision.num_bytes for decision in plan.offloads if decision.tier == "nvme")
    assert found.link_bytes.get("nvme_write", 0) == found.link_bytes.get("nvme_read", 0) == nvme
    assert found.peak_bytes["device"] < without.peak_bytes["device"] and set(without.peak_bytes) == {"device"}
    assert step.tiers() == kept.tiers()  # activations are all back between steps
    assert "peak on the host" in str(step)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_regions(drive: Path) -> None:
    case = CASES["gpt"]
    prepared = prepare_case(case, 0, 1)
    plan = offloading(prepared, prepared.plan, ["host", "nvme"])
    kept = train_compiled(case, 0, 3, backend="inductor")
    found = train_compiled(case, 0, 3, backend="inductor", plan=plan)
    # A copy may cut the region around the loss in two, and what is fused otherwise rounds otherwise.
    torch.testing.assert_close(found.losses, kept.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.state, kept.state, rtol=1e-4, atol=1e-5)
    step, args = step_of("gpt", plan=plan, backend="inductor")
    measured = step.measure(*args)
    assert measured.link_bytes == step.plan.link_bytes
    assert measured.peak_bytes["host"] == step.plan.peak_bytes["host"]
    assert measured.peak_bytes["device"] <= step.plan.peak_bytes["device"] * 1.001


def test_closing_removes_all_files(drive: Path) -> None:
    prepared = prepare_case(CASES["stack"], 0, 1)
    step, args = step_of("stack", plan=offloading(prepared, prepared.plan, ["nvme"]))
    step(*args)
    assert len(list(drive.glob("*/*.bin"))) > 0
    step.close()
    assert not list(drive.iterdir())


def test_nvme_without_a_folder_is_refused_before_anything_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROFX_NVME_DIR")
    prepared = prepare_case(CASES["stack"], 0, 1)
    step, args = step_of("stack", plan=offloading(prepared, prepared.plan, ["nvme"]))
    before = {name: value.data_ptr() for name, value in step.model.named_parameters()}
    with pytest.raises(zerofx.UsageError, match="set ZEROFX_NVME_DIR"):
        step(*args)
    assert before == {name: value.data_ptr() for name, value in step.model.named_parameters()}


def test_a_file_that_cannot_be_read_is_named(drive: Path) -> None:
    prepared = prepare_case(CASES["stack"], 0, 1)
    step, args = step_of("stack", plan=offloading(prepared, prepared.plan, ["nvme"]))
    step(*args)
    folder = next(path for path in drive.iterdir() if path.is_dir())
    for path in folder.iterdir():
        path.unlink()
        path.mkdir()
    with pytest.raises(zerofx.errors.TierError, match=rf"{folder}/\d+\.bin, found that they could not be") as caught:
        step(*args)
    assert any("nothing had been updated yet" in note for note in caught.value.__notes__)
    del caught
    gc.collect()  # what the error's frames held
    for path in folder.iterdir():
        path.rmdir()
    with pytest.raises(zerofx.errors.TierError, match="step 2 failed on rank 0"):  # what is on the drive is not known
        step(*args)
