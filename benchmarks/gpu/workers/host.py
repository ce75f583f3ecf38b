"""What the host does a second, by its threads, and what its links carry: the facts that plans with the host rest on.

python -m benchmarks.gpu.workers.host '{"device": "cuda", "millions": 44, "stream_bytes": 2000000000}' FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.case import Answers
from benchmarks.lib.turn import turn

THREADS = (1, 2, 4, 8, 16)
NUM_ROUNDS = 5
ATEN_BYTES = 6 + 28 + 6  # a parameter: the gradient cast to float32, AdamW on float32, the copy to bfloat16
ONE_PASS_BYTES = 2 + 12 + 12 + 2  # gradient and states read, states and parameter written
LINK_BYTES = 1 << 30
MATMUL_SIZE = 8192


def best_seconds(run: Callable[[], object]) -> float:
    """The least seconds of some rounds, after one that touches all pages."""
    run()
    seconds = []
    for _ in range(NUM_ROUNDS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def one_pass(grad: Tensor, master: Tensor, first: Tensor, second: Tensor, low: Tensor) -> None:
    """AdamW's tenth step written out, for a compiler to make one loop of."""
    value = grad.float()
    first.lerp_(value, 0.1)
    second.mul_(0.999).addcmul_(value, value, value=0.001)
    denominator = (second / (1 - 0.999**10)).sqrt() + 1e-8
    master.mul_(1 - 1e-5).sub_(1e-3 / (1 - 0.9**10) * first / denominator)
    low.copy_(master)


def updates(numel: int, *, compiles: bool) -> dict[str, tuple[int, Callable[[], object]]]:
    """Bytes a parameter and a call of each way to update a bucket of ``numel`` parameters."""
    grad, low = (torch.rand(numel).bfloat16() for _ in range(2))
    master, first, second = (torch.rand(numel) for _ in range(3))
    step = torch.tensor(10.0)

    def aten() -> None:
        torch.ops.aten._fused_adamw_.default(
            [master], [grad.float()], [first], [second], [], [step], amsgrad=False, beta1=0.9, beta2=0.999, eps=1e-8,
            lr=1e-3, maximize=False, weight_decay=0.01,
        )  # fmt: skip
        low.copy_(master)

    ways: dict[str, tuple[int, Callable[[], object]]] = {"update of ATen's kernels": (ATEN_BYTES, aten)}
    if compiles:
        fused = torch.compile(one_pass, options={"cpp.dynamic_threads": True})
        ways["update in one pass"] = ONE_PASS_BYTES, lambda: fused(grad, master, first, second, low)
        fused(grad, master, first, second, low)
    return ways


def host_rates(numel: int, stream_bytes: int, *, compiles: bool) -> dict[str, dict[str, float]]:
    """Bytes a second by number of threads, of updates and of STREAM's copy; and of a fresh tensor's first write."""
    ways = updates(numel, compiles=compiles)
    source = torch.ones(stream_bytes // 8, dtype=torch.float64)
    destination, warm = torch.empty_like(source), torch.empty(numel)
    rates: dict[str, dict[str, float]] = {}
    with turn(whole_machine=True):
        for threads in (count for count in THREADS if count <= len(os.sched_getaffinity(0))):
            torch.set_num_threads(threads)
            measured = {what: each * numel / best_seconds(run) for what, (each, run) in ways.items()}
            measured["copy"] = 16 * source.numel() / best_seconds(lambda: destination.copy_(source))
            measured["fill of a fresh tensor"] = 4 * numel / best_seconds(lambda: torch.empty(numel).fill_(1.0))
            measured["fill of a kept tensor"] = 4 * numel / best_seconds(lambda: warm.fill_(1.0))
            for what, rate in measured.items():
                rates.setdefault(what, {})[str(threads)] = rate
    return rates


def link_rates() -> dict[str, float]:
    """Bytes a second of pinned copies: to the device, to the host, both at once (each way), and next to products."""
    hosts = [torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    left = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(left)

    def copy(*, up: bool, down: bool, next_to_products: bool = False) -> None:
        if next_to_products:
            for _ in range(60):  # longer than the copies take
                torch.mm(left, left, out=product)
        for stream, wanted, (to, source) in zip(
            streams, (up, down), ((devices[0], hosts[0]), (hosts[1], devices[1])), strict=True
        ):
            if wanted:
                with torch.cuda.stream(stream):
                    to.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()

    ways = {"to the device": (True, False), "to the host": (False, True), "both at once": (True, True)}
    with turn(whole_machine=True):
        rates = {
            what: LINK_BYTES / best_seconds(lambda up=up, down=down: copy(up=up, down=down))  # type: ignore[misc]
            for what, (up, down) in ways.items()
        }
        seconds = []
        for _ in range(NUM_ROUNDS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            copy(up=True, down=True, next_to_products=True)
            seconds.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        rates["both next to products"] = LINK_BYTES / min(seconds)
    return rates


def main() -> None:
    request, answers = json.loads(sys.argv[1]), Answers(Path(sys.argv[2]))
    on_cuda = request["device"] == "cuda"
    # Without a GPU this is a trial of the code: no compiler is asked for what takes it longer than all the rest.
    rates = host_rates(request["millions"] << 20, request["stream_bytes"], compiles=on_cuda)
    answers.add(host_rates=rates, millions=request["millions"])
    if on_cuda:
        answers.add(link_rates=link_rates())


if __name__ == "__main__":
    main()
