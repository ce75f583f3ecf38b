"""The net over optimizers: does a compiled step train as eager mode does with the same optimizer, to the bit?

Twelve steps of a small model, eager backend, next to plain torch (with the gradients of all ranks averaged, as
DistributedDataParallel does): losses, parameters, and all that ``optimizer.state_dict()`` says. ``python -m
tests.nets.optimizers`` is the full sweep; it goes on where it was interrupted. ``--cost`` measures what a step takes on
the host for the numbers of 20 groups under a schedule.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import statistics
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import zerofx
from tests.lib.distributed import run_ranks
from tests.nets.cases.optimizers import OptimizerCase, optimizer_cases
from tests.nets.records import Outcome, Record, results_path, write_records
from zerofx.session.taken_over import TakenOver

NUM_STEPS = 12
_SAVED_AFTER = 5
_CASES_A_CALL = 40

Values = dict[str, Any]


class _Training:
    """A model, its optimizer and schedule, trained step by step, from what was ``saved`` where something was."""

    def __init__(self, case: OptimizerCase, saved: tuple[Values, Values] | None = None) -> None:
        self.model = case.model()
        self.optimizer = case.optimizer(self.model)
        if saved is not None:
            self.model.load_state_dict(saved[0])
            self.optimizer.load_state_dict(saved[1])
        self.schedule: Any = None
        if case.variant == "schedule":
            self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.8 ** (step // 2))
        self.losses: list[Tensor] = []

    def train(self, batches: Iterable[Sequence[Tensor]]) -> None:
        """A step a batch, of which there is a part for each rank."""
        for parts in batches:
            self.losses.append(self.step(parts).detach().clone())
            if self.schedule is not None:
                self.schedule.step()

    def step(self, parts: Sequence[Tensor]) -> Tensor:
        """One step; returns this rank's loss."""
        losses, gradients = [], []
        for part in parts:
            self.optimizer.zero_grad()
            losses.append(_loss(self.model(part)))
            losses[-1].backward()
            gradients.append([p.grad for p in self.model.parameters()])
        for p, of_ranks in zip(self.model.parameters(), zip(*gradients, strict=True), strict=True):
            p.grad = reduce(torch.add, [g for g in of_ranks if g is not None]) / len(parts)  # in the order of ranks
        self.optimizer.step()
        return losses[_rank()]

    def values(self) -> Values:
        """All parameters, copied."""
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def saved(self) -> tuple[Values, Values]:
        """Parameters, and the optimizer's state, in which parameters that have none may be left out."""
        states = copy.deepcopy(self.optimizer.state_dict())
        entries = {key: entry for key, entry in states.get("state", {}).items() if entry}
        return self.values(), states | ({"state": entries} if "state" in states else {})

    def close(self) -> None:
        """Let go of what is held."""


class _Compiled(_Training):
    """The same, by a compiled step."""

    def __init__(self, case: OptimizerCase, saved: tuple[Values, Values] | None = None) -> None:
        super().__init__(case, saved)
        self._step = zerofx.compile(
            self.model, self.optimizer, case.stage, loss_fn=lambda outputs, _: _loss(outputs), backend="eager"
        )

    def step(self, parts: Sequence[Tensor]) -> Tensor:
        """One step; returns this rank's loss."""
        loss: Tensor = self._step(parts[_rank()])
        return loss

    def values(self) -> Values:
        """All parameters, copied."""
        return self._step.full_state_dict()

    def save(self, place: Path) -> None:
        """A checkpoint."""
        self._step.save_checkpoint(place)

    def load(self, place: Path) -> None:
        """Go on from a checkpoint."""
        self._step.load_checkpoint(place)

    def close(self) -> None:
        """Let go of what is held."""
        self._step.close()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _loss(outputs: Tensor) -> Tensor:
    return outputs.float().square().sum() + outputs.float().sum()


def _batches(case: OptimizerCase) -> list[list[Tensor]]:
    generator, width = torch.Generator().manual_seed(5), next(case.model().parameters()).shape[1]
    return [
        [torch.randn(4, width, generator=generator).to(case.dtype) for _ in range(num_ranks)]
        for number in range(NUM_STEPS)
        for num_ranks in (case.num_ranks_before if number < _SAVED_AFTER else case.num_ranks,)
    ]


def _place(case: OptimizerCase, folder: Path) -> Path:
    return folder / f"{case.name} {case.full_variant}"


