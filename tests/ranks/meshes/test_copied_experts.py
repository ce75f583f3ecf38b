"""Copies of the experts that most rows are for: all ranks compute as many, and all but these experts' weights has the
bits of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import Case, batches, sgd
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import build, world
from tests.ranks.meshes.test_exchanged_rows import EXCHANGED, MODELS, whole_elsewhere
from tests.ranks.meshes.test_row_rounds import NUM_TOKENS, Steered, even_tokens, make_uneven
from zerofx import UsageError
from zerofx.driver import shardings
from zerofx.scheduler.cost.machine import Machine

COPYING = replace(SHARING, device=replace(Machine.named("cpu").device, launch_latency=1e-13))
"""Its links, and calls, cost next to nothing, and its memory is no slower than it is: rows take longer than weights."""


def _steered(top: int, dtype: torch.dtype) -> Case:
    return Case(lambda: Steered(top).to(dtype), lambda generator: even_tokens(generator, dtype), optimizer=sgd)


def _alike(keywords: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sequences of one token, but for the last few."""
    ids = keywords["input_ids"].clone()
    ids[:, :-4] = ids[0, 0]
    return {"input_ids": ids, "labels": ids}


def _case(name: str) -> tuple[Case, Callable[[Any, Any], tuple[Any, Any]]]:
    """A case, and what makes its batches uneven."""
    if name.startswith("steered"):
        case = _steered(1 + name.endswith("2"), torch.bfloat16 if "bf16" in name else torch.float32)
        return case, lambda args, _: ((make_uneven(args[0]),), {})
    return MODELS[name], lambda _, keywords: ((), _alike(keywords))


def _run(
    name: str, mesh: dict[str, int], options: dict[str, Any], uneven: tuple[int, ...], num: int, *, chosen: bool = False
) -> dict[str, Any]:
    """Steps of which some are ``uneven``: numbers about each, peaks, what is unlike one process, norms of gradients.
    ``chosen``: whether copies are, however long they take."""
    case, skew = _case(name)
    num_data = world()[1] // (mesh["model"] * mesh.get("pipe", 1))
    index = world()[0] // mesh["model"] % num_data
    model, eager = build(case), build(case)
    optimizer, accumulate = case.optimizer(eager), options.get("accumulate", 1)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(shardings, "apply_pins", whole_elsewhere)
    if chosen:
        monkeypatch.setattr(shardings, "choose_copies", lambda *_: (True, ""))
    given = {"backend": "eager", "machine": COPYING, "shardings": EXCHANGED, "mesh": mesh, "max_grad_norm": 1e3}
    step = zerofx.compile(model, case.optimizer(model), **{**given, **options})
    numbers, unlike, norms = list[tuple[float, ...]](), list[dict[str, float]](), list[tuple[float, float]]()
    for number, batch in enumerate(zip(*(batches(case, rank, num) for rank in range(num_data)), strict=True)):
        batch = tuple(skew(*each) if number in uneven else each for each in batch)
        optimizer.zero_grad()
        losses = list[Tensor]()
        for args, keywords in batch:
            parts = [
                (tuple(part[at] for part in (a.chunk(accumulate) for a in args)),
                 {key: v.chunk(accumulate)[at] for key, v in keywords.items()})
                for at in range(accumulate)
            ]  # fmt: skip
            for part_args, part_keywords in parts:
                loss = case.loss(eager(*part_args, **part_keywords)) / accumulate
                (loss / num_data).backward()
                losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(eager.parameters(), 1e3).item()
        optimizer.step()
        args, keywords = batch[index]
        loss = step(*args, **keywords)
        norms.append((step.grad_norm.item(), norm))
        names = ("repeated_steps", "row_rounds", "copied_experts", "row_shares")
        numbers.append(tuple(step.metrics[name] for name in names))
        expected, others = eager.state_dict(), dict[str, float]()
        for key, value in step.full_state_dict().items():
            if not torch.equal(value, expected[key]):
                others[key] = (value - expected[key]).abs().max().item()
        own = losses[index * accumulate : (index + 1) * accumulate]
        if not torch.equal(loss, sum(own[1:], own[0])):
            others["loss"] = (loss - sum(own)).abs().item()
        unlike.append(others)
    measured = step.measure(*args, num_steps=1, **keywords)
    peaks = measured.peak_bytes["device"], step.plan.peak_bytes["device"]
    reasons = sorted({each.reason for each in step.plan.shardings if "experts with the most" in each.reason})
    step.close()
    monkeypatch.undo()
    return {"numbers": numbers, "unlike": unlike, "norms": norms, "peaks": peaks, "reasons": reasons}


