"""Masters that rest whole at the owners of parameters: the bits of masters that every rank has, or has slices of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import zerofx
from gpt import GPT
from tests.lib.distributed import run_ranks
from tests.lib.runs.training import world
from tests.lib.runs.whole_optimizers import MAKES, ByNorms
from tests.lib.runs.whole_updates import WholeCase, compiled, unlike
from zerofx.ir import ops
from zerofx.ir.facts import tensor

pytestmark = pytest.mark.usefixtures("drive")

BF16: dict[str, Any] = {"precision": "bf16"}
SCALED = {"precision": zerofx.Precision("fp16", loss_scale=zerofx.LossScale(64.0)), "max_grad_norm": 0.1}
SUMMED = {"accumulate": 2, "reduce": "once"}
VARIANTS: list[Mapping[str, Any]] = [
    {"stage": 3},
    {"stage": 1, **SUMMED},
    {"stage": 2},
    {"stage": 3, "arena": False, "max_grad_norm": 0.1},
]


def _run(case: WholeCase, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a case is trained to on this rank's own rows."""
    rank, num_ranks = world()
    step, optimizer = compiled(case, **options)
    try:
        for batch in case.batches(num_ranks):
            step(batch[rank])
        if step.plan.stage and num_ranks > 1:
            _check_sent(step)
        return step.full_state_dict(), optimizer.state_dict()
    finally:
        step.close()


def _check_sent(step: zerofx.Step) -> None:
    """Gradients alone go to owners, and values in the compute dtype come back."""
    nodes = list(step.compiled.lowered.graph.calls())
    exchanged = [node for node in nodes if node.target in ops.OWNER_EXCHANGES]
    updates = [node for node in nodes if node.target is ops.update_whole]
    num_updated = sum(len(node.args[0]) for node in updates if isinstance(node.args[0], list | tuple))
    assert len(exchanged) == 2 * num_updated
    assert "dealt out to" in str(step) and "states and masters rest there whole" in str(step)
    assert {tensor(node).dtype.itemsize for node in exchanged} == {2}