def _train(kind: type[_Training], case: OptimizerCase, folder: Path) -> Values:
    """Everything that has to be the same; ``folder`` has checkpoints to resume from."""
    batches = _batches(case)
    saved, losses = None, list[Tensor]()
    parts = (batches[:_SAVED_AFTER], batches[_SAVED_AFTER:]) if case.variant in ("restored", "resumed") else (batches,)
    for number, part in enumerate(parts):
        if case.variant == "resumed" and kind is _Compiled and not number:
            continue
        training = kind(case, saved)
        try:
            if isinstance(training, _Compiled) and case.variant == "resumed":
                training.load(_place(case, folder))
            training.train(part)
            saved = training.saved()
        finally:
            training.close()
        losses = training.losses if case.variant == "resumed" else [*losses, *training.losses]
    assert saved is not None
    return {"losses": losses, "parameters": saved[0], "optimizer": saved[1]}


def difference(expected: Any, found: Any, where: str = "") -> str:
    """The first place where two nests of values differ; NaN is NaN, and types count."""
    if type(expected) is not type(found):
        return f"{where}: {type(expected).__name__} expected, {type(found).__name__} found"
    if isinstance(expected, Tensor):
        alike = expected.shape == found.shape and expected.dtype == found.dtype
        if alike and torch.allclose(expected, found, rtol=0, atol=0, equal_nan=True):
            return ""
        return f"{where}: {expected.flatten()[:3].tolist()} expected, {found.flatten()[:3].tolist()} found"
    if isinstance(expected, dict):
        if expected.keys() != found.keys():
            return f"{where}: {expected.keys() ^ found.keys()} on one side"
        pairs = [(expected[key], found[key], key) for key in expected]
    elif isinstance(expected, (list, tuple, deque)):
        if len(expected) != len(found):
            return f"{where}: {len(expected)} expected, {len(found)} found"
        pairs = [(a, b, index) for index, (a, b) in enumerate(zip(expected, found, strict=True))]
    elif type(expected).__module__ != "builtins" and hasattr(expected, "__dict__") and not isinstance(expected, type):
        return difference(vars(expected), vars(found), where)
    elif expected is found or expected == found or (expected != expected and found != found):
        return ""
    else:
        return f"{where}: {expected} expected, {found} found"
    return next((text for a, b, key in pairs if (text := difference(a, b, f"{where}[{key}]"))), "")


def _train_eagerly(case: OptimizerCase, folder: Path) -> tuple[Values | None, str]:
    """What eager mode gives, and why it gives nothing."""
    try:
        return _train(_Training, case, folder), ""
    except Exception as error:  # noqa: BLE001  # of other people's code: whatever it raises
        return None, f"eager mode fails too: {type(error).__name__}: {error}"


def _failed(case: OptimizerCase, error: Exception, outside: str) -> Record:
    if isinstance(error, zerofx.ZeroFXError):
        outcome: Outcome = "wrong" if isinstance(error, zerofx.InternalError) else "refused"
        # Where eager mode fails, what it says is the reason.
        return Record(case.name, case.full_variant, outcome, _line(outside or f"{error}"))
    # What is no error of ours is what the net is looking for.
    outcome = "refused" if type(error).__name__ in outside else "wrong"
    text = outside if outcome == "refused" else f"{type(error).__name__}: {error}"
    return Record(case.name, case.full_variant, outcome, _line(text))


def check(case: OptimizerCase, folder: Path) -> Record:
    """What becomes of one case, on this rank; ``folder`` has checkpoints to resume from."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, outside = _train_eagerly(case, folder)
        try:
            found = _train(_Compiled, case, folder)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is an outcome
            return _failed(case, error, outside)
    if expected is None:
        return Record(case.name, case.full_variant, "wrong", _line(f"trains, where {outside}"))
    text = difference(expected, found)
    return Record(case.name, case.full_variant, "wrong" if text else "exact", _line(text))


def save(case: OptimizerCase, folder: Path) -> Record | None:
    """Train until the checkpoint; gives what is the matter, if something is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            training = _Compiled(case)
            with closing(training):
                training.train(_batches(case)[:_SAVED_AFTER])
                training.save(_place(case, folder))
        except Exception as error:  # noqa: BLE001  # whatever it is, it is an outcome
            return _failed(case, error, _train_eagerly(case, folder)[1])
    return None


def _line(text: str) -> str:
    """One line, without the machine's paths."""
    text = re.sub(r"/\S*/(site-packages|lib/python[\d.]*)/", "", " ".join(text.split()))
    return re.sub(r"0x[0-9a-f]+", "0x...", text)[:300]


def _check_all(cases: list[OptimizerCase], folder: Path) -> list[Record]:
    torch.set_num_threads(1)
    return [check(case, folder) for case in cases]


