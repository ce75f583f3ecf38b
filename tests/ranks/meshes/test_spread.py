"""Values that all ranks of the model axis have, kept as one part on each: the bits and the peak that were planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, batches, sgd
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import Trained, build, differences, world
from zerofx.scheduler.plan.plan import Plan

STEPS = 4
SHARES = (0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.87, 0.85, 0.82, 0.8, 0.77)
TOLERANCE = 0.001  # small things that operators keep to themselves are not predicted


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


@pytest.mark.days(3)
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


def _largest_share(name: str, mesh: dict[str, int], num_ranks: int) -> float:
    """The largest share of the peak without a budget in which parts are kept, where ranks share in the same way."""
    case = CASES[name]
    args, keywords = next(iter(batches(case, 0, 1)))
    model = build(case)

    def planned(budget: int | None) -> Plan:
        return zerofx.plan(
            model, sgd(model), keywords or args, stage=3, world_size=num_ranks, mesh=mesh, machine=SHARING,
            backend="eager", loss_fn=case.loss_fn, tile="none", recompute="none", memory_budget=budget,
        ).plan  # fmt: skip

    free = planned(None)
    plans = ((share, planned(int(share * free.peak_bytes["device"]))) for share in SHARES)
    return next(share for share, plan in plans if plan.spreads and plan.shardings == free.shardings)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "bert"])
@pytest.mark.parametrize("mesh", [{"model": 2}, {"model": 4}, {"shard": 2, "model": 2}], ids=str)
def test_ranks_keep_parts_of_what_all_have(mesh: dict[str, int], name: str) -> None:
    num_ranks = mesh.get("shard", 1) * mesh["model"]
    share = _largest_share(name, mesh, num_ranks)
    assert run_ranks(_trained, num_ranks, name, mesh, share, {"recompute": "none"}) == [{}] * num_ranks
