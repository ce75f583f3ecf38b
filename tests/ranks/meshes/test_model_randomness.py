"""Dropout where ranks share one computation: alike on what all of them have, from generators in one state."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, batches
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import build, plan_of, world
from zerofx.ir.facts import is_random
from zerofx.ir.op_kernels.own_draws import OWN_DRAWS
from zerofx.scheduler.cost.machine import Link

STEPS = 3
# Its links cost so much that every rank computes everything.
ALONE = replace(SHARING, intra_node=Link(bandwidth=1.0, latency=1e9))


def _trained(
    name: str, seeds: tuple[int, ...], mesh: dict[str, int], stage: int, **options: Any
) -> tuple[list[Tensor], dict[str, Tensor], set[bool], list[str]]:
    """Losses, parameters as this rank has them in the end, whether draws are a rank's own, and warnings.

    ``seeds``: of each rank, before the first step.
    """
    case, (rank, _) = CASES[name], world()
    model = build(case)
    options = {"backend": "eager", "machine": SHARING, **options}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", zerofx.errors.ZeroFXWarning)
        step = zerofx.compile(model, case.optimizer(model), stage, loss_fn=case.loss_fn, mesh=mesh, **options)
        torch.manual_seed(seeds[rank])
        given = batches(case, rank // mesh["model"], STEPS)
        losses = [step(*args, **kwargs).clone() for args, kwargs in given]
    with step.full_parameters():
        state = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    own = {node.target in OWN_DRAWS.values() for node in step.compiled.lowered.graph.calls() if is_random(node)}
    step.close()
    return losses, state, own, [str(warning.message) for warning in caught]


def _one_process(name: str, seed: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    case = CASES[name]
    model = build(case)
    optimizer, losses = case.optimizer(model), []
    torch.manual_seed(seed)
    for args, kwargs in batches(case, 0, STEPS):
        optimizer.zero_grad()
        loss = case.loss(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, dict(model.named_parameters())


def _equal(first: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in first.items() if not torch.equal(tensor, other[name])]


WAYS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "stage 0": ((5, 5), {"stage": 0}),
    "stage 3": ((5, 5), {"stage": 3}),
    "again": ((5, 5), {"stage": 3, "recompute": "full"}),
    "by rank": ((5, 6), {"stage": 3}),
    "another seed": ((6, 6), {"stage": 3}),
}


def _as_one_process() -> None:
    """Where every rank computes everything, all draws are those of one process."""
    losses, state, own, _ = _trained("dropout", (5, 5), {"model": 2}, 0, machine=ALONE)
    assert own == {False}
    expected, parameters = _one_process("dropout", 5)
    for loss, one in zip(losses, expected, strict=True):
        torch.testing.assert_close(loss, one, rtol=1e-6, atol=0)
    for key, tensor in state.items():
        torch.testing.assert_close(tensor, parameters[key], rtol=1e-5, atol=1e-7)


def _runs(name: str) -> dict[str, tuple[list[Tensor], dict[str, Tensor], list[str]]]:
    found = {}
    for label, (seeds, options) in WAYS.items():
        losses, state, own, told = _trained(name, seeds, {"model": 2}, **options)
        assert True in own, f"{label}: nothing that is drawn lies in parts"
        found[label] = losses, state, told
    if name == "dropout":
        _as_one_process()
    return found


def _check(name: str) -> None:
    first, second = run_ranks(_runs, 2, name)
    for label, (losses, state, told) in first.items():
        others = second[label]
        assert all(map(torch.equal, losses, others[0])), f"{label}: losses differ between ranks"
        assert _equal(state, others[1]) == [], label
        # A generator that was seeded by rank goes on from the first rank's state, which is said once.
        assert [len(told), len(others[2])] == ([1, 0] if label == "by rank" else [0, 0]), label
    (message,) = first["by rank"][2]
    assert "(rank 0's on ranks 0, 1). Call torch.manual_seed(seed + rank // 2)" in message
    losses, state, _ = first["stage 3"]
    for label in ("stage 0", "again", "by rank"):
        assert all(map(torch.equal, losses, first[label][0])), label
        assert _equal(state, first[label][1]) == [], label
    assert not torch.equal(losses[0], first["another seed"][0][0])


@pytest.mark.days(3)
def test_ranks_that_share_a_step_draw_alike_what_all_of_them_have() -> None:
    _check("dropout")


@pytest.mark.parametrize(("name", "draws"), [("dropout", True), ("evaluating dropout", False)])
def test_what_draws_nothing_has_no_draws(name: str, draws: bool) -> None:
    rows = plan_of(name, machine=SHARING, mesh={"model": 2}).schedule().rows
    assert any("bernoulli" in row.op for row in rows) == draws
    assert any("own_bernoulli" in row.op for row in rows) == draws


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2 dropout"])
def test_models_of_transformers_draw_alike(name: str) -> None:
    _check(name)


def _of_groups(seeds: tuple[int, ...]) -> tuple[list[float], list[str]]:
    """Losses on batches that are the same in all groups, and warnings."""
    losses, _, _, told = _trained("dropout", seeds, {"shard": 2, "model": 2}, 3)
    return [float(loss) for loss in losses], told


@pytest.mark.slow
def test_groups_that_are_seeded_alike_are_told_of_it() -> None:
    told = [told for _, told in run_ranks(_of_groups, 4, (5, 5, 5, 5))]
    assert told[1:] == [[], [], []]
    assert "all 4 ranks draw the same random numbers" in told[0][0]
    assert "torch.manual_seed(seed + rank // 2) once the model is built" in told[0][0]
    results = run_ranks(_of_groups, 4, (5, 5, 6, 6))
    assert [told for _, told in results] == [[], [], [], []]
    losses = [losses for losses, _ in results]
    assert losses[0] == losses[1] != losses[2] == losses[3]


def _compiled() -> tuple[list[Tensor], list[Tensor]]:
    """Losses with kernels of ATen's, and of Inductor's."""
    return tuple(_trained("dropout", (5, 5), {"model": 2}, 3, backend=b)[0] for b in ("eager", "inductor"))  # type: ignore[return-value]  # two


@pytest.mark.slow
def test_compiled_regions_draw_the_same() -> None:
    for eager, compiled in run_ranks(_compiled, 2):
        for loss, one in zip(compiled, eager, strict=True):
            torch.testing.assert_close(loss, one, rtol=1e-4, atol=0)


def _peaks() -> tuple[int, int]:
    case = CASES["gpt2 dropout"]
    model = build(case)
    step = zerofx.compile(model, case.optimizer(model), 3, mesh={"model": 2}, backend="eager", machine=SHARING)
    ((args, kwargs),) = batches(case, 0, 1)
    measured = step.measure(*args, **kwargs).peak_bytes["device"]
    planned = step.plan.peak_bytes["device"]
    step.close()
    return planned, measured


@pytest.mark.slow
def test_what_is_drawn_in_parts_takes_the_memory_that_is_planned() -> None:
    for planned, measured in run_ranks(_peaks, 2):
        assert abs(measured - planned) <= 0.01 * planned, (planned, measured)
