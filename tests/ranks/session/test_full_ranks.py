"""One tensor by name on several ranks: gathered, written by all, and refused where they differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES
from tests.lib.runs.evaluating import own_batches, step_of_case
from tests.lib.runs.training import world
from zerofx import RankMismatchError


def _full(stage: int, options: dict[str, Any]) -> list[str]:
    """What is wrong with tensors that are read and written by name, in words."""
    case, (rank, _) = CASES["gpt"], world()
    ((args, kwargs),) = own_batches(case, rank // options.get("mesh", {}).get("model", 1), 1)
    step = step_of_case(case, stage, **options)
    step(*args, **kwargs)
    wrong, expected = [], step.full_state_dict()
    paths = [path for path, _ in step.model.named_parameters()]
    for path in paths:
        with step.full(path) as tensor:
            wrong += [] if torch.equal(tensor, expected[path]) else [f"{path} is another"]
        with step.full(path, write_back=True) as tensor:
            tensor.mul_(2)
    written = step.full_state_dict()
    wrong += [f"{path} is not twice as large" for path in paths if not torch.equal(2 * expected[path], written[path])]
    path = paths[0]
    with pytest.raises(RankMismatchError, match="values of"), step.full(path, write_back=True) as tensor:
        tensor.fill_(rank)
    with pytest.raises(RankMismatchError, match="expected the same call on every rank"), step.full(paths[rank]):
        pass
    unchanged = step.full_state_dict()
    wrong += [f"{path} was written" for path in expected if not torch.equal(unchanged[path], written[path])]
    step(*args, **kwargs)
    return wrong


def _full_state_dicts(options: dict[str, Any]) -> list[str]:
    """What is wrong with whole state dictionaries, in words."""
    case, (rank, _) = CASES["gpt"], world()
    ((args, kwargs),) = own_batches(case, rank // options.get("mesh", {}).get("model", 1), 1)
    step = step_of_case(case, 3, **options)
    step(*args, **kwargs)
    with step.full_parameters() as model:
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        inside = step.full_state_dict()
    found, mine = step.full_state_dict(), step.full_state_dict(keep=rank == 1)
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    wrong += [] if found.keys() == inside.keys() == expected.keys() else ["other names"]
    wrong += [] if mine.keys() == (found.keys() if rank == 1 else set()) else ["what is kept"]
    return wrong + ([] if found["head.weight"] is found["tokens.weight"] else ["a tied weight is there twice"])


@pytest.mark.days(3)
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"mesh": {"model": 2}}], ids=str)
def test_a_whole_state_is_gathered_a_bucket_at_a_time_and_kept_where_it_is_wanted(options: dict[str, Any]) -> None:
    for rank, wrong in enumerate(run_ranks(_full_state_dicts, 2, options)):
        assert wrong == [], f"rank {rank}"


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("stage", "options"), [(0, {}), (2, {}), (3, {}), (3, {"mesh": {"model": 2}})], ids=str)
def test_reading_and_writing(stage: int, options: dict[str, Any]) -> None:
    for rank, wrong in enumerate(run_ranks(_full, 2, stage, options)):
        assert wrong == [], f"rank {rank}"


def _generated() -> list[bool]:
    """Whether texts that a model generates inside ``full_parameters()`` are those of a model with its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    model, other = (
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)) for _ in range(2)
    )
    step = zerofx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.05), backend="eager", precision="bf16")
    prompt, same = torch.randint(50, (2, 6)), []
    how: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
    }
    for _ in range(2):
        step(input_ids=prompt, labels=prompt)
        other.load_state_dict(step.full_state_dict())
        with step.full_parameters():
            same.append(torch.equal(model.eval().generate(prompt, **how), other.eval().generate(prompt, **how)))
            model.train()
    return same


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_model_generates_between_steps() -> None:
    assert run_ranks(_generated, 2) == [[True, True]] * 2
