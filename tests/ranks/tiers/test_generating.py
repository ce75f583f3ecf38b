"""A model that generates between steps: its parameters are there, the optimizer's states wait, and all is as it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.training import world
from zerofx import EMA, ShardedParametersError, Step, TierError, UsageError
from zerofx.runtime.state.held import is_held

pytestmark = pytest.mark.usefixtures("drive")

TOKENS, DIM, NUM_LAYERS = 32, 32, 10


class Net(nn.Module):
    """Tokens in and out of it by the same matrix, with layers between them, one of them not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, DIM)
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(NUM_LAYERS)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[1].requires_grad_(False)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        y: Tensor = self.head(self.norm(x))
        return y

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.logits(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor) -> Tensor:
        for _ in range(3):
            tokens = torch.cat([tokens, self.logits(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


def _batch(number: int, num_stages: int = 1) -> Tensor:
    seed = 10 * number + world()[0] % max(world()[1] // num_stages, 1)
    return torch.randint(TOKENS, (4, 6), generator=torch.Generator().manual_seed(seed))


def _step(**options: Any) -> Step:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return zerofx.compile(model, optimizer, **{"backend": "eager", **options})


def _trained(options: dict[str, Any], tier: Any, by_bucket: bool) -> tuple[list[Any], dict[str, Tensor]]:
    """Losses, tokens and parameters of a training that generates after each step, in ``full_parameters()`` if ``tier``
    is None."""
    step, results = _step(**options), list[Any]()
    for number in range(3):
        batch = _batch(number, options.get("mesh", {}).get("pipe", 1))
        results.append(float(step(batch)))
        before = step.tiers()
        with step.full_parameters() if tier is None else step.generating(tier) as model:
            assert isinstance(model, Net)
            if tier is not None:
                now, held = step.tiers(), [is_held(parameter) for parameter in model.parameters()]
                assert all(held) if by_bucket else not any(held)
                if step.options.offload == "none":  # states are as large as parameters, twice
                    assert now["device"] < 0.6 * before["device"] and now[tier] > 0.4 * before["device"]
                with pytest.raises(UsageError, match="outside full_parameters"):
                    step(batch)
            results.append(model.generate(batch[:1]).tolist())
            if by_bucket:
                with pytest.raises(ShardedParametersError):
                    model.norm.weight.sum()
        assert step.tiers()["device"] == before["device"]
    whole = step.full_state_dict()
    step.close()
    return results, whole


CASES: list[tuple[str, bool, dict[str, Any]]] = [
    ("host", False, {"stage": 0, "offload": "none"}),
    ("nvme", False, {"stage": 1, "precision": "bf16"}),
    ("host", False, {"stage": 2, "average": EMA(0.9), "offload": "none"}),
    ("host", True, {"stage": 3, "offload": "host", "memory_budget": 36_000}),
]

IN_STAGES: list[tuple[bool, dict[str, Any]]] = [
    (False, {"stage": 0, "offload": "none"}),
    (True, {"offload": "host", "memory_budget": 45_000}),
]


def _in_stages(mesh: dict[str, int], tier: Any) -> list[Any]:
    return [
        _trained(options | {"mesh": mesh} if "pipe" in mesh else {"mesh": mesh}, tier, "pipe" in mesh and by_bucket)
        for by_bucket, options in IN_STAGES
    ]


def _wrong(drive: str) -> list[str]:
    os.environ["ZEROFX_NVME_DIR"] = drive
    wrong = []
    for tier, by_bucket, options in CASES:
        (plain, parameters), (generated, same) = _trained(options, None, False), _trained(options, tier, by_bucket)
        wrong += [] if plain == generated else [f"{tier} {options}: {plain} and {generated}"]
        wrong += [f"{tier} {options}: {n}" for n in parameters if not torch.equal(parameters[n], same[n])]
    return wrong


@pytest.mark.days(3)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training_is_the_same_and_tokens_are_those_of_the_whole_model(num_ranks: int, drive: Path) -> None:
    wrong = run_ranks(_wrong, num_ranks, str(drive)) if num_ranks > 1 else [_wrong(str(drive))]
    assert wrong == [[]] * num_ranks


@pytest.mark.parametrize(
    "mesh", [{"pipe": 2}, pytest.param({"pipe": 2, "shard": 2}, marks=pytest.mark.slow)], ids=["2", "2 x 2"]
)
def test_stages_generate_the_tokens_that_ranks_without_stages_do(mesh: dict[str, int]) -> None:
    """Also tied: what reads a matrix of the first stage in the last is given it."""
    shard = mesh.get("shard", 1)
    alone = {"shard": shard}
    expected = [_in_stages(alone, None)] if shard == 1 else run_ranks(_in_stages, shard, alone, None)
    for rank, outcomes in enumerate(run_ranks(_in_stages, 2 * shard, mesh, "host")):
        for (results, whole), (plain, parameters) in zip(outcomes, expected[rank % shard], strict=True):
            assert results == plain
            assert whole.keys() == parameters.keys() and all(torch.equal(whole[n], parameters[n]) for n in whole)


def test_what_fails_leaves_all_as_it_was() -> None:
    step, other = _step(host_budget=8192, memory_budget=1 << 20), _step()
    with other.generating() as model:  # before the first step, the model as it is
        assert model is other.model
    losses = [float(step(_batch(number))) for number in range(2)]
    before = step.tiers()
    with pytest.raises(TierError, match="raise host_budget"), step.generating():
        pass
    assert step.tiers() == before
    expected = "expected states to wait on 'host' or 'nvme', found 'disk'"
    with pytest.raises(UsageError, match=expected), step.generating("disk"):  # type: ignore[arg-type]
        pass
    assert [float(other(_batch(number))) for number in range(2)] == losses
    with pytest.raises(RuntimeError, match="of its own"), other.generating():
        raise RuntimeError("of its own")
    assert float(other(_batch(2))) == float(step(_batch(2)))
