"""What ranks run that share a GPU, or have one each: each case gives what is wrong, in words. On a CPU the same, on
streams that are played."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import zerofx
from tests.compiled.cuda_stand_in.streams import on_streams
from tests.lib.devices import deterministic, moved
from tests.lib.models import CASES, Case, batches
from tests.lib.runs import training
from tests.lib.runs.training import build, differences, train_compiled, train_plain
from zerofx.runtime.comm.nccl import Nccl
from zerofx.runtime.measure.spans import SpanLog
from zerofx.scheduler.cost.machine import Link, Machine

STEPS = 3
# Links so slow that computation hides nothing, between nodes of one rank.
SLOW = replace(
    Machine.named("h100-sxm"),
    name="slow",
    intra_node=Link(1e6, 1e-6),
    inter_node=Link(1e5, 1e-6),
    ranks_per_node=1,
)


@contextlib.contextmanager
def streams_of(device: torch.device) -> Iterator[None]:
    """A GPU's streams, or streams that are played on a CPU."""
    if device.type == "cuda":
        with deterministic():
            yield
        return
    with on_streams() as streams:
        yield
    assert not streams.races, streams.races


def _case(name: str, device: torch.device) -> Case:
    return moved(CASES[name], device)


def plain(device: torch.device, stage: int, **options: Any) -> list[str]:
    """Next to DistributedDataParallel: two ranks add up in one order, so in the same bits where no norm is taken."""
    case = _case("gpt", device)
    eager = {name: options[name] for name in ("accumulate", "max_grad_norm") if name in options}
    expected = train_plain(case, STEPS, **eager)
    with streams_of(device):
        trained = train_compiled(case, stage, STEPS, reduce="once", **options)
    return differences(expected, trained, 1e-5 if "max_grad_norm" in options else 0.0)


def merged(device: torch.device) -> list[str]:
    """Several gathers as one launch."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    sizes = (3, 1, 0, 4096)
    with streams_of(device):
        transport = Nccl(group, device, SpanLog())
        shards = [torch.full((size,), 10.0 * size + rank, device=device) for size in sizes]
        fulls = [shard.new_empty(2 * len(shard)) for shard in shards]
        transport.all_gather_many(fulls, shards).finish(None)
        gathered = [full.cpu() for full in fulls]
    wanted = [torch.cat([torch.full((size,), 10.0 * size + r) for r in range(2)]) for size in sizes]
    return [f"{len(full)} elements" for full, right in zip(gathered, wanted, strict=True) if not full.equal(right)]


def unlike(device: torch.device, name: str, stage: int, changed: dict[str, Any], tolerance: float = 0.0) -> list[str]:
    """What differs between a step and the same with other options."""
    case = _case(name, device)
    with streams_of(device):
        before, after = (train_compiled(case, stage, 2 * STEPS, **options) for options in ({}, changed))
    return differences(before, after, tolerance)


def on_a_mesh(device: torch.device) -> list[str]:
    """Slices inside replicas: two communicators on one device, next to one; four ranks add up in another order."""
    return unlike(device, "stack", 3, {"mesh": {"replicate": 2, "shard": 2}}, tolerance=1e-3)


def in_few_bits(device: torch.device) -> list[str]:
    """Codes through exchanges, between nodes of one rank each: near the exact training, and not it."""
    case, rounded = _case("stack", device), {"wire": "int8", "machine": SLOW}
    with streams_of(device):
        exact, few = (train_compiled(case, 3, STEPS, **options) for options in ({}, rounded))
    return differences(exact, few, tolerance=0.1) or ([] if differences(exact, few) else ["nothing was rounded"])


def offloaded(device: torch.device) -> list[str]:
    """Activations and states on the host, within what does not hold them."""
    case = _case("gpt", device)
    model = build(case)
    with streams_of(device):
        step = zerofx.compile(model, case.optimizer(model), 3, backend="eager")
        ((args, kwargs),) = batches(case, dist.get_rank(), 1)
        step(*args, **kwargs)
        peak = step.plan.peak_bytes["device"]
        step.close()
    return unlike(device, "gpt", 3, {"memory_budget": int(0.9 * peak), "offload": "host", "recompute": "none"})


def _sequences(generator: torch.Generator) -> Any:
    ids = torch.randint(19, (8, 8), generator=generator)
    return (ids[:, :-1], ids[:, 1:]), {}


def in_stages(device: torch.device, accumulate: int, **options: Any) -> list[str]:
    """Next to one process with as many micro-batches: all ranks are given one batch, and add up nothing together."""
    case = moved(replace(CASES["gpt"], batch=_sequences), device)
    with mock.patch.object(training, "world", return_value=(0, 1)):
        expected = train_plain(case, STEPS, accumulate=accumulate)
        with streams_of(device):
            trained = train_compiled(case, 3, STEPS, accumulate=accumulate, **options)
    return differences(expected, trained)


def graphed(device: torch.device) -> list[str]:
    """Collectives between CUDA graphs."""
    return [line for stage in (0, 3) for line in unlike(device, "gpt", stage, {"cuda_graphs": True})]


@dataclass(frozen=True)
class OnRanks:
    """A case on so many ranks; ``of_gpus``: there is nothing of it on a CPU."""

    run: Callable[..., list[str]]
    num_ranks: int = 2
    args: tuple[Any, ...] = ()
    of_gpus: bool = False


RUNS = {
    **{f"stage {stage}": OnRanks(plain, args=(stage,)) for stage in range(4)},
    "merged gathers": OnRanks(merged),
    "micro-batches": OnRanks(partial(plain, accumulate=2), args=(3,)),
    "clipped": OnRanks(partial(plain, max_grad_norm=0.5), args=(3,)),
    "two communicators": OnRanks(on_a_mesh, num_ranks=4),
    "few bits": OnRanks(in_few_bits),
    "graphs": OnRanks(graphed, of_gpus=True),
    "on the host": OnRanks(offloaded),
    **{
        f"stages, {order}": OnRanks(partial(in_stages, accumulate=4, mesh={"pipe": 2}, order=order))
        for order in ("micro-batch", "layer", "zero-bubble", "interleaved", "round-robin")
    },
}


def run(device: torch.device, name: str) -> list[str]:
    """What is wrong on this rank."""
    case = RUNS[name]
    return case.run(device, *case.args)
