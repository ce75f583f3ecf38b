"""The net over logs: does a script that reads tensors while its loss is computed log what it would in eager mode?

Each way trains eight steps next to the same script in plain torch, on two ranks with the mean of all gradients. What is
logged, and the losses, have to be equal after each step; or the step is refused with the line, before anything that is
wrong is logged. ``python -m tests.nets.logs`` prints a row a way.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.nets.cases.logs import OPENED, Forward, Seen, Way, log_ways

STEPS = 8
BOUND = 2e-6
"""Of numbers, relative: sums over the elements of a mask are taken in another order."""


@dataclass(frozen=True)
class Judged:
    """What became of a way: ``exact``, ``refused``, ``wrong``, or ``error``, and why."""

    outcome: str
    detail: str = ""


@dataclass
class _Run:
    """Losses, all that is logged before the first step and after each, and what ended the run."""

    losses: list[float]
    logs: list[Any]
    error: Exception | None = None


def judge(way: Way) -> Judged:
    """Train in eager PyTorch and by zerofx, and compare all that is logged after each step."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        runs = []
        for kind in ("plain", "compiled"):
            own = Path(folder, kind)
            own.mkdir()
            runs.append(_train(*way.make(own), is_compiled=kind == "compiled"))
        while OPENED:
            OPENED.pop().close()
    plain, compiled = runs
    assert plain.error is None, plain.error
    for step, (theirs, mine) in enumerate(zip(plain.logs, compiled.logs, strict=False)):
        if not _is_equal(theirs, mine):
            return Judged("wrong", f"after step {step}: {str(mine)[-80:]}, {str(theirs)[-80:]} in eager mode")
    if not _is_equal(plain.losses[: len(compiled.losses)], compiled.losses):
        return Judged("wrong", f"losses {compiled.losses}, {plain.losses} in eager mode")
    if compiled.error is None:
        return Judged("exact")
    is_ours = isinstance(compiled.error, zerofx.ZeroFXError) and not isinstance(compiled.error, zerofx.InternalError)
    text = f"step {len(compiled.losses) + 1}: {' '.join(str(compiled.error).split())}"
    return Judged("refused" if is_ours else "error", text if is_ours else repr(compiled.error))


def _train(forward: Forward, seen: Seen, *, is_compiled: bool) -> _Run:
    torch.manual_seed(0)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    step = zerofx.compile(model, optimizer, forward=forward, backend="eager") if is_compiled else None
    draws = torch.Generator().manual_seed(1 + rank)
    run = _Run([], [copy.deepcopy(seen())])
    try:
        for _ in range(STEPS):
            x, y = torch.randn(6, 4, generator=draws), torch.randn(6, 3, generator=draws)
            with contextlib.redirect_stdout(getattr(forward, "stdout", sys.stdout)):
                if step is not None:
                    loss = step(x, y)
                else:
                    loss = forward(model, x, y)
                    optimizer.zero_grad()
                    loss.backward()
                    for parameter in model.parameters() if ranks > 1 else ():
                        assert parameter.grad is not None
                        dist.all_reduce(parameter.grad)
                        parameter.grad /= ranks
                    optimizer.step()
            run.losses.append(loss.item())
            run.logs.append(copy.deepcopy(seen()))
    except Exception as error:  # noqa: BLE001  # what it is, is the outcome
        run.error = error
    if step is not None:
        step.close()
    if run.error is not None and not run.losses:  # whatever a trace has left
        run.logs[0] = copy.deepcopy(seen())
    return run


def _is_equal(theirs: Any, mine: Any) -> bool:
    if isinstance(theirs, float) and isinstance(mine, float):
        return math.isclose(theirs, mine, rel_tol=BOUND, abs_tol=BOUND) or (theirs != theirs and mine != mine)
    if type(theirs) is not type(mine):
        return False
    if isinstance(theirs, dict):
        return list(theirs) == list(mine) and _is_equal(list(theirs.values()), list(mine.values()))
    if isinstance(theirs, (list, tuple)):
        return len(theirs) == len(mine) and all(map(_is_equal, theirs, mine))
    return bool(theirs == mine)


def run(ways: Sequence[Way], num_ranks: int) -> list[Judged]:
    """What becomes of each way; on several ranks the worst of them."""
    if num_ranks == 1:
        return [judge(way) for way in ways]
    of_ranks = run_ranks(_judge_named, num_ranks, [way.name for way in ways], timeout=1800.0)
    order = ("wrong", "error", "refused", "exact")
    return [min(each, key=lambda judged: order.index(judged.outcome)) for each in zip(*of_ranks, strict=True)]


def _judge_named(names: Sequence[str]) -> list[Judged]:
    torch.set_num_threads(1)
    by_name = {way.name: way for way in log_ways()}
    return [judge(by_name[name]) for name in names]


def main() -> None:
    """Run all ways, or those that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--only", default="", help="a text that the names of the ways contain")
    parsed = parser.parse_args()
    ways = [way for way in log_ways() if parsed.only in way.name]
    judged = run(ways, parsed.ranks)
    rows = [(way.name, each.outcome, each.detail[:150]) for way, each in zip(ways, judged, strict=True)]
    print(tabulate(rows, headers=["way", "outcome", "detail"]))
    outcomes = [each.outcome for each in judged]
    print(", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("exact", "refused", "wrong", "error")))


if __name__ == "__main__":
    main()
