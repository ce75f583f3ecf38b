"""Rows of experts that find no room at once: sent in rounds, within the planned bytes, whatever the routing does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import Case, batches, sgd
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import build
from tests.ranks.meshes.test_exchanged_rows import EXCHANGED, MODELS, Experts, Order, whole_elsewhere
from zerofx import UsageError
from zerofx.driver import shardings
from zerofx.session import steps

NUM_TOKENS, WIDTH, NUM_EXPERTS = 256, 64, 4


class Steered(nn.Module):
    """Layers of experts, of which a token's first feature chooses: one, or two that lie on one rank."""

    def __init__(self, top: int) -> None:
        super().__init__()
        gates = [nn.Linear(WIDTH, NUM_EXPERTS, bias=False) for _ in range(2)]
        with torch.no_grad():
            for gate in gates:
                gate.weight[:, 0] = torch.tensor([3.0, 2.0, -3.0, -2.0])
        self.gates = nn.ModuleList(gates)
        self.experts = nn.ModuleList(Experts(top, 0.0, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for gate, layer in zip(self.gates, self.experts, strict=True):
            x = x + layer(x, gate(x))
        return x.square().mean()


def even_tokens(generator: torch.Generator, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(NUM_TOKENS, WIDTH, generator=generator)
    x[:, 0] = torch.tensor([8.0, -8.0]).repeat(NUM_TOKENS // 2)  # half of each rank's tokens for each rank
    return (x.to(dtype),), {}


def make_uneven(x: Tensor) -> Tensor:
    """The same tokens, all of which have the experts of the first rank."""
    return torch.cat([x[:, :1].abs(), x[:, 1:]], 1)


def _run(top: int, dtype: torch.dtype, options: dict[str, Any], num_steps: int, room: float = 1.0) -> dict[str, Any]:
    """Steps, the seventh and the eighth with all tokens to one rank's experts, within ``room`` times the bytes of even
    routing."""
    case = Case(lambda: Steered(top).to(dtype), lambda generator: even_tokens(generator, dtype), optimizer=sgd)
    given = {"backend": "eager", "machine": SHARING, "shardings": EXCHANGED, "mesh": {"model": 2}, **options}
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(shardings, "apply_pins", whole_elsewhere)
    ((first, _),) = batches(case, 0, 1)
    model = build(case)
    free = zerofx.compile(model, case.optimizer(model), **given)
    free.prepare(*first)
    budget = int(room * free.plan.peak_bytes["device"])
    free.close()
    model, eager = build(case), build(case)
    optimizer = case.optimizer(eager)
    step = zerofx.compile(model, case.optimizer(model), memory_budget=budget, **given)
    step(*first)
    eager(*first).backward()
    optimizer.step()
    peaks, seen, unlike = list[tuple[int, int]](), list[tuple[int, int, float]](), list[tuple[int, str, float]]()
    for number, ((x,), _) in enumerate(batches(case, 0, num_steps), 2):
        batch = make_uneven(x) if number in (7, 8) else x
        optimizer.zero_grad()
        eager(batch).backward()
        optimizer.step()
        measured = step.measure(batch, num_steps=1)
        peaks.append((measured.peak_bytes["device"], step.plan.peak_bytes["device"]))
        seen.append((int(step.metrics["repeated_steps"]), int(step.metrics["row_rounds"]), step.metrics["row_shares"]))
        expected = eager.state_dict()
        for name, value in step.full_state_dict().items():
            if not torch.equal(value, expected[name]):
                unlike.append((number, name, (value - expected[name]).abs().max().item()))
    monkeypatch.undo()
    with Order() as order:
        step(*first)
    rounds, exchanges = int(step.metrics["row_rounds"]), order.exchanges("round_routes")
    step.close()
    return {"exchanges": (rounds, *exchanges), "budget": budget, "peaks": peaks, "seen": seen, "unlike": unlike}


_KEPT = {"recompute": "none", "offload": "none"}
_SEEN = [*[(0, 1)] * 5, (1, 2), (2, 2)]
"""How often a step was run again so far, and the number of its rounds, in steps 2 to 8."""


def test_whatever_the_routing_does_the_peak_is_as_planned() -> None:
    """In rounds where routing is uneven; no row is left out."""
    for found in run_ranks(_run, 2, 2, torch.float32, _KEPT, 7):
        assert all(measured == planned <= found["budget"] for measured, planned in found["peaks"])
        assert [seen[:2] for seen in found["seen"]] == _SEEN
        assert [shares for *_, shares in found["seen"][5:]] == [2.0, 2.0]
        assert all(difference <= 1e-6 for *_, difference in found["unlike"])
        # A step that is in rounds from its begin, in which the host reads the flag first, where the last layer is about
        # to be updated: after two rounds of three exchanges of each layer in forward, and of five in its backward.
        assert found["exchanges"] == (2, 2 * (3 + 3 + 5 + 4), 2 * (3 + 3 + 5))


@pytest.mark.days(3)
def test_rows_in_rounds_have_the_bits_of_one_process_where_each_expert_has_one() -> None:
    """What kernels hold in 16 bits for the rows of a group is counted for the worst routing, next to gradients of
    weights that rounds add up, which even routing has none of."""
    for found in run_ranks(_run, 2, 2, torch.bfloat16, _KEPT, 7, 1.02):
        assert found["unlike"] == []
        assert all(measured <= planned <= found["budget"] for measured, planned in found["peaks"])
        assert [seen[:2] for seen in found["seen"]] == _SEEN


def _ids(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = torch.randint(0, 32, (32, 16), generator=generator)
    return (), {"input_ids": ids, "labels": ids}


def _run_biased(num_steps: int) -> dict[str, Any]:
    """Steps of experts with biases, of which all tokens have one rank's two, within the bytes of even routing."""
    case = replace(MODELS["gpt oss"], batch=_ids)
    given: dict[str, Any] = {"backend": "eager", "machine": SHARING, "shardings": EXCHANGED, "mesh": {"model": 2}}
    given |= {**_KEPT, "tile": "none"}
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(shardings, "apply_pins", whole_elsewhere)
    inputs = [keywords for _, keywords in batches(case, 0, num_steps)]
    model = build(case)
    free = zerofx.compile(model, case.optimizer(model), **given)
    free.prepare(**inputs[0])
    budget = free.plan.peak_bytes["device"]
    free.close()
    models = [build(case) for _ in range(2)]
    with torch.no_grad():
        for name, parameter in [item for each in models for item in each.named_parameters()]:
            if name.endswith("router.bias"):
                parameter[:2] += 100
    model, eager = models
    optimizer = case.optimizer(eager)
    step = zerofx.compile(model, case.optimizer(model), memory_budget=budget, **given)
    peaks, rounds, unlike = list[tuple[int, int]](), list[int](), list[tuple[int, str]]()
    for number, keywords in enumerate(inputs, 1):
        optimizer.zero_grad()
        eager(**keywords).loss.backward()
        optimizer.step()
        measured = step.measure(**keywords, num_steps=1)
        peaks.append((measured.peak_bytes["device"], step.plan.peak_bytes["device"]))
        rounds.append(int(step.metrics["row_rounds"]))
        expected = eager.state_dict()
        unlike += [(number, k) for k, value in step.full_state_dict().items() if not torch.equal(value, expected[k])]
    monkeypatch.undo()
    step.close()
    return {"budget": budget, "peaks": peaks, "rounds": rounds, "unlike": unlike}


@pytest.mark.days(3)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_experts_with_biases_have_their_rows_in_rounds_to_the_bit() -> None:
    for found in run_ranks(_run_biased, 2, 4):
        assert found["unlike"] == []
        assert all(measured <= planned <= found["budget"] for measured, planned in found["peaks"])
        assert min(found["rounds"]) > 1


@pytest.mark.days(3)
def test_rows_are_in_rounds_between_compiled_regions() -> None:
    for found in run_ranks(_run, 2, 2, torch.float32, {**_KEPT, "backend": "inductor", "cuda_graphs": "auto"}, 7):
        assert all(max(peaks) <= found["budget"] for peaks in found["peaks"])
        assert [seen[:2] for seen in found["seen"]] == _SEEN
        assert all(difference <= 1e-6 for *_, difference in found["unlike"])
        assert found["exchanges"][0] == 2


def _refuse_graphs() -> str:
    """The error of a step that sends rows as CUDA graphs, where the machine has these."""
    case = MODELS["by hand"]
    model = build(case)
    ((first, _),) = batches(case, 0, 1)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(steps, "machine_obstacle", lambda device: "")
    step = zerofx.compile(
        model, case.optimizer(model), backend="eager", machine=SHARING, shardings=EXCHANGED, mesh={"model": 2},
        cuda_graphs=True,
    )  # fmt: skip
    with pytest.raises(UsageError) as error:
        step.prepare(*first)
    monkeypatch.undo()
    return str(error.value)


def test_steps_that_send_rows_are_no_cuda_graphs() -> None:
    """So that none has to be recorded again where rows go in rounds."""
    for message in run_ranks(_refuse_graphs, 2):
        assert "ranks share what layers compute, in buffers that are made again in each step" in message
