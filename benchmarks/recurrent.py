"""Recurrent layers: time to build a step, and time of a step, compared with ``torch.compile`` and eager mode.

    python -m benchmarks.recurrent                               # LSTM and GRU, two layers, length 48: some minutes
    python -m benchmarks.recurrent --kinds RNN --length 200 --rounds 5

Builds are in processes of their own, from the model to the end of the first step, with caches in which there is a
build of the head alone: what Inductor asks the machine once is in no number. CPU seconds are those of the process and
of the compilers that it starts, and hold on a busy machine too. Steps of all contenders alternate in one process on one
thread. Prints a table of each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.lib.alone import answer_alone

CONTENDERS = ("eager mode", "torch.compile", "zerofx eager", "zerofx")
_BATCH = 8
_HEAD = "Identity"  # no recurrent layer


def stepper(contender: str, kind: str, length: int, width: int) -> Callable[[], object]:
    """A training step of a recurrent layer with a head, by ``contender``."""
    import torch
    from torch import nn

    import zerofx

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = getattr(nn, kind)(width, width, num_layers=2, batch_first=True)
            self.is_head = kind == _HEAD
            self.head = nn.Linear(width, width)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.head(x if self.is_head else self.rnn(x)[0]), y)

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = tuple(torch.randn(_BATCH, length, width) for _ in range(2))
    if contender.startswith("zerofx"):
        step = zerofx.compile(
            model, optimizer, 0, backend="eager" if contender.endswith("eager") else "inductor", example_batch=batch
        )
        return lambda: step(*batch)
    forward: Callable[..., Any] = torch.compile(model) if contender == "torch.compile" else model

    def run() -> None:
        optimizer.zero_grad()
        forward(*batch).backward()
        optimizer.step()

    return run


def build_here(contender: str, kind: str, length: int, width: int) -> tuple[float, float]:
    """Seconds and CPU seconds from the model to the end of its first step, without imports."""
    import torch._inductor.compile_fx  # noqa: F401 - importing it is no compiling

    import zerofx

    assert callable(zerofx.compile)  # which is imported where it is asked for
    began, began_cpu = time.perf_counter(), cpu_seconds()
    stepper(contender, kind, length, width)()
    return time.perf_counter() - began, cpu_seconds() - began_cpu


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def steps_here(kind: str, length: int, width: int, rounds: int) -> dict[str, float]:
    """Median seconds of a step of each contender, of steps that alternate."""
    steps = {contender: stepper(contender, kind, length, width) for contender in CONTENDERS}
    seconds: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for number in range(rounds + 5):
        for contender, step in steps.items():
            began = time.perf_counter()
            step()
            if number >= 5:
                seconds[contender].append(time.perf_counter() - began)
    return {contender: statistics.median(runs) for contender, runs in seconds.items()}


def _alone(name: str, asked: Sequence[str]) -> Any:
    with tempfile.TemporaryDirectory() as cache:
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "ZEROFX_CACHE_DIR": str(Path(cache) / "zerofx"),
            "TMPDIR": cache,  # Inductor's precompiled headers
        }
        if asked[-1] == "zerofx":
            answer_alone("the head alone", "benchmarks.recurrent", "--kinds", _HEAD, "--here", "zerofx", **caches)
        return answer_alone(name, "benchmarks.recurrent", *asked, **caches)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["LSTM", "GRU"])
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--here", choices=[*CONTENDERS, "steps"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.length, options.width
    if options.here is not None:
        (kind,) = options.kinds
        if options.here == "steps":
            print(json.dumps(steps_here(kind, *sizes, options.rounds)))
        else:
            print(json.dumps(build_here(options.here, kind, *sizes)))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    builds, steps = [], []
    for kind in options.kinds:
        asked = ["--kinds", kind, "--length", str(sizes[0]), "--width", str(sizes[1]), "--rounds", str(options.rounds)]
        built = {name: _alone(f"{kind}, {name}", [*asked, "--here", name]) for name in CONTENDERS[1:]}
        ratios = (most / least for most, least in zip(built["zerofx"], built["zerofx eager"], strict=True))
        rows = (*(built[name] for name in CONTENDERS[1:]), ratios)
        builds.append([kind, *("{:.2f} (CPU {:.2f})".format(*row) for row in rows)])
        took = _alone(f"steps of {kind}", [*asked, "--here", "steps"])
        ratio = took["zerofx"] / took["torch.compile"]
        steps.append([kind, *(f"{1e3 * took[name]:.2f}" for name in CONTENDERS), f"{ratio:.2f}"])
    headers = ["first step, s", *CONTENDERS[1:], "zerofx / zerofx eager"]
    print(tabulate(builds, headers, tablefmt="github", disable_numparse=True))
    headers = ["step, ms", *CONTENDERS, "zerofx / torch.compile"]
    print(tabulate(steps, headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
