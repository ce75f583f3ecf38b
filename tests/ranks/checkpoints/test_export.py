"""Checkpoints for others: from_pretrained opens them, plain torch and DCP load them, and so does weights=."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from transformers import AutoModelForCausalLM, T5ForConditionalGeneration

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, batches
from tests.lib.runs.checkpoints import Uneven, Way, train
from tests.lib.runs.training import build, world
from zerofx.cli.commands import main


def _save(folder: str, names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Train cases, save each, and give their whole states."""
    whole = {}
    for name in names:
        case = CASES[name]
        model = build(case)
        step = zerofx.compile(model, case.optimizer(model), 3, loss_fn=case.loss_fn, backend="eager")
        for _, kwargs in batches(case, world()[0], 1):
            step(**kwargs)
        step.save_checkpoint(f"{folder}/{name}")
        whole[name] = step.full_state_dict()
        step.close()
    return whole


Saved = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint of GPT-2 by two ranks, and the model's whole state."""
    folder = tmp_path_factory.mktemp("saved")
    return folder / "gpt2", run_ranks(_save, 2, str(folder), ["gpt2"])[0]["gpt2"]


def export(*args: object) -> str:
    result = CliRunner().invoke(main, ["export", *map(str, args)])
    assert result.exit_code in (0, 2), result.output
    return result.output


def _check_opened(folder: Path, expected: dict[str, torch.Tensor], out: Path, kind: Any) -> None:
    export(folder, out, "--shard-size", "4kB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    tensors = [tensor for file in files for tensor in load_file(out / file).values()]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors)
    model = kind.from_pretrained(out)
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_from_pretrained_opens_it_with_tied_weights(saved: Saved, tmp_path: Path) -> None:
    _check_opened(*saved, tmp_path / "out", AutoModelForCausalLM)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("t5", T5ForConditionalGeneration), ("llama", AutoModelForCausalLM)])
def test_other_models_are_opened(tmp_path: Path, name: str, kind: Any) -> None:
    expected = run_ranks(_save, 2, str(tmp_path), [name])[0][name]
    export(tmp_path / name, tmp_path / "out")
    model = kind.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)


def test_another_dtype_and_one_file(saved: Saved, tmp_path: Path) -> None:
    export(saved[0], tmp_path / "out", "--dtype", "bfloat16")
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    expected = {name: value.bfloat16() for name, value in saved[1].items()}
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)
    assert "found" in export(saved[0], tmp_path / "out")  # which is there already
    assert "expected a checkpoint" in export(tmp_path / "nowhere", tmp_path / "other")


def _train(folder: str, way: Way) -> tuple[dict[str, torch.Tensor], dict[int, dict[str, torch.Tensor]]]:
    step, scheduler = way.step()
    train(step, scheduler, batches(way.case, world()[0], 2))
    step.save_checkpoint(folder)
    return step.full_state_dict(), step.optimizer.state_dict()["state"]


def test_plain_torch_loads_the_export_for_dcp_and_weights_the_checkpoint(tmp_path: Path) -> None:
    expected, states = run_ranks(_train, 2, str(tmp_path / "saved"), Way(3, "bf16"))[0]
    export(tmp_path / "saved", tmp_path / "dcp", "--format", "dcp")
    model = Uneven()
    optimizer = torch.optim.AdamW(model.parameters())
    weights, optimizer_state = get_state_dict(model, optimizer)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp_load({"model": weights, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state)
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], states, rtol=0, atol=0)
    assert optimizer.param_groups[0]["weight_decay"] == 0.01
    other = Uneven()
    step = zerofx.compile(other, torch.optim.SGD(other.parameters()), weights=tmp_path / "saved", backend="eager")
    step.prepare(*next(batches(Way().case, 0, 1))[0])
    torch.testing.assert_close(step.full_state_dict(), expected, rtol=0, atol=0)
