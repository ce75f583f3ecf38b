"""Other people's models, and whole training scripts, are trained as plain torch trains them, or refused."""

from __future__ import annotations

import random

import pytest

from tests.nets.cases.models import CASES, LIBRARIES
from tests.nets.cases.scripts import SCRIPTS
from tests.nets.models import RANKS, VARIANTS, missing, run

SAMPLE = random.Random(24).sample([case.name for case in LIBRARIES], 6)
AT_ONCE = ["1 rank, stage 0", "1 rank, stage 3"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [case.name for case in SCRIPTS])
def test_a_script_in_plain_torch_is_trained_bit_for_bit(name: str) -> None:
    assert [record for record in run([name], AT_ONCE) if record.outcome != "exact"] == []


@pytest.mark.sweep(2)
@pytest.mark.parametrize("variant", RANKS)
@pytest.mark.parametrize("name", [case.name for case in SCRIPTS])
def test_two_ranks_train_scripts_as_distributed_data_parallel_does(name: str, variant: str) -> None:
    assert [record for record in run([name], [variant]) if record.outcome != "exact"] == []


@pytest.mark.parametrize("name", SAMPLE)
def test_a_library_s_model_is_trained_bit_for_bit_or_refused(name: str) -> None:
    if why := missing(CASES[name]):
        pytest.skip(why)
    assert [record for record in run([name], AT_ONCE) if record.outcome == "wrong"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_model_is_trained_wrongly(name: str) -> None:
    if why := missing(CASES[name]):
        pytest.skip(why)
    assert [record for record in run([name], [*VARIANTS, *RANKS]) if record.outcome == "wrong"] == []
