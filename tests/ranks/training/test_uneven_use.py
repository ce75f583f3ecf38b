"""Models and batches that use parameters unevenly, over ranks and over the model; those that broke ZeRO elsewhere.

``REPORTED`` says of each what trains it here, or refuses it, and where that is tested.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.lib.checkout import ROOT
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, DIM, Case, Stack
from tests.lib.runs.training import build, differences, train_compiled, train_plain

HERE, EXACT = "training/test_uneven_use.py", "training/test_exact.py"
TRAINS = "test_two_ranks_train_like_distributed_data_parallel"

# What broke ZeRO in other libraries, by what was reported there: the test here, and the cases of ``CASES`` in it.
REPORTED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "a layer that is called in a loop": (EXACT, TRAINS, ("repeated", "shared module")),
    "an embedding that is the output layer's": (EXACT, TRAINS, ("tied", "llama masked")),
    "a frozen base with adapters": (EXACT, TRAINS, ("lora",)),
    "parameters that some ranks use": (HERE, "test_experts_that_some_ranks_leave_idle", ()),
    "a branch that differs by rank": (HERE, "test_a_branch_that_differs_by_rank_is_refused_on_all", ()),
    "parameters that nothing uses": (EXACT, TRAINS, ("unused",)),
    "parameters of no elements": (EXACT, TRAINS, ("odd sizes",)),
    "fewer elements than ranks": (EXACT, TRAINS, ("one scalar",)),
    "sizes that no number of ranks divides": (EXACT, TRAINS, ("odd sizes", "stack")),
    "several dtypes in one gather": (EXACT, TRAINS, ("mixed dtypes", "mixed in layer")),
    "outputs in containers": (
        EXACT, "test_two_ranks_take_any_batch_and_find_the_loss_in_any_output", ("returns tuple", "returns dict")
    ),
    "a module that returns its parameter": (EXACT, TRAINS, ("borrowed",)),
    "a parameter that is used outside its owner": (EXACT, TRAINS, ("borrowed",)),
    "a param group of frozen parameters alone": (HERE, "test_a_group_of_frozen_parameters_alone", ()),
    "frozen parameters that are computed with again": (HERE, "test_frozen_parameters_are_computed_with_again", ()),
    "several backwards before a step": ("training/test_accumulate.py", "test_one_process_trains_like_a_loop", ()),
    "several backwards before a step, offloaded": (
        "training/test_accumulate.py", "test_what_was_offloaded_comes_back_in_its_own_micro_batch", ()
    ),
    "saving in mid-accumulation": (
        "../train/session/test_checkpoints.py", "test_nothing_is_saved_or_loaded_between_micro_batches", ()
    ),
    "experts that are idle": (HERE, "test_experts_that_some_ranks_leave_idle", ()),
    "sequences of other lengths on each rank": (
        "session/test_ranks.py", "test_ranks_that_differ_are_named_at_once", ()
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REPORTED)
def test_each_is_tested_where_the_table_says(what: str) -> None:
    file, name, cases = REPORTED[what]
    source = Path(ROOT, "tests", "ranks", file).read_text(encoding="utf-8")
    assert name in {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert set(cases) <= set(CASES)


class Experts(nn.Module):
    """Each row goes to one of four experts, by its first number; an expert without rows has gradients of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        chosen = x[:, :1].long().clamp(0, 3)
        x = sum((expert(x) * (chosen == number) for number, expert in enumerate(self.experts)), torch.zeros(()))
        loss: Tensor = (self.head(torch.tanh(x)) - target).square().mean()
        return loss


def _few_experts(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(4, DIM, generator=generator)
    x[:, 0] = torch.tensor([0.0, 0.5, 1.0, 1.5]) + 2 * (dist.get_rank() if dist.is_initialized() else 0)
    return (x, torch.randn(4, DIM, generator=generator)), {}


def _train_experts() -> list[list[str]]:
    case = Case(Experts, _few_experts)
    expected = train_plain(case, 4)
    return [differences(expected, train_compiled(case, stage, 4)) for stage in (1, 3)]


class _Branching(Stack):
    def predict(self, x: Tensor) -> Tensor:
        return super().predict(x) if dist.get_rank() == 0 else self.layers[0](x)


def _refused(model: nn.Module, batch: tuple[Tensor, ...]) -> str:
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, backend="eager")
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(zerofx.ZeroFXError) as caught:
        step(*batch)
    assert all(map(torch.equal, before, model.parameters()))
    step.close()
    return str(caught.value)


def _on_two_ranks() -> tuple[list[list[str]], str]:
    return _train_experts(), _refused(_Branching(), (torch.randn(4, DIM), torch.randn(4, DIM)))


@pytest.fixture(scope="module")
def on_two_ranks() -> list[tuple[list[list[str]], str]]:
    return run_ranks(_on_two_ranks, 2)


def test_experts_that_some_ranks_leave_idle(on_two_ranks: list[Any]) -> None:
    assert [found[0] for found in on_two_ranks] == [[[], []]] * 2


def test_a_branch_that_differs_by_rank_is_refused_on_all(on_two_ranks: list[Any]) -> None:
    assert all("captured graph" in found[1] for found in on_two_ranks)


def test_a_group_of_frozen_parameters_alone() -> None:
    def in_groups(model: nn.Module) -> torch.optim.Optimizer:
        by_name = dict(model.named_parameters())
        first = [parameter.requires_grad_(False) for name, parameter in by_name.items() if "layers.0." in name]
        rest = [parameter for parameter in by_name.values() if parameter.requires_grad]
        groups: list[dict[str, Any]] = [{"params": first, "lr": 0.1}, {"params": rest}]
        return torch.optim.AdamW(groups, foreach=False)

    case = Case(Stack, CASES["stack"].batch, optimizer=in_groups)
    for stage in (0, 3):
        assert differences(train_plain(case, 3), train_compiled(case, stage, 3)) == []


@pytest.mark.parametrize("name", ["lora", pytest.param("frozen", marks=pytest.mark.slow)])
def test_frozen_parameters_are_computed_with_again(name: str) -> None:
    case = CASES[name]
    found = train_compiled(case, 3, 3, recompute="full")
    assert differences(train_plain(case, 3), found) == []
    model = build(case)
    step = zerofx.compile(model, case.optimizer(model), 3, backend="eager", recompute="full", loss_fn=case.loss_fn)
    step(*case.batch(torch.Generator().manual_seed(0))[0])
    assert step.plan.recomputes
