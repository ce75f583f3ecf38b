"""``ZeroFXTrainer`` on several ranks: the losses of one process, and training that is killed and goes on elsewhere."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from tests.lib.distributed import RankError, run_ranks
from tests.lib.runs.trainers import apart, arguments, as_started_by_torchrun, history, llama, shapes_may_differ, trainer
from zerofx.integrations.transformers import ZeroFXTrainer

LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")
STEPS, KILLED_AFTER = 12, 8
SAVES = {"max_steps": STEPS, "eval_steps": 4, "save_strategy": "steps", "save_steps": 3}


class _Kill(TrainerCallback):
    """Ends the process as a crash does, after some step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)


def _train(
    folder: str, options: dict[str, Any], *, killed: bool = False, resumed: bool = False
) -> dict[str, list[float]]:
    """What rank 0 has logged of a training in which all ranks together see 8 samples a step."""
    as_started_by_torchrun()
    each = 4 // dist.get_world_size()
    args = arguments(folder, per_device_train_batch_size=each, per_device_eval_batch_size=each, **SAVES)
    one = trainer(ZeroFXTrainer, llama(), args, callbacks=[_Kill()] if killed else [], **options)
    with shapes_may_differ():
        one.train(resume_from_checkpoint=resumed)
    return history(one, *LOGGED)


def _killed(folder: str, options: dict[str, Any]) -> None:
    _train(folder, options, killed=True)


def _resumed(folder: str, options: dict[str, Any]) -> dict[str, list[float]]:
    return _train(folder, options, resumed=True)


@pytest.mark.days(3)
@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_killed_and_resumed_by_other_ranks_is_as_if_nothing_had_been(before: int, after: int, tmp_path: Path) -> None:
    plain = trainer(Trainer, llama(), arguments(tmp_path / "plain", **SAVES | {"save_strategy": "no"}))
    plain.train()
    folder = str(tmp_path / "killed")
    with pytest.raises(RankError):
        run_ranks(_killed, before, folder, {"stage": 3})
    assert sorted(entry.name for entry in Path(folder).iterdir()) == ["checkpoint-3", "checkpoint-6"]
    found = run_ranks(_resumed, after, folder, {"stage": 2, "memory_budget": "1GiB"})[0]
    assert apart(found, history(plain, *LOGGED)) == []
    assert AutoModelForCausalLM.from_pretrained(Path(folder, f"checkpoint-{STEPS}")).num_parameters()
