"""The examples run as a reader would run them, for a few steps only."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.lib.checkout import ROOT
from tests.lib.distributed import PATIENCE_SECONDS
from tests.lib.scripts import run_script


def run(script: str, *options: str, processes: int = 1) -> str:
    """What `script` of examples/ prints; fails with all that it printed if it ends in an error."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(ROOT / "examples" / script), *options]
    # An installed zerofx is not needed: the examples find the one of this checkout.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_forked(script: str, *options: str, processes: int = 1) -> str:
    """What `script` prints where neither a launcher nor each process imports torch: at night torchrun starts it."""
    return run_script(ROOT / "examples" / script, *options, num_ranks=processes)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_train_gpt(processes: int) -> None:
    printed = run_forked("train_gpt.py", "--steps", "3", "--backend", "eager", processes=processes)
    for line in ("validation loss", "unigram entropy", "predicted peak", "measured peak", "generated step"):
        assert printed.count(line) == 1, printed


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_train_gpt_learns(processes: int) -> None:
    printed = run("train_gpt.py", "--steps", "100", processes=processes)
    learned, ignorant = (
        next(float(line.split()[2]) for line in printed.splitlines() if line.startswith(name))
        for name in ("validation loss", "unigram entropy")
    )
    assert learned < ignorant - 0.3, printed


def test_pretrain_muon() -> None:
    printed = run_forked("pretrain_muon.py", "--steps", "2", "--backend", "eager", processes=2)
    assert "update_whole" in printed and printed.count("validation loss") == 1, printed


def test_train_llama() -> None:
    pytest.importorskip("transformers")
    assert "step    1   loss" in run_forked("train_llama.py", "--steps", "2")


def test_finetune_lora() -> None:
    assert "frozen weights unchanged     True" in run_forked("finetune_lora.py", "--steps", "2")


@pytest.mark.parametrize("options", [(), ("--trainer", "--double")])
def test_finetune_qlora(options: tuple[str, ...]) -> None:
    for library in ("bitsandbytes", "peft"):
        pytest.importorskip(library)
    assert "which are Parameter and Params4bit" in run_forked("finetune_qlora.py", "--steps", "2", *options)


def test_train_convnet() -> None:
    assert "accuracy on new images" in run_forked("train_convnet.py", "--steps", "2")


def test_distill() -> None:
    assert "from the teacher" in run_forked("distill.py", "--steps", "2", "--backend", "eager")


@pytest.mark.days(3)
def test_train_gan() -> None:
    assert "spots reached" in run("train_gan.py", "--steps", "2", "--backend", "eager", processes=2)


@pytest.mark.slow
def test_train_gan_learns() -> None:
    assert "spots reached        8 of 8" in run("train_gan.py", "--steps", "600", "--backend", "eager")


@pytest.mark.slow
def test_train_contrastive() -> None:
    assert "among 128 images" in run("train_contrastive.py", "--steps", "2", "--backend", "eager", processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "script", ["distill.py", "train_gpt.py", "train_llama.py", "finetune_lora.py", "train_convnet.py"]
)
def test_as_a_reader_starts_them(script: str, processes: int) -> None:
    assert run(script, "--steps", "2", processes=processes)
