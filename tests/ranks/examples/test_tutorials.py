"""The tutorials' scripts run in miniature, and what their pages show is what runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.lib.checkout import ROOT
from tests.lib.scripts import run_script

SCRIPTS = ROOT / "examples" / "tutorials"
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_lines_of_the_script_that_it_names(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`?(examples/[\w/]+\.(?:py|sbatch))`?", text)
    shown = "".join((ROOT / name).read_text(encoding="utf-8") for name in dict.fromkeys(named))
    blocks = re.findall(r"^```(?:python|bash)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        assert block in shown, f"no script of {page.name} has\n{block}"


def test_every_script_has_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    scripts = {path.name for path in SCRIPTS.iterdir() if path.is_file()} - {"small_llama.py"}
    assert {name for name in scripts if f"tutorials/{name}" not in text} == set()


@pytest.mark.days(3)
def test_first_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run_script(SCRIPTS / "first_plan.py", "--layers", "1", "--budgets", "1GB", "64GB")
    assert "1GB: memory_budget=953.7 MiB cannot be met: the least possible is" in printed
    assert re.search(r"64GB: peak \d\.\d GiB, step \d+ ms", printed), printed
    assert "predicted, per rank: peak" in printed and "bucket model.layers.0" in printed
    assert "<html" in Path("plan.html").read_text(encoding="utf-8")


def test_finetune_8b_goes_on_and_saves_a_model_that_opens(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    options = ("--backend", "eager", "--memory-budget", "2.6MiB", "--output", str(tmp_path))
    printed = run_script(SCRIPTS / "finetune_8b.py", *options, "--steps", "2")
    assert "step 1: loss" in printed and "step 2: loss" in printed
    assert re.search(r"peak on the device +2\.6 MiB +2\.6 MiB \(", printed), printed
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_both_forms_of_a_loop_have_the_same_losses() -> None:
    losses = {}
    for system in ("fsdp2", "zerofx"):
        printed = run_script(SCRIPTS / "from_fsdp2.py", "--with", system, "--steps", "3", num_ranks=2)
        line = next(line for line in printed.splitlines() if line.startswith(system))
        losses[system] = [float(loss) for loss in line.split()[1:]]
    assert losses["zerofx"][:3] == losses["fsdp2"][:3]


def test_a_deepspeed_config_trains(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    printed = run_script(SCRIPTS / "from_deepspeed.py", "--config", str(file), "--steps", "2", num_ranks=2)
    assert "stage 2 on 2 ranks, 2 micro-batches, fp16" in printed and printed.count("step 1: loss") == 2, printed


def test_a_deepspeed_key_without_an_option_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1, "fancy": True}, "curriculum_learning": {}}))
    with pytest.raises(AssertionError, match=r"no option of .* for curriculum_learning, zero_optimization\.fancy"):
        run_script(SCRIPTS / "from_deepspeed.py", "--config", str(file))


@pytest.mark.days(3)
def test_dpo(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    printed = run_script(SCRIPTS / "dpo.py", "--steps", "2", "--backend", "eager", "--output", str(tmp_path))
    assert "rewards/margins" in printed and "peak on the device" in printed, printed


@pytest.mark.days(3)
def test_two_nodes_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    options = ("--backend", "eager", "--every", "2", "--output", str(tmp_path))
    printed = run_script(SCRIPTS / "two_nodes.py", *options, "--steps", "2", num_ranks=2, num_nodes=2)
    assert "stage 3 on 2 ranks (replicate 2)" in printed and "step 2: loss" in printed, printed
    printed = run_script(SCRIPTS / "two_nodes.py", *options, "--steps", "3", num_ranks=2, num_nodes=1)
    assert "step 3: loss" in printed and "step 2: loss" not in printed, printed
