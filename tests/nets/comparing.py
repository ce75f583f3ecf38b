"""What a step spends on comparing Python's state with what it was captured in, in a deep model.

``python -m tests.nets.staleness --cost`` prints it.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import zerofx
import zerofx.session.steps
from tests.nets.cases.staleness.script import Losing
from zerofx.capture.python_state.reads import Reads
from zerofx.session.guards import ModeWatch, ParameterWatch
from zerofx.session.steps import Steps
from zerofx.session.taken_over import TakenOver

COMPARES: tuple[tuple[Any, str], ...] = (
    (Reads, "changes"),
    (ModeWatch, "mode"),
    (ParameterWatch, "check"),
    (TakenOver, "find_changed"),
    (zerofx.session.steps, "per_call_settings"),
)
"""What a step calls to compare Python's state, and torch's settings; each gives the same when it is called again."""

BEFORE: tuple[tuple[Any, str], ...] = ((Steps, "batch_of"), (Steps, "step_for"))
"""All that a step does before its state is put together and it runs, in which those are called."""

Method = Callable[..., Any]


class _Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear, self.index, self.eps, self.scaling = nn.Linear(4, 4), index, 1e-5, {"default": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = self.linear(x)
        return torch.tanh(given) * self.scaling["default"] + self.eps


class _Deep(Losing):
    """Two modules a layer, of which the forward reads two numbers, one of them in a dictionary."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(index) for index in range(num_layers))

    def outputs(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x[:, :3]


@contextlib.contextmanager
def _in_the_places(methods: tuple[tuple[Any, str], ...], wrap: Callable[[str, Method], Method]) -> Iterator[None]:
    """While open, ``wrap(name, method)`` is in the place of each method."""
    with contextlib.ExitStack() as stack:
        for owner, name in methods:
            method = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, wrap(method.__qualname__, method)))
        yield


@contextlib.contextmanager
def _step_of(num_layers: int) -> Iterator[Callable[[], Any]]:
    """A call of a step that was built, and finds all as it was."""
    model = _Deep(num_layers)
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.01, foreach=False), backend="eager")
    batch = torch.randn(4, 4), torch.randn(4, 3)
    with contextlib.closing(step):
        for _ in range(3):
            step(*batch)
        yield lambda: step(*batch)


def cost(num_layers: int = 200, num_steps: int = 100) -> dict[str, tuple[float, float]]:
    """Microseconds of a core that a step takes in each of ``COMPARES``, in all of them, and in ``BEFORE``.

    The first is that of a step, whose own work has taken the caches; the second that of a call right after, with all
    in them (0 where there is none).
    """
    spent = defaultdict[str, list[float]](lambda: [0.0, 0.0])

    def timed(times: int) -> Callable[[str, Method], Method]:
        def wrap(name: str, method: Method) -> Method:
            def timing(*args: Any, **options: Any) -> Any:
                for index in range(times):
                    begin = time.thread_time_ns()
                    given = method(*args, **options)
                    spent[name][index] += (time.thread_time_ns() - begin) / 1e3
                return given

            return timing

        return wrap

    def rows(methods: tuple[tuple[Any, str], ...], times: int, total: str) -> dict[str, tuple[float, float]]:
        steps: list[dict[str, list[float]]] = []
        with _in_the_places(methods, timed(times)):
            for _ in range(num_steps):
                spent.clear()
                call()
                steps.append({**spent, total: [sum(part) for part in zip(*spent.values(), strict=True)]})
        return {
            name: (statistics.median(one[name][0] for one in steps), statistics.median(one[name][1] for one in steps))
            for name in steps[0]
        }

    with _step_of(num_layers) as call:
        return rows(COMPARES, 2, "all comparisons") | rows(BEFORE, 1, "all before the step runs")


def num_calls(num_layers: int) -> Counter[str]:
    """How many calls Python makes in each of ``COMPARES`` for one step; what C calls by itself is none."""
    calls = Counter[str]()

    def counted(name: str, method: Method) -> Method:
        def counting(*args: Any, **options: Any) -> Any:
            def note(_frame: FrameType, event: str, _argument: Any) -> None:
                calls[name] += event.endswith("call")

            sys.setprofile(note)
            try:
                return method(*args, **options)
            finally:
                sys.setprofile(None)

        return counting

    with _step_of(num_layers) as call, _in_the_places(COMPARES, counted):
        call()
    return calls
