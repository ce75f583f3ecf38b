"""Mutations of the files that zerofx reads: a plan that was saved, and what it keeps for the next run.

A plan file that was changed is refused with a ``PlanError``, or is still a plan by which training is the same to the
bit.
What is kept is absent where it was changed; where its hash was made to fit, too, reading it gives something or nothing,
and never another error. ``python -m tests.nets.mutations`` runs all 500.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import zerofx
from tests.nets.records import Record, report
from zerofx.disk.cache import DiskCache
from zerofx.errors import PlanError, ZeroFXError
from zerofx.report.saved import SavedPlan

NET, NUM_CASES = "mutations", 500
BUDGET = 80_000
KINDS = ("plan", "report", "capture", "searched", "step")
_ODD: tuple[Any, ...] = (None, -1, 0, 2**70, 0.5, float("nan"), True, "", "__import__('os')", [], {}, [[]], {"a": 1})


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.as_tensor(self.down(torch.tanh(self.up(x))))


def squared(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


@dataclass(frozen=True)
class World:
    """A folder with a cache and a plan file, as a first run has left them, and the losses of that run."""

    folder: Path
    plan: bytes
    report: bytes
    kept: dict[str, bytes]
    losses: tuple[float, ...]


def train(folder: Path, **options: Any) -> tuple[float, ...]:
    """The losses of two steps."""
    with step_of(folder, **options) as (step, batch):
        return tuple(float(step(*batch)) for _ in range(2))


@contextmanager
def step_of(folder: Path, **options: Any) -> Iterator[tuple[zerofx.Step, tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(32, 16), torch.randn(32, 16)
    before = {name: os.environ.get(name) for name in ("ZEROFX_CACHE_DIR", "ZEROFX_DUMP_DIR")}
    os.environ |= {"ZEROFX_CACHE_DIR": str(folder / "cache"), "ZEROFX_DUMP_DIR": str(folder / "dumps")}
    try:
        given = {"memory_budget": BUDGET} | options
        step = zerofx.compile(model, optimizer, backend="eager", loss_fn=squared, example_batch=batch, **given)
        try:
            yield step, batch
        finally:
            step.close()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def make_world(folder: Path) -> World:
    """Run once, and read what that leaves."""
    with step_of(folder) as (step, batch):
        losses = tuple(float(step(*batch)) for _ in range(2))
        assert step.plan.recomputes or step.plan.offloads or step.plan.tiles, "a plan with something in it"
        step.save_plan(folder / "report.json")
        step.plan.save(folder / "plan.json")
    kept = {path.name: path.read_bytes() for path in (folder / "cache").iterdir()}
    return World(folder, (folder / "plan.json").read_bytes(), (folder / "report.json").read_bytes(), kept, losses)


def run_case(world: World, number: int) -> Record:
    """What becomes of one mutation; it follows from its number."""
    draw = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    if kind == "plan":
        data, how = mutated_text(world.plan, draw)
        return _judged(number, f"plan, {how}", lambda: _compiled_with(world, data))
    if kind == "report":
        data, how = mutated_text(world.report, draw)
        return _judged(number, f"report, {how}", lambda: _shown(world, data))
    prefix = "plan" if kind == "searched" else kind
    names = sorted(name for name in world.kept if name.startswith(prefix))
    name = draw.choice(names)
    if draw.random() < 0.4:
        data, how = mutated_bytes(world.kept[name], draw)
        return _judged(number, f"kept {kind}, {how}", lambda: _trained_from(world, name, data))
    text, how = mutated_text(zlib.decompress(world.kept[name][hashlib.sha256().digest_size :]), draw)
    packed = zlib.compress(text, 1)
    sealed = hashlib.sha256(name.encode() + b"\0" + packed).digest() + packed
    return _judged(number, f"kept {kind} with a hash that fits, {how}", lambda: _read(world, name, sealed))


def _judged(number: int, variant: str, happens: Callable[[], bool]) -> Record:
    name = f"mutation {number:03d}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            same = happens()
    except ZeroFXError as error:
        if not isinstance(error, PlanError | zerofx.MemoryBudgetError | zerofx.UsageError):
            return Record(name, variant, "wrong", f"expected a PlanError, found {type(error).__name__}: {error}"[:300])
        return Record(name, variant, "refused", str(error).partition("\n")[0][:200])
    except Exception as error:  # noqa: BLE001 - what is looked for
        return Record(name, variant, "wrong", f"expected a PlanError, found {error!r}"[:300])
    return Record(name, variant, "exact") if same else Record(name, variant, "wrong", "it trains something else")


def _compiled_with(world: World, data: bytes) -> bool:
    path = world.folder / "mutated.json"
    path.write_bytes(data)
    return train(world.folder, plan=path, memory_budget=None) == world.losses


def _shown(world: World, data: bytes) -> bool:
    path = world.folder / "mutated.json"
    path.write_bytes(data)
    saved = SavedPlan.load(path)
    saved.schedule.table(fold=True)
    saved.to_html(world.folder / "page.html")
    return bool(str(saved.plan))


def _trained_from(world: World, name: str, data: bytes) -> bool:
    path = world.folder / "cache" / name
    path.write_bytes(data)
    try:
        assert DiskCache(path.parent).read(name) is None or data == world.kept[name], "the hash does not fit"
        return train(world.folder) == world.losses
    finally:
        for found in path.parent.iterdir():
            found.unlink()
        for each, content in world.kept.items():
            (path.parent / each).write_bytes(content)


def _read(world: World, name: str, data: bytes) -> bool:
    from zerofx.driver.kept.step import KeptStep
    from zerofx.ir.serialise import from_json
    from zerofx.scheduler.search.stages.kept import Answer

    path = world.folder / "cache" / name
    path.write_bytes(data)
    readers: dict[str, Callable[[str], object]] = {
        "step": KeptStep.from_json,
        "plan": Answer.from_json,
        "capture": lambda text: from_json(text, _blank(), _fake_mode()),
    }
    try:
        DiskCache(path.parent).read_as(name, readers[name.partition("-")[0]])
        return True
    finally:
        path.write_bytes(world.kept[name])


def _blank() -> Any:
    from torch import fx

    from zerofx.ir.graph import StepGraph
    from zerofx.ir.parameters import parameter_infos

    model = nn.Sequential(*(Layer() for _ in range(4)))
    return StepGraph(fx.Graph(), torch.device("cpu"), parameter_infos(model, None, {}), frozenset())


def _fake_mode() -> Any:
    from zerofx.torch_private.capture import fake_mode

    return fake_mode()


def mutated_bytes(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """``data`` with some bytes changed, cut out, put in or repeated, and how."""
    start = draw.randrange(len(data))
    end = min(len(data), start + draw.choice([1, 2, 8, 64]))
    how = draw.choice(["bits", "cut", "short", "more", "twice", "empty"])
    other = bytes(draw.randrange(256) for _ in range(end - start))
    changed = {
        "bits": data[:start] + bytes([data[start] ^ 1 << draw.randrange(8)]) + data[start + 1 :],
        "cut": data[:start] + data[end:],
        "short": data[:start],
        "more": data[:start] + other + data[start:],
        "twice": data[:end] + data[start:],
        "empty": b"",
    }
    return changed[how], f"bytes: {how}"


def mutated_text(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """JSON with one value in it changed, or some bytes."""
    if draw.random() < 0.15:
        return mutated_bytes(data, draw)
    tree = json.loads(data)
    places = list(_places(tree))
    owner, key = draw.choice(places)
    how = draw.choice(["odd", "odd", "other", "other", "gone", "near", "twice"])
    if how == "gone":
        del owner[key]
    elif how == "twice" and isinstance(owner, list):
        owner.insert(key, copy.deepcopy(owner[key]))
    elif how == "near" and type(owner[key]) in (int, float):
        owner[key] += draw.choice([-1, 1, 7])
    elif how == "near" and isinstance(owner[key], str):
        owner[key] += draw.choice(["_1", "\n", "'", " "])
    elif how == "other":
        like = [(other, place) for other, place in places if type(other[place]) is type(owner[key])]
        other, place = draw.choice(like)
        owner[key] = copy.deepcopy(other[place])
    else:
        owner[key] = draw.choice(_ODD)
    return json.dumps(tree).encode(), f"{how} at {key}"


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(inside):
        yield tree, key
        yield from _places(value)


def run(numbers: range) -> list[Record]:
    """The records of the mutations with these numbers."""
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder))
        return [run_case(world, number) for number in tqdm(numbers, desc="mutations", unit="case")]


if __name__ == "__main__":
    torch.set_num_threads(1)
    report(NET, run(range(NUM_CASES)))
