"""Parameters that are frozen, and thawed, between steps of several ranks."""

from __future__ import annotations

import pytest

from tests.lib.distributed import run_ranks
from tests.lib.runs.freezing import unlike_eager_mode

pytestmark = pytest.mark.filterwarnings("ignore:.*the step is made anew")


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_bits_of_eager_mode(stage: int) -> None:
    for rank, wrong in enumerate(run_ranks(unlike_eager_mode, 2, "adamw", stage)):
        assert wrong == [], f"rank {rank}"


@pytest.mark.slow
def test_with_replicas() -> None:
    mesh = {"replicate": 2, "shard": 2}
    for rank, wrong in enumerate(run_ranks(_on_a_mesh, 4, mesh)):
        assert wrong == [], f"rank {rank}"


def _on_a_mesh(mesh: dict[str, int]) -> list[str]:
    return unlike_eager_mode("adamw", 3, mesh=mesh)
