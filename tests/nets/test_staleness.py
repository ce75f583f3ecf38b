"""Nothing that a script changes between steps goes stale: the whole net, on both backends, on one and on two ranks."""

from __future__ import annotations

import pytest

from tests.nets.cases.staleness import staleness_cases
from tests.nets.staleness import full_name, missing, run


@pytest.mark.slow
@pytest.mark.captures
@pytest.mark.parametrize("num_ranks", [1, 2], ids="ranks {}".format)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_every_step_computes_what_eager_mode_would(backend: str, num_ranks: int) -> None:
    cases = [case for case in staleness_cases() if not missing(case)]
    judged = zip(map(full_name, cases), run(cases, backend, num_ranks), strict=True)
    assert {name: found.detail for name, found in judged if found.judged in ("stale", "error")} == {}
