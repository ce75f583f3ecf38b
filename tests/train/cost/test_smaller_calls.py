"""What large calls take, told from smaller ones, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.train.cost.test_workspace import call, inside
from zerofx.scheduler.cost.cpu import calls, kernel_memory
from zerofx.scheduler.cost.cpu.calls import Like
from zerofx.scheduler.cost.cpu.kernel_memory import kernel_memories

aten = torch.ops.aten


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape)


LARGE: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "product": (aten.mm.default, (rand(384, 512), rand(512, 640))),
    "sum of bfloat16 in float32": (aten.sum.dim_IntList, (rand(512, 320).bfloat16(), [0], False)),
    "exponentials of rows": (aten.logsumexp.default, (rand(512, 512), [1])),
    "loss": (aten.mse_loss.default, (rand(500, 520), rand(500, 520))),
    "losses of an odd number of rows": (aten.mse_loss.default, (rand(1021, 257), rand(1021, 257))),
    "mask": (aten.native_dropout.default, (rand(640, 512), 0.5, True)),
    "smallest": (aten.kthvalue.default, (rand(1024, 512), 3)),
    "smallest of columns": (aten.kthvalue.default, (rand(512, 1024).t(), 3)),
    "softmax of columns in part": (aten._softmax.default, (rand(768, 1024)[:, :512], 0, False)),
    "number": (aten.mul.Scalar, (rand(512, 512), 2.0)),
    "inverse": (aten.linalg_inv_ex.default, (rand(384, 384) + 384 * torch.eye(384),)),
}


@pytest.mark.parametrize("name", LARGE)
def test_smaller_calls_tell_of_a_large_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, args = LARGE[name]
    node = call(target, args)
    monkeypatch.setattr(calls, "QUICK_BYTES", 2**19)
    monkeypatch.setattr(calls, "QUICK_STEPS", 2**20)
    monkeypatch.setattr(calls, "MOST_BYTES", 0)
    kernel_memory._memory_cache.cache_clear()
    found = kernel_memories([node])[node]
    assert found is not None and (found.inside, sum(found.excess)) == inside(target, args)
    kernel_memory._memory_cache.cache_clear()


def test_what_overlaps_or_is_not_of_one_piece_keeps_its_layout() -> None:
    columns = Like((512, 96), (300, 3), torch.float32)
    assert columns.replace_sizes({512: 64}) == Like((64, 96), (300, 3), torch.float32)
    assert columns.replace_sizes({96: 32}) == Like((512, 32), (108, 3), torch.float32)
    assert Like((512, 64), (0, 1), torch.float32).replace_sizes({64: 8}) == Like((512, 8), (0, 1), torch.float32)
    assert Like((64, 64), (1, 512), torch.float32).replace_sizes({64: 8}) == Like((8, 8), (1, 64), torch.float32)
    assert Like((500, 16), (1, 1), torch.float32).replace_sizes({500: 8}) is None
