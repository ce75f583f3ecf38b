"""verl's engine of a step that two ranks share: losses and weights are those of one process with both batches."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.lib.distributed import run_ranks

pytest.importorskip("verl")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def _differences(folder: str, cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    from tests.train.integrations.test_verl import differences

    warnings.simplefilter("ignore")
    return [each for kind, options in cases for each in differences(kind, Path(folder), options)]


@pytest.mark.captures
def test_engines_train_as_plain_torch_does(tmp_path: Path) -> None:
    cases = [("ppo", {}), ("sft", {"accumulate": 2, "stage": 1})]
    assert run_ranks(_differences, 2, str(tmp_path), cases) == [[], []]
