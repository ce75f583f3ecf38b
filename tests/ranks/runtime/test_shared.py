"""Buckets in memory that ranks share: gathers of them move nothing, and give what copying gives."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, batches
from tests.lib.runs.training import build, differences, train_compiled, train_plain
from zerofx.ir.buckets import BucketLayout
from zerofx.runtime.comm.collectives import make_transport
from zerofx.runtime.comm.gloo import PointToPoint
from zerofx.runtime.comm.groups import Communicators
from zerofx.runtime.comm.same_host import channels, shared
from zerofx.runtime.comm.transport import Transport
from zerofx.runtime.executor import Runtime
from zerofx.runtime.measure.spans import SpanLog
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.scheduler.plan.mesh import SHARD, Mesh

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name that is shared is Linux's")
CPU = torch.device("cpu")


def _transport() -> Transport:
    found = make_transport(dist.group.WORLD, CPU, 60.0, SpanLog())
    assert isinstance(found, PointToPoint)
    return found


def _runtime(transport: Transport) -> Runtime:
    mesh = Mesh(shard=dist.get_world_size())
    found = Runtime(BucketLayout((), mesh), Communicators(transport, mesh, [SHARD]), CPU, Tiers(CPU, []))
    found.begin({}, lambda: None)
    return found


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:zerofx")


def _in_one_piece() -> dict[str, Any]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    transport, found = _transport(), dict[str, Any]()
    ours = _runtime(transport)
    for size in (1, 3, 1000, 300_001):
        shard = transport.share(torch.arange(size) * 10.0 + rank)
        full = ours.wait(ours.all_gather(shard, 0, num_ranks, in_place=True))
        found[f"values of {size}"] = full.tolist() == [
            n * 10.0 + peer for peer in range(num_ranks) for n in range(size)
        ]
        dist.barrier()
        shard.add_(1)
        dist.barrier()
        found[f"no copy of {size}"] = full[:: max(1, size)].tolist() == [peer + 1.0 for peer in range(num_ranks)]
        copied = ours.wait(ours.all_gather(shard, 0, num_ranks))
        found[f"copied {size}"] = torch.equal(copied, full) and copied.data_ptr() != full.data_ptr()
        dist.barrier()
    found["sent"] = transport.sent_to[(rank + 1) % num_ranks]
    plain = torch.ones(5)
    found["not shared"] = ours.wait(ours.all_gather(plain, 0, num_ranks, in_place=True)).tolist() == [1.0] * 15
    found["mapped"] = _mapped()
    del shard, full, copied
    gc.collect()
    found["left"] = _mapped()
    return found


@linux
def test_three_ranks_read_each_others_slices_where_they_lie() -> None:
    for found in run_ranks(_in_one_piece, 3):
        assert found.pop("sent") == 2 * sum(size * 4 for size in (1, 3, 1000, 300_001))
        assert found.pop("mapped") == 1 and found.pop("left") == 0
        assert all(found.values()), found


def _held() -> list[bool]:
    """Whether the planned buffer is there while the gathered one is, and after it."""
    transport = _transport()
    shard, buffer = transport.share(torch.ones(1000)), torch.empty(2000)
    planned = weakref.ref(buffer)
    full = transport.read_in_place(buffer, shard)
    assert full is not None
    view = full[5:]
    del buffer, full
    found = [planned() is not None]
    del view
    return [*found, planned() is None]


@linux
def test_what_is_planned_for_a_gathered_bucket_is_taken_until_its_last_view_is_gone() -> None:
    assert run_ranks(_held, 2) == [[True, True], [True, True]]


def _joined() -> list[list[float]]:
    """Gathers that start together, some of which copy."""
    transport, rank = _transport(), dist.get_rank()
    ours, plain = _runtime(transport), torch.full((2,), 5.0 + rank)
    shard = transport.share(torch.full((2,), 1.0 + rank))
    started = [
        ours.all_gather(shard, 0, 2, 2, in_place=True),
        ours.all_gather(plain, 1, 2, 1),
        ours.all_gather(shard, 2, 2, in_place=True),
    ]
    return [ours.wait(one).tolist() for one in started]


@linux
def test_gathers_in_place_and_others_start_together() -> None:
    assert run_ranks(_joined, 2) == [[[1.0, 1.0, 2.0, 2.0], [5.0, 5.0, 6.0, 6.0], [1.0, 1.0, 2.0, 2.0]]] * 2


def _not_permitted(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


def _refused() -> list[bool]:
    """Where one rank may not open another's memory, where it is not that memory, and where pairs differ."""
    found = []
    for module, name, on_rank, refusal in (
        (os, "open", 1, _not_permitted),
        (os, "memfd_create", 0, _not_permitted),
        (shared, "_open_mapping", 1, lambda *_: None),
        (channels, "read_memory", 1, _not_permitted),
    ):
        with pytest.MonkeyPatch.context() as patched:
            if dist.get_rank() == on_rank:
                patched.setattr(module, name, refusal)
            transport, mine = _transport(), torch.ones(3) * dist.get_rank()
            found.append(transport.share(mine) is mine)
            full = _runtime(transport).wait(_runtime(transport).all_gather(mine, 0, 3, in_place=True))
            found.append(full.tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3)
    return found


@linux
def test_ranks_copy_where_one_of_them_may_not_share() -> None:
    assert all(all(found) for found in run_ranks(_refused, 3))


_NAMES = ("stack", "lora", "tied")


def _trained() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _NAMES:
        case = CASES[name]
        found[name] = differences(train_plain(case, 3), train_compiled(case, 3, 3))
        model = build(case)
        step = zerofx.compile(model, case.optimizer(model), 3, backend="eager")
        args, keywords = next(batches(case, dist.get_rank(), 1))
        step(*args, **keywords)
        found[f"{name} in place"] = "in_place=True" in step.source
        found[f"{name} mapped"] = _mapped()
        measured = step.measure(*args, num_steps=2, **keywords)
        found[f"{name} bytes"] = (measured.wire_bytes, step.plan.wire_bytes)
        found[f"{name} peak"] = (measured.peak_bytes["device"], step.plan.peak_bytes["device"])
    return found


@linux
def test_training_is_the_same_to_the_bit_and_memory_is_as_planned() -> None:
    for rank in run_ranks(_trained, 2):
        for name in _NAMES:
            assert not rank[name]
            assert rank[f"{name} in place"] and rank[f"{name} mapped"] > 0
            sent, planned = rank[f"{name} bytes"]
            assert sent == planned
            measured, predicted = rank[f"{name} peak"]
            assert measured == pytest.approx(predicted, rel=0.01, abs=4096)
