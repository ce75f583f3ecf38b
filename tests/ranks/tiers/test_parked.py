"""A step that is parked between phases: no bytes on the device, the same bits, brought up by whatever comes next."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.training import world
from zerofx import EMA, ShardedParametersError, Step, TierError, UsageError

pytestmark = pytest.mark.usefixtures("drive")

DIM = 32


class Net(nn.Module):
    """Layers, one of them not trained, and a norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(3)])
        self.norm = nn.BatchNorm1d(DIM)
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        loss: Tensor = self.norm(x).square().mean()
        return loss


def _batch(number: int) -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(10 * number + world()[0]))


def _step(**options: Any) -> Step:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return zerofx.compile(model, optimizer, **{"backend": "eager", **options})


def _bytes_alive() -> int:
    """Bytes of all tensors that Python knows of."""
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _next(step: Step, folder: str) -> dict[str, Callable[[], object]]:
    """What may come after a phase in which the step was parked."""

    def look() -> None:
        with step.full_parameters() as model:
            assert all(parameter.isfinite().all() for parameter in model.parameters())

    return {
        "a step": lambda: None,
        "unpark": step.unpark,
        "evaluation": lambda: step.evaluate(_batch(99)),
        "whole parameters": look,
        "whole parameters, copied": step.full_state_dict,
        "a checkpoint": lambda: step.save_checkpoint(folder),
        "states": step.optimizers[0].state_dict,
        "loaded states": lambda: step.optimizers[0].load_state_dict(step.optimizers[0].state_dict()),
        "parked again": lambda: step.park("host"),
    }


def _trained(options: dict[str, Any], tier: str | None, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of a training that is parked after each step, if ``tier`` says where."""
    step, losses = _step(**options), list[float]()
    uses = list(_next(step, folder).values())
    for number, use in enumerate(uses):
        losses.append(float(step(_batch(number))))
        held = step.tiers()
        if tier is not None:
            # Blocks of the host's are there from the first time on; what ranks share is no tensor's own.
            counts = number == 1 and world()[1] == 1
            alive = _bytes_alive() if counts else 0
            step.park(tier)  # type: ignore[arg-type]
            now = step.tiers()
            assert now["device"] == 0 and now[tier] > held.get(tier, 0) + 0.99 * held["device"], (now, held)
            assert not counts or alive - _bytes_alive() > 0.9 * held["device"]
            with pytest.raises(ShardedParametersError):
                step.model.get_buffer("norm.running_mean").sum()
            with pytest.raises(ShardedParametersError):
                step.model.get_parameter("norm.weight").sum()
        use()
    whole = step.full_state_dict()
    step.close()
    assert all(type(parameter) is nn.Parameter for parameter in step.model.parameters())
    return losses, whole


CASES: list[tuple[str, dict[str, Any]]] = [
    ("host", {"stage": 0}),
    ("nvme", {"stage": 1, "precision": "bf16"}),
    ("host", {"stage": 2, "average": EMA(0.9)}),
    ("host", {"stage": 3, "offload": "host", "memory_budget": 40_000}),
    ("nvme", {"stage": 3, "precision": zerofx.Precision("fp16")}),
]


def _wrong(drive: str, folder: str) -> list[str]:
    os.environ["ZEROFX_NVME_DIR"] = drive
    wrong = []
    for number, (tier, options) in enumerate(CASES):
        place = f"{folder}/{number}"
        (losses, parameters), (parked, same) = _trained(options, None, place), _trained(options, tier, place)
        wrong += [] if losses == parked else [f"{tier} {options}: losses {losses} and {parked}"]
        wrong += [f"{tier} {options}: {n}" for n in parameters if not torch.equal(parameters[n], same[n])]
    return wrong


@pytest.mark.days(3)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training_is_the_same_and_takes_nothing_of_the_device_meanwhile(
    num_ranks: int, drive: Path, tmp_path: Path
) -> None:
    args = (str(drive), str(tmp_path))
    found = run_ranks(_wrong, num_ranks, *args) if num_ranks > 1 else [_wrong(*args)]
    assert found == [[]] * num_ranks


def test_what_cannot_be_parked_is_as_it_was() -> None:
    step, other = _step(host_budget=8192, memory_budget=1 << 20), _step()
    with pytest.raises(UsageError, match="once a step has been prepared"):
        other.park()
    losses = [float(step(_batch(number))) for number in range(2)]
    before = step.tiers()
    with pytest.raises(TierError, match="raise host_budget"):
        step.park("host")
    assert step.tiers() == before
    with pytest.raises(UsageError, match="expected to park the step on 'host' or 'nvme', found 'disk'"):
        step.park("disk")  # type: ignore[arg-type]
    assert [float(other(_batch(number))) for number in range(2)] == losses
    assert float(other(_batch(2))) == float(step(_batch(2)))


def test_a_step_that_reads_the_model_brings_it_up() -> None:
    read, student = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
    teacher = zerofx.compile(
        read, torch.optim.SGD(read.parameters(), lr=0.1), backend="eager", loss_fn=lambda y: y.square().mean()
    )
    teacher(_batch(0))

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = (model(x) - read(x)).square().mean()
        return loss

    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    step = zerofx.compile(student, optimizer, forward=forward, backend="eager")
    losses = [float(step(_batch(1)))]
    teacher.park()
    assert teacher.tiers()["device"] == 0
    losses.append(float(step(_batch(1))))
    assert teacher.tiers()["device"] > 0 and losses[1] < losses[0]
    step.close()
    teacher.close()


@pytest.mark.slow
def test_it_takes_the_time_of_copies() -> None:
    """The best of several rounds, next to copies of as many bytes, by a thread as those between tiers are, to memory
    that is there, and back into some that is not."""
    model = nn.Sequential(*[nn.Linear(3072, 3072) for _ in range(2)])
    step = zerofx.compile(
        model, torch.optim.AdamW(model.parameters()), backend="eager", loss_fn=lambda y: y.square().mean()
    )
    step(torch.randn(2, 3072))
    size = step.tiers()["device"] // 6
    device, host = ([torch.ones(size, dtype=torch.uint8) for _ in range(6)] for _ in range(2))
    parked, plain = list[float](), list[float]()

    def copy() -> list[Tensor]:
        for into, source in zip(host, device, strict=True):
            into.copy_(source)
        device.clear()
        return [torch.empty(size, dtype=torch.uint8).copy_(source) for source in host]

    with ThreadPoolExecutor(1) as thread:
        for _ in range(10):
            begin = time.perf_counter()
            step.park()
            step.unpark()
            parked.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            device = thread.submit(copy).result()
            plain.append(time.perf_counter() - begin)
    assert min(parked) <= 1.15 * min(plain), (min(parked), min(plain))
