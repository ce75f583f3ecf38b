"""The plan as data: there and back through JSON, and one hash wherever it is made."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.checkout import ROOT
from tests.lib.graphs import Tied, prepare, token_ids
from zerofx.errors import PlanError
from zerofx.scheduler.plan.decisions import ABSENCE_KINDS, VALUE_KINDS, Absence
from zerofx.scheduler.plan.facts import Prediction
from zerofx.scheduler.plan.plan import Plan

_PREDICTION = Prediction(
    peak_bytes={"device": 7}, peak_node="mm", peak_live={"shards": 7}, model_state_bytes=3, wire_bytes=4,
    step_seconds=0.5, exposed_seconds=0.25, flops=9,
)  # fmt: skip

# What a process that hashes strings in its own order makes of the same model.
_MAKE_PLAN = """
import hashlib
from tests.lib.graphs import Tied, prepare, token_ids
prepared = prepare(Tied(), token_ids(), num_ranks=3)
print(prepared.plan.decisions_hash())
prepared.run()
print(hashlib.sha256(prepared.step.text().encode()).hexdigest())
"""


_SOME = st.integers(min_value=1)
OF_VALUES = st.sampled_from(sorted(VALUE_KINDS))
OF_BUCKETS = st.sampled_from(sorted({*ABSENCE_KINDS} - VALUE_KINDS))

# An absence is of a value, or of what a bucket has.
st.register_type_strategy(
    Absence,
    st.builds(Absence, kind=OF_VALUES, value=st.text(min_size=1), bucket=st.just(-1), num_bytes=_SOME)
    | st.builds(Absence, kind=OF_BUCKETS, value=st.just(""), bucket=st.integers(min_value=0), num_bytes=_SOME),
)


# No plan has a number that is none, and reading one refuses it.
@pytest.mark.days(3)
@given(st.from_type(Plan).filter(lambda plan: "NaN" not in plan.to_json()))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_json_gives_the_same_plan_back(plan: Plan) -> None:
    found = Plan.from_json(plan.to_json())
    assert found == plan
    assert found.to_json() == plan.to_json()
    assert found.decisions_hash() == plan.decisions_hash()


def test_a_real_plan_survives_json_with_its_prediction() -> None:
    plan = prepare().plan.with_prediction(_PREDICTION)
    found = Plan.from_json(plan.to_json())
    assert found == plan and found.prediction == _PREDICTION


def test_the_hash_is_of_decisions_alone() -> None:
    plan = prepare().plan
    assert plan.with_prediction(_PREDICTION).decisions_hash() == plan.decisions_hash()
    moved = replace(plan, gathers=(replace(plan.gathers[0], issue="relu"), *plan.gathers[1:]))
    assert moved.decisions_hash() != plan.decisions_hash()
    assert replace(plan, stage=2).decisions_hash() != plan.decisions_hash()


@pytest.mark.days(3)
def test_plan_and_graph_are_the_same_in_every_process() -> None:
    # This process has a seed of its own: random unless somebody set it.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", _MAKE_PLAN], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    prepared = prepare(Tied(), token_ids(), num_ranks=3)
    expected = [prepared.plan.decisions_hash()]
    prepared.run()
    expected.append(hashlib.sha256(prepared.step.text().encode()).hexdigest())
    assert run.stdout.split() == expected


@pytest.mark.parametrize("text", ["", "[]", "{}", "no json", '{"format": 2}', "null"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="expected the JSON of a zerofx plan"):
        Plan.from_json(text)


@pytest.mark.parametrize("lost", ["bucket", "value"])
def test_an_absence_of_nothing_is_refused(lost: str) -> None:
    away = prepare().plan.replace_absences(
        recomputes=[Absence(kind="recomputes", value="mm", num_bytes=8, reason="")],
        states=[Absence(kind="states", bucket=0, tier="host", update="host", reason="")],
    )
    data = json.loads(away.to_json())
    del data["absences"][lost == "bucket"][lost]
    with pytest.raises(PlanError, match="the absence of a value, or of what a bucket has"):
        Plan.from_json(json.dumps(data))


def test_a_plan_of_another_format_is_refused() -> None:
    data = json.loads(prepare().plan.to_json())
    data["format"] += 1
    with pytest.raises(PlanError, match="format 3; make the plan anew"):
        Plan.from_json(json.dumps(data))


def test_a_plan_with_an_unknown_field_in_a_decision_is_refused() -> None:
    data = json.loads(prepare().plan.to_json())
    data["gathers"][0]["colour"] = "blue"
    with pytest.raises(PlanError, match=r"Plan.gathers\[0\]: unknown field 'colour'"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("kind", ["states", "parameters", "gradients", "offloads"])
def test_a_plan_with_another_tier_is_refused(kind: str) -> None:
    plan = prepare().plan
    placed = plan.replace_absences(
        states=[Absence(kind="states", bucket=0, tier="host", update="host", reason="")],
        parameters=[Absence(kind="parameters", bucket=0, tier="host", reason="")],
        gradients=[Absence(kind="gradients", bucket=0, tier="host", num_bytes=8, reason="")],
        offloads=[
            Absence(
                kind="offloads",
                value="mm",
                tier="host",
                num_bytes=8,
                free_after=("mm",),
                reload_before=("mm",),
                reason="",
            )
        ],
    )
    data = json.loads(placed.to_json())
    assert Plan.from_json(json.dumps(data)) == placed
    place = next(n for n, away in enumerate(placed.absences) if away.kind == kind)
    data["absences"][place]["tier"] = "tape"
    with pytest.raises(PlanError, match=rf"Plan.absences\[{place}\].tier: expected .*'nvme'.*, found 'tape'"):
        Plan.from_json(json.dumps(data))


def test_predictions_are_refused_before_there_are_any() -> None:
    plan = prepare().plan
    with pytest.raises(PlanError, match="not been simulated yet"):
        _ = plan.peak_bytes
    assert plan.with_prediction(_PREDICTION).peak_bytes == {"device": 7}


@pytest.mark.parametrize(
    ("stage", "num_ranks", "gathers"), [(0, 2, False), (1, 2, False), (2, 2, False), (3, 2, True), (3, 1, False)]
)
def test_what_a_stage_divides(stage: int, num_ranks: int, gathers: bool) -> None:
    plan = prepare(stage=stage, num_ranks=num_ranks).plan
    assert plan.gathers_parameters is gathers and bool(plan.gathers) is gathers
