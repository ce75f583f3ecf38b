"""TRL's own trainers on top of a step that two ranks share: losses and metrics are those of TRL on two ranks."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.lib.distributed import run_ranks
from tests.lib.runs.training import world

pytest.importorskip("trl")
pytest.importorskip("peft")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def _differences(kind: str, adapters: bool, max_steps: int, folder: str, cadence: str = "") -> list[str]:
    from tests.train.integrations.test_trl_trainers import differences

    warnings.simplefilter("ignore")
    return differences(kind, Path(folder, str(world()[0])), adapters=adapters, max_steps=max_steps, cadence=cadence)


@pytest.mark.captures
@pytest.mark.parametrize(
    ("kind", "adapters", "max_steps"),
    [
        ("grpo", False, 5),
        ("grpo", True, 3),
        ("rloo", False, 2),
        *((kind, False, 5) for kind in ("reward", "sft", "dpo", "kto")),
        ("dpo", True, 5),
    ],
)
def test_losses_and_metrics_are_those_of_trl(kind: str, adapters: bool, max_steps: int, tmp_path: Path) -> None:
    assert run_ranks(_differences, 2, kind, adapters, max_steps, str(tmp_path)) == [[], []]


@pytest.mark.captures
@pytest.mark.parametrize("cadence", ["of two batches", "of two updates"])
def test_completions_last_for_several_batches_and_iterations(cadence: str, tmp_path: Path) -> None:
    assert run_ranks(_differences, 2, "grpo", False, 5, str(tmp_path), cadence) == [[], []]
