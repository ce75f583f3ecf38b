"""Values that all ranks of the model axis have, kept as one part on each: the bits and the peak that were planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, batches, sgd
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import Trained, build, captured_once, differences, world

STEPS = 4
TOLERANCE = 0.001  # small things that operators keep to themselves are not predicted


@captured_once()
def _trained(name: str, mesh: dict[str, int], share: float, options: dict[str, Any]) -> dict[str, Any]:
    """What is unlike training without a budget to the bit, or not as the plan says; with one of a ``share`` of the
    peak without."""
    case = replace(CASES[name], optimizer=sgd, steps=STEPS)
    data = list(batches(case, world()[0] // mesh["model"], STEPS))
    given = {"backend": "eager", "machine": SHARING, "mesh": mesh, "loss_fn": case.loss_fn, "tile": "none", **options}
    trained, wrong, budgets = list[Trained](), dict[str, Any](), list[int]()  # first without a budget, then with one
    for _ in range(2):
        model = build(case)
        step = zerofx.compile(model, case.optimizer(model), 3, memory_budget=budgets[0] if budgets else None, **given)
        losses = [step(*args, **keywords).clone() for args, keywords in data]
        trained.append(Trained(losses, step.full_state_dict()))
        args, keywords = data[0]
        plan, measured = step.plan, step.measure(*args, **keywords, num_steps=2)
        off = measured.peak_bytes["device"] / plan.peak_bytes["device"] - 1
        wrong["peak"] = off if abs(off) > TOLERANCE else 0.0
        wrong["wire"] = measured.wire_bytes - plan.wire_bytes
        step.close()
        budgets.append(int(share * plan.peak_bytes["device"]))
    wrong["another bit"] = differences(trained[0], trained[1])
    wrong["budget"] = plan.peak_bytes["device"] > budgets[0]
    wrong["nothing in parts"] = not plan.spreads
    wrong["text"] = "kept as one part on each of" not in str(plan)
    return {what: found for what, found in wrong.items() if found}


@pytest.mark.parametrize(
    ("share", "options"),
    [
        (0.93, {"recompute": "none"}),
        pytest.param(0.98, {"recompute": "none", "accumulate": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_ranks_keep_parts_of_what_both_have(share: float, options: dict[str, Any]) -> None:
    assert run_ranks(_trained, 2, "llama", {"model": 2}, share, options) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "bert"])
@pytest.mark.parametrize("mesh", [{"model": 2}, {"model": 4}, {"shard": 2, "model": 2}], ids=str)
def test_ranks_keep_parts_of_what_all_have(mesh: dict[str, int], name: str) -> None:
    num_ranks = mesh.get("shard", 1) * mesh["model"]
    assert run_ranks(_trained, num_ranks, name, mesh, 0.98, {"recompute": "none"}) == [{}] * num_ranks
