"""The net over staleness: does a step compute what eager mode would compute at that moment?

Each case is a script that changes what its step computes: a global, an attribute, an item, a hook, a setting. It trains
twelve steps, and changes something before steps 3 and 4 and before each from 6 on, next to the same script in plain
torch (on two ranks with the mean of all gradients, as DistributedDataParallel has it). On the eager backend losses and
values have to be those of plain torch bit for bit, on the default backend up to rounding; or the step is refused, with
all that came before it as in plain torch. ``python -m tests.nets.staleness`` prints a row a case and writes the
records; ``--cost`` measures the time that a step takes to compare Python's state.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor
from torch._inductor import config as inductor_config
from tqdm import tqdm

import zerofx
from tests.lib.distributed import run_ranks
from tests.nets.cases.staleness import staleness_cases
from tests.nets.cases.staleness.script import CHANGED, Case, State, Trained
from tests.nets.comparing import cost
from tests.nets.records import Record, read_records, results_path, write_records
from zerofx.driver.driver import build_step

BACKENDS = ("eager", "inductor")
MOST_CAPTURES = 3
"""Of a number that changes at each step: the first, one with another value, and one that takes it as an input."""

_ROUNDING = 2e-5  # of compiled kernels, relative to the largest of what is compared
_CASES_A_CALL = 20

Judged = Literal["exact", "refused", "stale", "error"]


@dataclass(frozen=True)
class Found:
    """What became of a case.

    Attributes:
        judged: ``exact``; ``refused`` in an error of zerofx's before a step that would have been stale; ``stale``:
            other losses or values than in eager mode; ``error``: any other exception.
        captures: how often a step was captured.
        detail: of what is refused or an error its text, of what is stale where it is.
    """

    judged: Judged
    captures: int = 0
    detail: str = ""


def missing(case: Case) -> bool:
    """Whether a case needs a library that is not installed."""
    return bool(case.library) and importlib.util.find_spec(case.library) is None


@contextlib.contextmanager
def counted() -> Iterator[list[None]]:
    """While open, adds an entry to the list that it gives for each step that is captured and built."""
    calls: list[None] = []

    def counting(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return build_step(*args, **options)

    with mock.patch("zerofx.session.steps.build_step", counting):
        yield calls


def judge(case: Case, backend: str) -> Found:
    """Train a case in eager PyTorch and by zerofx, and compare, on this rank."""
    bound = case.bound if backend == "eager" else max(case.bound, _ROUNDING)
    with warnings.catch_warnings(), counted() as calls:
        warnings.simplefilter("ignore")
        expected = case.train(None, len(CHANGED))
        try:
            with inductor_config.patch(emulate_precision_casts=case.halves):
                trained = case.train(backend, len(CHANGED))
        except Exception as error:  # noqa: BLE001  # what it is, is the outcome
            trained = Trained(error=error)
    if text := _stale(expected, trained, bound):
        return Found("stale", len(calls), text)
    raised = trained.error
    if raised is None:
        return Found("exact", len(calls))
    is_ours = isinstance(raised, zerofx.ZeroFXError) and not isinstance(raised, zerofx.InternalError)
    text = f"step {len(trained.losses) + 1}: {raised}" if is_ours else f"{type(raised).__name__}: {raised}"
    return Found("refused" if is_ours else "error", len(calls), _line(text))


def _stale(expected: Trained, trained: Trained, bound: float) -> str:
    """Where a training differs from that of eager mode, up to the error that ended it; empty for nowhere."""
    for step, (theirs, mine) in enumerate(zip(expected.losses, trained.losses, strict=False), start=1):
        if apart(theirs, mine) > bound:
            return f"the loss of step {step} is {mine.item():.6g}, {theirs.item():.6g} in eager mode"
    num_steps = len(trained.losses)
    if trained.states:
        # Other ranks than the first have statistics of their own batches.
        at = num_steps if trained.error is not None else -1
        name, distance = farthest(expected.states[at], trained.states[-1], buffers=_rank() == 0)
        if distance > bound:
            return f"{name} is {distance:.2g} apart from eager mode after step {num_steps}"
    if trained.error is None and num_steps != len(expected.losses):
        return f"{num_steps} steps, {len(expected.losses)} in eager mode"
    return ""


def apart(theirs: Tensor, mine: Tensor) -> float:
    """How far two tensors are apart, relative to the largest element; equal ones are 0 apart, NaN is NaN."""
    if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
        return float("inf")
    if torch.equal(theirs, mine) or torch.allclose(theirs, mine, rtol=0, atol=0, equal_nan=True):
        return 0.0
    largest = max(float(theirs.abs().max()), 1e-3)
    distance = float((theirs.double() - mine.double()).abs().max()) / largest
    return distance if distance == distance else float("inf")


def farthest(theirs: State, mine: State, *, buffers: bool = True) -> tuple[str, float]:
    """The name of what is farthest apart in two states, and how far."""
    if theirs.keys() != mine.keys():
        return f"{sorted(theirs.keys() ^ mine.keys())}", float("inf")
    names = [name for name in theirs if buffers or not re.search(r"running_|num_batches|mean", name)]
    return max(((name, apart(theirs[name], mine[name])) for name in names), key=lambda pair: pair[1])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _line(text: str) -> str:
    """One line, without addresses and the machine's paths."""
    text = re.sub(r"/\S*/(site-packages|lib/python[\d.]*)/", "", " ".join(text.split()))
    text = re.sub(r"/\S*/(tests/)", r"\1", text)
    return re.sub(r"0x[0-9a-f]+", "0x...", text)[:600]


