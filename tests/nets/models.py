"""The net over models: other people's models and scripts, trained by zerofx and in plain torch.

``python -m tests.nets.models`` tries all of ``tests/nets/cases/models.py`` and goes on where it was stopped. Libraries
are installed in an environment of their own that sees torch and zerofx, each without what it depends on, as several
would bring other builds of torch: ``pip install --no-deps -r tests/nets/requirements.txt``. A case whose library is not
there is left out, and said to be.

A case is tried at stages 0 and 3 on one rank, on two ranks (compared with ``DistributedDataParallel``), and with a
budget of the least that a plan takes, also where values may go to the host. All run on the eager backend, where losses
and values after the last step have to be those of plain torch bit for bit; with a budget the measured peak has to be
the predicted one and within the budget. Up to rounding is all the same with tiles, which the least of all takes and
which sum in parts, and where two ranks share one computation on the axis ``model``; models that draw random numbers
are left out there, as ranks draw for their own parts. What is refused says whether
``torch.compile(fullgraph=True)`` takes it.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.sharing import SHARING
from tests.nets.cases.case import ModelCase
from tests.nets.cases.models import CASES
from tests.nets.records import Outcome, Record, read_records, results_path, write_records
from zerofx.ir.tensor_parts import parts_of, path_name
from zerofx.scheduler.search.problem import BudgetMissedError

STEPS = 3
TILED = "1 rank, least budget in tiles, up to rounding"
VARIANTS: Mapping[str, dict[str, Any]] = {
    "1 rank, stage 0": {"stage": 0},
    "1 rank, stage 3": {"stage": 3},
    "1 rank, least budget": {"stage": 3, "memory_budget": 1, "tile": "none"},
    "1 rank, least budget, offload to host": {"stage": 3, "memory_budget": 1, "tile": "none", "offload": "host"},
    TILED: {"stage": 3, "memory_budget": 1, "offload": "host"},
}
SHARED = "2 ranks share one computation, up to rounding"
RANKS: Mapping[str, dict[str, Any]] = {
    "2 ranks, stage 0": {"stage": 0},
    "2 ranks, stage 3": {"stage": 3},
    SHARED: {"stage": 3, "mesh": {"model": 2}, "machine": SHARING},
}
SECONDS = 120  # for one case at one variant

State = dict[str, Tensor]


class TooLongError(Exception):
    """A case took longer than it may."""


def missing(case: ModelCase) -> str:
    """Why a case cannot be tried here; ``""`` where it can."""
    try:
        case.build()
    except ImportError as error:
        return f"{case.library} is not installed: {error}"
    return ""


def _start(case: ModelCase, rank: int) -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[Any, ...]]]:
    torch.manual_seed(0)
    random.seed(0)  # some libraries draw with it where they build
    model, draw = case.build()
    torch.manual_seed(1 + rank)
    batches = [draw() for _ in range(STEPS)]
    torch.manual_seed(100 + rank)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False), batches


def _ranks(variant: str) -> tuple[int, int]:
    """This rank's number, and how many there are with batches of their own."""
    if variant == SHARED or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _draws(case: ModelCase) -> bool:
    """Whether a model draws random numbers in training."""
    model, _, batches = _start(case, 0)
    before = torch.get_rng_state()
    model(*batches[0])
    return not torch.equal(before, torch.get_rng_state())


