"""Host, links and device work at once, for as long as was predicted: on a CPU whose lanes are throttled on purpose.

Products, copies and updates on the host take what a machine's numbers say, by sleeping for what is left of it; all else
is so small that it takes next to nothing. The plan is made for a machine of those numbers, by its own search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zerofx
from tests.lib.chains import Stack
from zerofx.ir.streams import TO_DEVICE, TO_HOST
from zerofx.runtime.tiers import tiers
from zerofx.runtime.tiers.copies import Copy, ThreadCopies
from zerofx.scheduler.cost.machine import Device, Efficiency, HostUpdate, Link, Machine

pytestmark = pytest.mark.slow

WIDTH, ROWS, LAYERS = 512, 64, 8
FLOPS = 0.8e9  # a second: a product takes some 42 ms
LINK = 16e6  # bytes a second: a layer's states take some 131 ms
HOST = 38e6  # likewise: an update there takes some 193 ms
STEPS = 3
_LATE = 0.03  # seconds that a thread may wake up too late, next to other programs


def throttled_machine() -> Machine:
    """One whose device, links and host have these numbers; all else is free."""
    row = Machine.named("cpu").for_ranks(1)
    host = replace(
        row.host, memory_bandwidth=1e12, flops=1e12, to_host=Link(LINK, 1e-9), to_device=Link(LINK, 1e-9),
        update=HostUpdate(1, HOST, HOST),
    )  # fmt: skip
    device = Device(replace(row.device.peak, float32=FLOPS), 1e12, row.device.memory_bytes, 1e-9)
    return replace(row, device=device, host=host, efficiency=Efficiency(1.0, 1.0, 1.0))


class Lanes:
    """Seconds in which each lane has been busy. A lane has one thread.

    What wakes up late is made up for by the next job of its lane, where that begins at once.
    """

    def __init__(self) -> None:
        self.busy: dict[str, float] = {}
        self._ends: dict[str, float] = {}

    def run(self, lane: str, seconds: float, job: Callable[[], object]) -> object:
        """Run ``job`` on a lane, for so many seconds."""
        began, before = time.perf_counter(), self._ends.get(lane, 0.0)
        end = self._ends[lane] = (before if began - before < _LATE else began) + seconds
        result = job()
        time.sleep(max(0.0, end - time.perf_counter()))
        self.busy[lane] = self.busy.get(lane, 0.0) + seconds
        return result


class Products(TorchDispatchMode):
    """Lets each product of two matrices take as long as its FLOPs do."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lanes = lanes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.mm.default:
            return func(*args, **kwargs)
        (rows, inner), (_, columns) = args[0].shape, args[1].shape
        return self._lanes.run("device", 2 * rows * inner * columns / FLOPS, lambda: func(*args, **kwargs))


class _Throttled:
    """The destination of a copy, which takes as long as its bytes do."""

    def __init__(self, tensor: Tensor, stream: str, lanes: Lanes) -> None:
        self._tensor, self._stream, self._lanes = tensor, stream, lanes

    def copy_(self, source: Tensor) -> None:
        self._lanes.run(self._stream, source.nbytes / LINK, lambda: self._tensor.copy_(source))


def throttle(monkeypatch: pytest.MonkeyPatch, lanes: Lanes) -> None:
    """Throttle copies and updates on the host of the steps that are made from here on."""

    class Links(ThreadCopies):
        def start(self, stream: str, source: Tensor, destination: Any, after: Callable[[], None] | None = None) -> Copy:
            return super().start(stream, source, _Throttled(destination, stream, lanes), after)  # type: ignore[arg-type]

    def run_update(bucket: int, function: Any, tensors: list[Any], awaited: Sequence[Callable[[], None]]) -> None:
        for await_one in awaited:
            await_one()
        # Parameter, gradient and two moments: all are read, and all but the gradient are written.
        held = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor) and tensor.ndim)
        with torch.no_grad():
            lanes.run("host", 7 / 4 * held / HOST, lambda: function(tensors))

    monkeypatch.setattr(tiers, "ThreadCopies", Links)
    monkeypatch.setattr(tiers, "_run_update", run_update)


class Net(Stack):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def _measured(step: Any, batch: tuple[Tensor], inside: AbstractContextManager[object]) -> list[float]:
    seconds = []
    with inside:
        for _ in range(STEPS):
            began = time.perf_counter()
            step(*batch)
            seconds.append(time.perf_counter() - began)
    return seconds


def _made(share: float, **further: Any) -> tuple[Any, tuple[Tensor]]:
    torch.manual_seed(0)
    model, batch = Net(), (torch.randn(ROWS, WIDTH),)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    options: dict[str, Any] = {"machine": throttled_machine(), "backend": "eager", "recompute": "none", **further}
    most = zerofx.plan(model, optimizer, batch, **options).plan.peak_bytes["device"]
    budget = int(share * most)
    return zerofx.compile(model, optimizer, example_batch=batch, memory_budget=budget, offload="host", **options), batch


@pytest.mark.parametrize("share", [0.6, 0.45])
def test_lanes_are_busy_at_once_for_as_long_as_predicted(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    lanes = Lanes()
    throttle(monkeypatch, lanes)
    step, batch = _made(share)
    assert {decision.update for decision in step.plan.states} == {"host", "device"}
    _measured(step, batch, nullcontext())  # the first steps make threads, blocks and pages
    lanes.busy.clear()
    seconds = _measured(step, batch, Products(lanes))
    step.close()
    # The first one begins with no throttled lane under way; what other programs add is least in this one of the others.
    measured = min(seconds[1:])
    busy = {lane: total / STEPS for lane, total in lanes.busy.items()}
    assert busy.keys() == {"device", "host", TO_HOST, TO_DEVICE}
    assert 0.9 <= measured / step.plan.step_seconds <= 1.1, (measured, step.plan.step_seconds, busy)
    assert sum(busy.values()) >= 1.8 * measured, (measured, busy)


def _timed(order: str, lanes: Lanes) -> tuple[float, Any]:
    """Seconds of a step of eight micro-batches whose parameters come from the host, and its plan."""
    step, batch = _made(0.35, accumulate=8, order=order)
    assert len(step.plan.parameters) >= LAYERS - 1
    _measured(step, batch, nullcontext())
    lanes.busy.clear()
    seconds = _measured(step, batch, Products(lanes))
    step.close()
    return min(seconds[1:]), step.plan


def test_layer_by_layer_parameters_come_up_once_for_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = Lanes()
    throttle(monkeypatch, lanes)
    (before, earlier), (by_layer, plan) = (_timed(order, lanes) for order in ("micro-batch", "layer"))
    assert 0.9 <= by_layer / plan.step_seconds <= 1.1, (by_layer, plan.step_seconds)
    assert before >= 1.8 * by_layer, (before, by_layer)
    assert plan.prediction.link_bytes[TO_DEVICE] <= earlier.prediction.link_bytes[TO_DEVICE] / 4