def _judge_all(names: Sequence[str], backend: str) -> list[Found]:
    torch.set_num_threads(1)
    of_name = {full_name(case): case for case in staleness_cases()}
    return [judge(of_name[name], backend) for name in names]


def full_name(case: Case) -> str:
    """The name of a case, unique within the net."""
    return f"{case.kind}: {case.name}"


def run(cases: Sequence[Case], backend: str, num_ranks: int) -> Iterator[Found]:
    """What becomes of each case. Those of several ranks share processes, some at a time."""
    if num_ranks == 1:
        yield from (judge(case, backend) for case in cases)
        return
    for start in range(0, len(cases), _CASES_A_CALL):
        names = [full_name(case) for case in cases[start : start + _CASES_A_CALL]]
        for of_ranks in zip(*run_ranks(_judge_all, num_ranks, names, backend, timeout=1800.0), strict=True):
            yield _of_all(of_ranks)


def _of_all(of_ranks: Sequence[Found]) -> Found:
    """The worst that a rank has seen; ranks of which some refuse are an error."""
    kinds = {found.judged for found in of_ranks}
    if kinds == {"exact", "refused"}:
        return Found("error", of_ranks[0].captures, f"refused on some ranks alone: {of_ranks}"[:300])
    order = ("stale", "error", "refused", "exact")
    return min(of_ranks, key=lambda found: order.index(found.judged))


def record_of(case: Case, found: Found, backend: str, num_ranks: int) -> Record:
    """The record of a case; the detail of what is exact is how often it was captured."""
    variant = f"{backend}, {num_ranks} rank{'s' if num_ranks > 1 else ''}"
    if found.judged == "exact":
        return Record(full_name(case), variant, "exact", f"captured {found.captures} times")
    if found.judged == "refused":
        return Record(full_name(case), variant, "refused", found.detail)
    return Record(full_name(case), variant, "wrong", f"{found.judged}: {found.detail}")


def main() -> None:
    """Run all cases, or those that are asked for; write the records of those that ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="both by default")
    parser.add_argument("--ranks", type=int, choices=(1, 2), action="append", help="both by default")
    parser.add_argument("--only", help="a text that the names of the cases contain; nothing is written then")
    parser.add_argument("--cost", action="store_true", help="measure what comparing costs, and nothing else")
    parsed = parser.parse_args()
    if parsed.cost:
        spent = [(name, *microseconds) for name, microseconds in cost().items()]
        print(tabulate(spent, headers=["microseconds", "in a step", "again at once"], floatfmt=".1f"))
        return
    cases = [case for case in staleness_cases() if parsed.only is None or parsed.only in full_name(case)]
    for case in filter(missing, cases):
        print(f"left out, as {case.library} is not installed: {full_name(case)}")
    cases = [case for case in cases if not missing(case)]
    known = set(map(full_name, cases))
    earlier = [record for record in read_records(results_path("staleness")) if record.name in known]
    records = {(record.name, record.variant): record for record in earlier}
    rows, counts = [], Counter[str]()
    for backend in parsed.backend or BACKENDS:
        for num_ranks in parsed.ranks or (1, 2):
            progress = partial(tqdm, total=len(cases), desc=f"{backend}, {num_ranks}", unit="case")
            for case, found in zip(cases, progress(run(cases, backend, num_ranks)), strict=True):
                record = record_of(case, found, backend, num_ranks)
                records[record.name, record.variant] = record
                counts[found.judged] += 1
                rows.append([record.name, record.variant, found.judged, found.captures, found.detail[:90]])
                if parsed.only is None:  # a sweep that is cut off has its records
                    write_records(results_path("staleness"), records.values())
    print(tabulate(rows, headers=["case", "variant", "outcome", "captures", "detail"]))
    print(", ".join(f"{count} {judged}" for judged, count in sorted(counts.items())))
    many = [row for row in rows if row[0].startswith("number: ") and row[3] > MOST_CAPTURES]
    print(f"{len(many)} numbers captured more than {MOST_CAPTURES} times", *(row[0] for row in many), sep="\n  ")


if __name__ == "__main__":
    main()
