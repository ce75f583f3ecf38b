"""Blocks of a flat tensor that an update on the host works through, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

# Elements of a thread's share of a block. What calling an operator takes is spread over enough of them, and two values
# of so many float32 are in the 2 MiB of a server core's L2; see ``benchmarks/host_update.py``.
BLOCK = 128 << 10


def blocks(numel: int, num_threads: int) -> Iterator[tuple[int, int]]:
    """Ranges of the blocks of a tensor: ``BLOCK`` elements a thread."""
    size = BLOCK * num_threads
    return ((begin, min(numel, begin + size)) for begin in range(0, numel, size))


def make_adamw_pass(numel: int, num_threads: int) -> tuple[Callable[[], None], int]:
    """An AdamW in bfloat16 with float32 masters on the host, as a step runs it there, and the bytes that it moves.

    It may be called on up to ``num_threads`` threads.
    """
    master, first, second = (torch.full((numel,), 0.5, device="cpu", dtype=torch.float32) for _ in range(3))
    gradient, low = (torch.full((numel,), 0.5, device="cpu", dtype=torch.bfloat16) for _ in range(2))
    step = torch.tensor(10.0, device="cpu")
    cast = torch.zeros(BLOCK * num_threads, device="cpu", dtype=torch.float32)

    def update() -> None:
        for begin, end in blocks(numel, torch.get_num_threads()):
            parts = [tensor[begin:end] for tensor in (master, first, second)]
            part = cast[: end - begin].copy_(gradient[begin:end])
            torch.ops.aten._fused_adamw_.default(
                parts[:1], [part], parts[1:2], parts[2:], [], [step], amsgrad=False, beta1=0.9, beta2=0.999, eps=1e-8,
                lr=1e-3, maximize=False, weight_decay=0.01,
            )  # fmt: skip
            low[begin:end].copy_(parts[0])

    return update, gradient.nbytes + 2 * (master.nbytes + first.nbytes + second.nbytes) + low.nbytes
