"""A rank that freezes, dies or is interrupted: the others end in time, say which one it was, and can close."""

from __future__ import annotations

import pytest

from tests.nets.faults import Fault, cases, run, sample


@pytest.mark.parametrize("fault", sample(3, seed=24), ids=lambda fault: " ".join(fault.record))
def test_a_fault_ends_every_other_rank_in_time(fault: Fault) -> None:
    assert run(fault).detail == ""


@pytest.mark.slow
@pytest.mark.parametrize("fault", cases(), ids=lambda fault: " ".join(fault.record))
def test_every_fault(fault: Fault) -> None:
    assert run(fault).detail == ""