def _run_chosen(name: str, mesh: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    return _run(name, mesh, options, (1, 2), 3, chosen=True)


_KEPT = {"recompute": "none", "offload": "none"}


def test_a_step_without_room_is_run_again_with_copies() -> None:
    """Once, whatever follows; the peak is as it is planned, and when rows have room without copies there are none."""
    mesh = {"model": 2}
    for found in run_ranks(_run, 2, "steered 1", mesh, {**_KEPT, "copied_experts": 1}, (1, 2), 5):
        repeated, rounds, copied, shares = zip(*found["numbers"], strict=True)
        assert rounds == (1,) * 5
        assert repeated == (0, 1, 1, 1, 1)
        assert copied == (0, 1, 1, 1, 0)
        assert shares[:4] == (1.0,) * 4  # two for the rank of all rows, if they were not dealt
        assert found["peaks"][0] == found["peaks"][1]
        assert all("experts" in name for name in found["unlike"][1])
        assert all(value <= 1e-6 for unlike in found["unlike"] for value in unlike.values())
        assert all(norm == pytest.approx(expected, rel=1e-6) for norm, expected in found["norms"])


@pytest.mark.days(3)
def test_each_of_four_ranks_has_as_many_rows() -> None:
    """Of even tokens two ranks have all rows, of uneven ones a single rank has them, if they are not dealt."""
    options = {**_KEPT, "copied_experts": 2}
    for found in run_ranks(_run_chosen, 4, "steered 1", {"model": 4}, options):
        assert found["numbers"] == [(1, 1, 2, 1.0)] * 3
        assert found["peaks"][0] == found["peaks"][1]
        assert all("experts" in name for name in found["unlike"][0])
        assert all(value <= 1e-6 for unlike in found["unlike"] for value in unlike.values())


@pytest.mark.days(2)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"shard": 2, "model": 2}, {"copied_experts": 1, "stage": 3}),
        ({"model": 2}, {"copied_experts": 2, "accumulate": 2}),
        ({"pipe": 2, "model": 2}, {"copied_experts": 2, "accumulate": 2}),
        ({"model": 2}, {"copied_experts": 1, "recompute": "full", "memory_budget": "8MiB"}),
    ],
    ids=str,
)
def test_copies_next_to_what_else_a_step_does(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """To the bit, in bf16, but for the copied experts' weights, until these are read."""
    num_ranks = 2 if mesh == {"model": 2} else 4
    for found in run_ranks(_run_chosen, num_ranks, "steered bf16 1", mesh, options):
        assert found["numbers"][1][2] > 0
        assert found["unlike"][0] == {}
        assert found["unlike"][1] and all("experts" in name for name in found["unlike"][1])
        assert all(value <= 2.0**-6 for unlike in found["unlike"] for value in unlike.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen3 moe", "deepseek v3", "gpt oss", "lora"])
@pytest.mark.parametrize("mesh", [{"model": 2}, {"shard": 2, "model": 2}], ids=str)
def test_copies_in_unmodified_models(mesh: dict[str, int], name: str) -> None:
    num_ranks = 2 if mesh == {"model": 2} else 4
    for found in run_ranks(_run_chosen, num_ranks, name, mesh, {"copied_experts": 2}):
        copied = [numbers[2] for numbers in found["numbers"]]
        first = next(at for at, num in enumerate(copied) if num)
        assert all(unlike == {} for unlike in found["unlike"][:first])
        assert all("experts" in key for key in found["unlike"][first])
        assert all(norm == pytest.approx(expected, rel=2.0**-7) for norm, expected in found["norms"])


@pytest.mark.days(3)
def test_there_is_room_for_rows_where_copies_take_longer() -> None:
    """Memory is slow, so that weights are; the plan says what a step takes either way."""
    options = {"copied_experts": 1, "machine": SHARING}
    for found in run_ranks(_run, 2, "steered bf16 1", {"model": 2}, options, (1, 2), 3):
        assert [numbers[2] for numbers in found["numbers"]] == [0, 0, 0]
        assert [numbers[0] for numbers in found["numbers"]] == [0, 1, 1]
        assert found["unlike"] == [{}] * 3
        (reason,) = found["reasons"]
        assert "experts with the most rows are not copied: a step takes" in reason


def _copied_after_checkpoint(folder: str) -> list[tuple[float, float]]:
    case, _ = _case("steered 1")
    (((x,), _),) = batches(case, 0, 1)
    counts = list[tuple[float, float]]()
    for number in range(2):
        model = build(case)
        step = zerofx.compile(
            model, case.optimizer(model), backend="eager", machine=COPYING, shardings=EXCHANGED, mesh={"model": 2},
            copied_experts=1,
        )  # fmt: skip
        if number:
            step.load_checkpoint(folder)
        step(make_uneven(x))
        step(make_uneven(x))
        step.save_checkpoint(folder)
        counts.append((step.metrics["repeated_steps"], step.metrics["copied_experts"]))
        step.close()
    return counts


@pytest.mark.days(3)
def test_a_checkpoint_says_that_experts_were_copied(tmp_path: Any) -> None:
    assert run_ranks(_copied_after_checkpoint, 2, str(tmp_path)) == [[(1, 1), (0, 1)]] * 2


def test_fp8_has_no_copies() -> None:
    model = nn.Linear(NUM_TOKENS, 2)
    with pytest.raises(UsageError, match="copied_experts"):
        zerofx.compile(model, sgd(model), copied_experts=1, precision="fp8")