def _save_all(cases: list[OptimizerCase], folder: Path) -> list[Record | None]:
    torch.set_num_threads(1)
    return [save(case, folder) for case in cases]


def run(cases: Sequence[OptimizerCase]) -> Iterator[Record]:
    """A record a case. Those of several ranks share their processes, some dozens at a time."""
    for case in cases:
        if case.num_ranks == case.num_ranks_before == 1:
            yield check(case, Path())
    worlds = {(case.num_ranks_before, case.num_ranks) for case in cases}
    for num_before, num_ranks in sorted(worlds - {(1, 1)}):
        alike = [case for case in cases if (case.num_ranks_before, case.num_ranks) == (num_before, num_ranks)]
        for start in range(0, len(alike), _CASES_A_CALL):
            part = alike[start : start + _CASES_A_CALL]
            with tempfile.TemporaryDirectory() as folder:
                if num_before > num_ranks:
                    failed = [
                        _worst(each) for each in zip(*_on_ranks(_save_all, num_before, part, folder), strict=True)
                    ]
                    yield from (record for record in failed if record is not None)
                    part = [case for case, record in zip(part, failed, strict=True) if record is None]
                for of_ranks in zip(*_on_ranks(_check_all, num_ranks, part, folder), strict=True):
                    record = _worst(of_ranks)
                    assert record is not None
                    yield record


def _on_ranks(fn: Any, num_ranks: int, cases: list[OptimizerCase], folder: str) -> Any:
    return run_ranks(fn, num_ranks, cases, Path(folder), timeout=1800.0)


def _worst(of_ranks: Sequence[Record | None]) -> Record | None:
    wrong = [record for record in of_ranks if record is not None and record.outcome == "wrong"]
    return wrong[0] if wrong else of_ranks[-1]


def cost(kind: Any, num_groups: int = 20, num_steps: int = 60, **options: Any) -> tuple[float, float]:
    """The least and the median microseconds of a core in which a step finds its numbers, of one layer a group."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(num_groups)))
    optimizer = kind([{"params": layer.parameters(), "lr": 1e-3 * i} for i, layer in enumerate(model, 1)], **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0 / (1 + number))
    step, spent = zerofx.compile(model, optimizer, backend="eager", loss_fn=_loss), list[float]()
    advance = TakenOver.advance

    def timed(taken: TakenOver) -> Any:
        begin = time.thread_time_ns()
        coming = advance(taken)
        spent.append((time.thread_time_ns() - begin) / 1e3)
        return coming

    with closing(step), mock.patch.object(TakenOver, "advance", timed):
        for _ in range(num_steps):
            step(torch.ones(2, 4))
            schedule.step()
    return min(spent[15:]), statistics.median(spent[15:])


COSTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, foreach=False": (torch.optim.AdamW, {"foreach": False}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "Adam, amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "SGD, momentum": (torch.optim.SGD, {"momentum": 0.9}),
}


def main() -> None:
    """The full sweep, or a part of it of which nothing is written but the notes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="a text that the names of the cases contain")
    parser.add_argument("--part", type=int, default=1, help="one in so many of the cases")
    parser.add_argument("--notes", type=Path, default=Path(tempfile.gettempdir(), "zerofx_optimizers.jsonl"))
    parser.add_argument("--cost", action="store_true", help="measure what a step's numbers cost, and nothing else")
    parsed = parser.parse_args()
    if parsed.cost:
        rows = [(name, *cost(kind, **options)) for name, (kind, options) in COSTS.items()]
        print(tabulate(rows, headers=["20 groups, microseconds", "least", "median"], floatfmt=".0f"))
        return
    every = optimizer_cases()
    cases = [case for case in every if parsed.only is None or parsed.only in f"{case.name}: {case.full_variant}"]
    cases, is_whole = cases[:: parsed.part], parsed.only is None and parsed.part == 1
    lines = parsed.notes.read_text().splitlines() if parsed.notes.exists() and is_whole else []
    records = [Record(**json.loads(line)) for line in lines]
    known = {(record.name, record.variant) for record in records}
    left = [case for case in cases if (case.name, case.full_variant) not in known]
    for record in tqdm(run(left), total=len(left)):
        records.append(record)
        if is_whole:
            with parsed.notes.open("a") as notes:
                notes.write(f"{json.dumps(asdict(record))}\n")
        if not is_whole or record.outcome == "wrong":
            tqdm.write(f"{record.name}: {record.variant}: {record.outcome} {record.detail}")
    counts = Counter(record.outcome for record in records)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    if is_whole:
        write_records(results_path("optimizers"), records)
        parsed.notes.unlink()


if __name__ == "__main__":
    main()
