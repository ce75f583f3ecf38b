"""What ranks that share a GPU run (``tests/gpu/ranks``), on a CPU whose streams are played."""

from __future__ import annotations

import pytest

from tests.gpu.ranks.cases import RUNS, run
from tests.gpu.ranks.joined import run_on_one_card

SOME = ("merged gathers", "few bits", "on the host", "stages, micro-batch")
# The others are those of ``test_cuda_streams.py`` and ``test_messages.py``.


@pytest.mark.days(3)
@pytest.mark.filterwarnings("ignore:collectives along different axes of the mesh run one after the other")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SOME else pytest.mark.slow)
        for name, case in RUNS.items()
        if not case.of_gpus
    ],
)
def test_cases_of_a_gpu_run_on_a_cpu(name: str) -> None:
    num_ranks = RUNS[name].num_ranks
    assert run_on_one_card(run, num_ranks, "cpu", name) == [[]] * num_ranks