def _differences(cases: list[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """What slices and owners do otherwise than ranks of which each has all masters, on this rank."""
    wrong, expected = [], dict[str, Any]()
    for name, options in cases:
        case = WholeCase(name)
        replicated = {key: value for key, value in options.items() if key not in ("stage", "offload", "memory_budget")}
        if (key := f"{name} {replicated}") not in expected:
            expected[key] = _run(case, {**replicated, "stage": 0})
        wrong += [f"{name} {options}: {text}" for text in unlike(expected[key], _run(case, options))]
    return wrong


TWO = [
    *(("Muon, groups", {**BF16, **options}) for options in VARIANTS),
    ("Muon", {**SCALED, "stage": 3}),
    ("by norms, groups", {**BF16, "stage": 3}),
    ("by all norms, groups", {**BF16, "stage": 3}),
]


@pytest.mark.days(3)
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        pytest.param(2, TWO[::2], id="two"),
        pytest.param(2, TWO[1::2], id="two, others"),
        pytest.param(3, TWO[:1] + TWO[-2:], id="three"),
        pytest.param(4, [("Muon", {**BF16, "stage": 3, "mesh": {"replicate": 2, "shard": 2}})], id="mesh"),
        pytest.param(
            4,
            [(name, {**BF16, **options}) for name in MAKES for options in VARIANTS],
            id="every on four",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_masters_at_owners_have_the_bits_of_those_that_every_rank_has(
    num_ranks: int, cases: list[tuple[str, Mapping[str, Any]]]
) -> None:
    assert run_ranks(_differences, num_ranks, cases) == [[]] * num_ranks


def _trained_on(folder: str, case: WholeCase, half: int, asynchronous: bool) -> tuple[Any, Any, int]:
    """Train the first half of a case and save it while one more step runs, or load it and train the rest."""
    step, optimizer = compiled(case, **BF16)
    batches = [batch[0] for batch in case.batches(1)]
    is_first = not any(Path(folder).iterdir())
    if is_first:
        for batch in batches[:half]:
            step(batch)
        step.save_checkpoint(folder, asynchronous=asynchronous)
        step(batches[half])
    else:
        step.load_checkpoint(folder)
        for batch in batches[half:]:
            step(batch)
    saved = step.full_state_dict(), optimizer.state_dict()
    step.close()
    return *saved, len(batches)


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("name", "before", "after", "asynchronous"),
    [
        ("Muon, groups", 2, 1, True),
        ("Muon", 1, 2, True),
        pytest.param("by norms, groups", 4, 2, False, marks=pytest.mark.slow),
        pytest.param("by all norms, groups", 2, 4, True, marks=pytest.mark.slow),
    ],
)
def test_masters_at_owners_are_saved_and_go_on_on_other_ranks(
    tmp_path: Path, name: str, before: int, after: int, asynchronous: bool
) -> None:
    # All ranks train on the same rows: the mean over one, two or four of them is the same to the bit.
    case = WholeCase(name, {"stage": 3})
    expected = run_ranks(_train, 1, case)[0]
    run_ranks(_trained_on, before, str(tmp_path), case, 2, asynchronous)
    for weights, state, _ in run_ranks(_trained_on, after, str(tmp_path), case, 2, asynchronous):
        assert unlike(expected, (weights, state)) == []


def _train(case: WholeCase) -> tuple[Any, Any]:
    step, optimizer = compiled(case, **BF16)
    for batch in case.batches(1):
        step(batch[0])
    return step.full_state_dict(), optimizer.state_dict()


def _written(case: WholeCase) -> list[str]:
    """Read and write single parameters and all of them, and load a state dictionary: what is not as it was written."""
    step, optimizer = compiled(case, **BF16)
    rows = case.batches(1)[0][0]
    step(rows)
    before = step.full_state_dict()
    name = next(iter(before))
    with step.full(name, write_back=True) as weight:
        wrong = [] if torch.equal(weight, before[name]) else ["read"]
        weight.mul_(3.0)
    with step.full_parameters(write_back=True) as model:
        wrong += [] if torch.equal(dict(model.named_parameters())[name], before[name] * 3) else ["shown"]
        with torch.no_grad():
            dict(model.named_parameters())[name].div_(3.0)
    after = {key: value / 3 if key == name else value for key, value in before.items()}
    after[name] = before[name] * 3 / 3
    wrong += unlike((after, optimizer.state_dict()), (step.full_state_dict(), optimizer.state_dict()))
    step(rows)
    step.close()
    return wrong


def test_masters_at_owners_are_read_and_written_whole() -> None:
    assert run_ranks(_written, 2, WholeCase("Muon", {"stage": 3})) == [[], []]


def _away(tier: str) -> list[str]:
    case = WholeCase("Muon", {"stage": 3})
    rank, num_ranks = world()
    step, _ = compiled(case, **BF16)
    step.prepare(case.batches(num_ranks)[0][rank])
    budget = step.plan.peak_bytes["device"] - 300
    step.close()
    options = {**BF16, "stage": 3, "offload": tier, "memory_budget": budget, "recompute": "none"}
    step, _ = compiled(case, **options)
    step.prepare(case.batches(num_ranks)[0][rank])
    tiers = {decision.tier for decision in step.plan.states}
    step.close()
    return [*([] if tiers == {tier} else [f"states on {tiers}"]), *_differences([("Muon", options)])]


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_masters_at_owners_rest_in_slower_tiers(tier: str) -> None:
    assert run_ranks(_away, 2, tier) == [[], []]


def _in_parts(folder: str, mesh: dict[str, int], is_saved: bool) -> tuple[Any, Any]:
    """Train at stages 0 and 3 where ranks of the model axis have parts of matrices, and save; or load."""
    found: list[tuple[Any, Any]] = []
    for stage in (0, 3) if not is_saved else (3,):
        torch.manual_seed(0)
        model = GPT(64, 16, 2, 2, 8)
        optimizer = ByNorms(model.parameters())
        pins: dict[str, Any] = {"shardings": {"layers.*.mlp.*": "column"}} if "model" in mesh else {}
        step = zerofx.compile(model, optimizer, stage, backend="eager", mesh=mesh, precision="bf16", **pins)
        generator, place = torch.Generator().manual_seed(3), world()[0] // mesh.get("model", 1)
        if is_saved:
            step.load_checkpoint(folder)
            step.prepare(*torch.zeros(2, 2, 8, dtype=torch.int64))
        for _ in range(0 if is_saved else 3):
            rows = torch.randint(0, 64, (2, 2, 2, 8), generator=generator)
            step(*rows[place])
        found.append((step.full_state_dict(), optimizer.state_dict()))
        if stage and not is_saved:
            assert "gather_values(master" in step.source
            step.save_checkpoint(folder, asynchronous=True)
            step(*rows[place])
        step.close()
    assert unlike(found[0], found[-1]) == []
    return found[-1]


@pytest.mark.slow
def test_masters_of_parameters_in_parts_are_whole_at_the_owners_of_the_parts(tmp_path: Path) -> None:
    expected, *_ = run_ranks(_in_parts, 4, str(tmp_path), {"shard": 2, "model": 2}, False)
    for found in run_ranks(_in_parts, 2, str(tmp_path), {"shard": 2}, True):
        assert unlike(expected, found) == []
