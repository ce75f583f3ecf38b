"""The promise of exactness: training through zerofx gives the bits that plain PyTorch gives, whatever is planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, sgd
from tests.lib.runs.training import compare_runs, differences, train_compiled, train_plain

STAGES: dict[str, dict[str, Any]] = {f"stage {stage}": {"stage": stage} for stage in range(4)}
PLANS: dict[str, dict[str, Any]] = {
    "prefetch 0": {"stage": 3, "prefetch": 0},
    "prefetch 3": {"stage": 3, "prefetch": 3},
    "all kept": {"stage": 3, "keep_gathered": "all"},
}

# One spawn of ranks costs seconds: cases of a kind share one.
FAMILIES = {
    "language models": ["gpt", "tied"],
    "torch layers": ["torch layers"],
    "images": ["batchnorm", "channels last", "evaluating"],
    "image layers": ["image layers"],
    "trained in part": ["frozen", "lora", "unused", "param groups"],
    "sharing": ["borrowed", "peeking", "view as loss", "repeated", "shared module", "parametrised"],
    "sizes and dtypes": ["odd sizes", "stack", "one scalar", "mixed dtypes", "mixed in layer"],
    "buffers and dropout": ["dropout", "buffers", "swapped buffers", "evaluating dropout"],
    "llama": ["llama", "llama masked"],
    "gpt2": ["gpt2", "gpt2 dropout"],
    "bert": ["bert", "bert dropout"],
    "qwen3 next": ["qwen3 next"],
    "mixtral": ["mixtral"],
    "t5": ["t5"],
    "vit": ["vit"],
}
SLOW = {"torch layers", "image layers", "bert", "qwen3 next", "mixtral", "t5", "vit"}
SLOW_ON_RANKS = {*SLOW, "gpt2"}  # whose layers and dropout ranks train in test_accumulate.py
INTERFACES = ["arguments", "returns dict", "returns tuple", "returns list", "returns dataclass", "loss function"]


def _families(slow: set[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in FAMILIES]


def test_every_case_is_trained() -> None:
    assert sorted(CASES) == sorted([name for names in FAMILIES.values() for name in names] + INTERFACES)


def test_a_difference_of_one_bit_is_noticed() -> None:
    found = train_plain(CASES["stack"], steps=2)
    state = {name: tensor.clone() for name, tensor in found.state.items()}
    state["layers.1.up.bias"][3] = torch.nextafter(state["layers.1.up.bias"][3], torch.tensor(9.0))
    assert differences(found, found) == []
    assert [line.split()[0] for line in differences(found, replace(found, state=state))] == ["layers.1.up.bias"]


ENDS = {label: STAGES[label] for label in ("stage 0", "stage 3")}
# What two ranks train more than the first and the last stage of: layers, statistics, and a model of transformers. At
# night the first of each family is trained under every plan, and the others at every stage.
MORE = {"gpt": STAGES | PLANS, "batchnorm": STAGES, "llama": STAGES}


def _compare_family(names: list[str]) -> dict[str, list[str]]:
    found = [compare_runs([name], MORE.get(name, ENDS)) for name in names]
    return {label: wrong for one in found for label, wrong in one.items()}


def _compare_the_rest(names: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for number, name in enumerate(names):
        every, compared = STAGES if number else STAGES | PLANS, MORE.get(name, ENDS)
        found |= compare_runs([name], {label: every[label] for label in every if label not in compared})
    return found


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", _families(SLOW_ON_RANKS))
def test_two_ranks_train_like_distributed_data_parallel(family: str) -> None:
    for rank, wrong in enumerate(run_ranks(_compare_family, 2, FAMILIES[family])):
        assert wrong == {}, f"rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_train_so_under_all_other_plans(family: str) -> None:
    for rank, wrong in enumerate(run_ranks(_compare_the_rest, 2, FAMILIES[family])):
        assert wrong == {}, f"rank {rank}"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", INTERFACES)
def test_two_ranks_take_any_batch_and_find_the_loss_in_any_output(name: str) -> None:
    for rank, wrong in enumerate(run_ranks(compare_runs, 2, [name], ENDS, 0.0, 4)):
        assert wrong == {}, f"rank {rank}"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("family", _families(SLOW))
def test_one_process_trains_like_eager_mode(family: str) -> None:
    assert (
        compare_runs(FAMILIES[family][:1], ENDS) | compare_runs(FAMILIES[family][1:], {"stage 3": {"stage": 3}}) == {}
    )


MANY_RANKS = ["gpt", "odd sizes", "batchnorm", "tied"]


def _compare_on_many_ranks(names: list[str]) -> dict[str, list[str]]:
    found = {}
    for name in names:
        # Plain SGD: Adam divides a gradient that is truly zero (a key's bias) by its own rounding errors.
        case = replace(CASES[name], optimizer=sgd, steps=8)
        first = train_compiled(case, 0)
        found[f"{name}, stage 0 to plain"] = differences(train_plain(case), first, 1e-6)
        for label, options in {**STAGES, **PLANS}.items():
            if label in ("stage 1", "stage 3", "prefetch 3"):
                found[f"{name}, {label} to stage 0"] = differences(first, train_compiled(case, **options))
    return {label: wrong for label, wrong in found.items() if wrong}


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [(3, ["odd sizes"]), *(pytest.param(number, MANY_RANKS, marks=pytest.mark.slow) for number in (3, 4))],
    ids=str,
)
def test_more_ranks_train_like_distributed_data_parallel_but_for_the_order_of_sums(
    num_ranks: int, names: list[str]
) -> None:
    for rank, wrong in enumerate(run_ranks(_compare_on_many_ranks, num_ranks, names)):
        assert wrong == {}, f"rank {rank}"