def _plain(case: ModelCase, variant: str) -> tuple[list[Tensor], State]:
    rank, num_ranks = _ranks(variant)
    model, optimizer, batches = _start(case, rank)
    runner = model
    if num_ranks > 1:  # which have built the same model: weights in few bits are none that it could send
        runner = DistributedDataParallel(model, find_unused_parameters=True, init_sync=False)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = runner(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses, _take_apart(model.state_dict())


def _take_apart(state: Mapping[str, Tensor]) -> State:
    """Copies of plain tensors: the parts of those in few bits, which compare as no library's class does."""
    return {
        path_name(name, path): part.clone()
        for name, tensor in state.items()
        for path, part in (parts_of(tensor) or {"": tensor}).items()
    }


def _compiled(case: ModelCase, variant: str, options: dict[str, Any]) -> tuple[list[Tensor], State, str]:
    """Losses and values, and what is wrong with the peak."""
    model, optimizer, batches = _start(case, _ranks(variant)[0])
    options = {"machine": "cpu", **options, "constant": case.constant}
    budget = None
    if "memory_budget" in options:
        try:
            zerofx.plan(model, optimizer, batches[0], backend="eager", **options)
        except BudgetMissedError as error:
            budget = error.least_bytes
        options = {**options, "memory_budget": budget}
    step = zerofx.compile(model, optimizer, backend="eager", **options)
    try:
        losses = [step(*batch).clone() for batch in batches]
        state = _take_apart(step.full_state_dict())
        return losses, state, "" if budget is None else _peaks(step, batches[-1], budget)
    finally:
        step.close()


def _peaks(step: zerofx.Step, batch: tuple[Any, ...], budget: int) -> str:
    predicted = step.plan.peak_bytes["device"]
    measured = step.measure(*batch, num_steps=1).peak_bytes["device"]
    if predicted > budget or measured != predicted:
        return f"expected a peak of {predicted} bytes within {budget}, measured {measured}"
    return ""


def _different(expected: tuple[list[Tensor], State], losses: list[Tensor], state: State, *, rounded: bool) -> str:
    pairs = [(f"loss {n}", *pair) for n, pair in enumerate(zip(expected[0], losses, strict=True))]
    if expected[1].keys() != state.keys():
        return f"names {sorted(expected[1].keys() ^ state.keys())[:4]}"
    pairs += [(name, tensor, state[name]) for name, tensor in expected[1].items()]
    wrong = [name for name, one, other in pairs if not _same(one, other, rounded=rounded)]
    return f"expected eager mode's bits, found others in {', '.join(wrong[:3])} ({len(wrong)})" if wrong else ""


def _same(one: Tensor, other: Tensor, *, rounded: bool) -> bool:
    if rounded and one.shape == other.shape:
        return torch.allclose(one.nan_to_num(), other.nan_to_num(), rtol=1e-4, atol=1e-5)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.itemsize == 1:  # which torch compares, in fp8, as nothing else
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _breaks_fullgraph(case: ModelCase) -> bool:
    torch._dynamo.reset()
    model, _, batches = _start(case, 0)
    try:
        torch.compile(model, fullgraph=True, backend="eager")(*batches[0])
    except Exception:  # noqa: BLE001 - whatever it is that a stranger's model ends in
        return True
    return False


@contextmanager
def _in_time(seconds: int) -> Any:
    def stop(*_: object) -> None:
        raise TooLongError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _try(case: ModelCase, variant: str, options: dict[str, Any]) -> Record:
    outcome: Outcome = "wrong"
    try:
        with _in_time(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses, state, peaks = _compiled(case, variant, options)
            rounded = variant in (TILED, SHARED)
            detail = _different(_plain(case, variant), losses, state, rounded=rounded) or peaks
            outcome = "wrong" if detail else "exact"
    except zerofx.ZeroFXError as error:
        outcome, detail = "wrong" if isinstance(error, zerofx.InternalError) else "refused", _line(error)
    except Exception as error:  # noqa: BLE001 - what is no error of ours is what the net is for
        detail = _line(error)
    return Record(case.name, variant, outcome, detail)


def _line(error: BaseException) -> str:
    text = re.sub(r"/\S*site-packages/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:400]


def _on_two_ranks(names: Sequence[str], variants: Sequence[str]) -> list[Record]:
    return [
        _try(CASES[name], variant, RANKS[variant])
        for name in names
        for variant in variants
        if variant != SHARED or not _draws(CASES[name])
    ]


def run(names: Iterable[str], variants: Iterable[str]) -> list[Record]:
    """Try each case at each variant; what is refused says whether ``torch.compile`` takes the model whole."""
    names, variants = list(names), list(variants)
    found = [
        _try(CASES[name], variant, VARIANTS[variant]) for name in names for variant in variants if variant in VARIANTS
    ]
    on_two = [variant for variant in variants if variant in RANKS]
    if on_two:
        by_rank = run_ranks(_on_two_ranks, 2, names, on_two)
        found += [max(pair, key=_badness) for pair in zip(*by_rank, strict=True)]
    breaks = {record.name: _breaks_fullgraph(CASES[record.name]) for record in found if record.outcome == "refused"}
    return [_with_column(record, breaks) for record in found]


def _badness(record: Record) -> int:
    return ("exact", "refused", "wrong").index(record.outcome)


def _with_column(record: Record, breaks: Mapping[str, bool]) -> Record:
    if record.name not in breaks or record.outcome != "refused":
        return record
    said = "breaks too" if breaks[record.name] else "takes it"
    return Record(
        record.name, record.variant, record.outcome, f"{record.detail} (torch.compile(fullgraph=True) {said})"
    )


def main(arguments: Sequence[str]) -> None:
    """The full sweep, or that of some ``--variants``; records go to the net's file as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", nargs="*", default=[*VARIANTS, *RANKS])
    parser.add_argument("--again", action="store_true", help="try also what has a record")
    asked = parser.parse_args(arguments)
    path = results_path("models")
    done = {(record.name, record.variant): record for record in read_records(path)}
    here = []
    for name, case in CASES.items():
        if why := missing(case):
            tqdm.write(f"{name}: left out: {why}")
        else:
            here.append(name)
    # What runs on one rank goes case by case; a pair of ranks, which takes seconds to start, goes through a few.
    groups = [[name] for name in here] if set(asked.variants) & set(VARIANTS) else []
    few = [here[start : start + 8] for start in range(0, len(here), 8)] if set(asked.variants) & set(RANKS) else []
    work = [(names, VARIANTS) for names in groups] + [(names, RANKS) for names in few]
    for names, kind in tqdm(work, file=sys.stdout):
        variants = [variant for variant in asked.variants if variant in kind]
        left = [name for name in names if asked.again or any((name, v) not in done for v in variants)]
        if left:
            done |= {(record.name, record.variant): record for record in run(left, variants)}
            write_records(path, done.values())


if __name__ == "__main__":
    main(sys.argv[1:])
