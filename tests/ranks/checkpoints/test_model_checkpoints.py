"""Checkpoints where ranks share one computation: taken up bit for bit there, and by any other mesh."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, Case, batches
from tests.lib.runs.checkpoints import Outcome, outcome
from tests.lib.runs.sharing import PARTED, SHARING
from tests.lib.runs.training import build, world
from zerofx.disk.checkpoint.boxes import Box
from zerofx.disk.checkpoint.folder import read_marker
from zerofx.disk.checkpoint.marker import STATE, state_name
from zerofx.disk.checkpoint.reader import CheckpointReader

pytestmark = pytest.mark.filterwarnings("ignore:.*(ShardedTensor|TypedStorage|no_dist|torch.distributed is).*")
STEPS = 2  # before the checkpoint, and after it
Batches = list[tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Way:
    """A way to train, on a mesh of its own."""

    mesh: dict[str, int]
    stage: int = 3
    name: str = "parted"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return zerofx.Mesh(**self.mesh).num_ranks if self.mesh else 1

    @property
    def case(self) -> Case:
        return PARTED if self.name == "parted" else CASES[self.name]

    def step(self, seed: int) -> tuple[zerofx.Step, Batches]:
        """A step of a model whose values are `seed`'s, and the batches of this rank."""
        case = self.case
        torch.manual_seed(seed)
        model = case.model()
        options: dict[str, Any] = {"backend": "eager", "machine": SHARING, **self.options}
        step = zerofx.compile(
            model, case.optimizer(model), self.stage, loss_fn=case.loss_fn, mesh=self.mesh or None, **options
        )
        return step, list(batches(case, world()[0] // self.mesh.get("model", 1), 2 * STEPS))

    def __str__(self) -> str:
        return f"{self.name} on {self.mesh} at stage {self.stage} {self.options or ''}"


def trained(step: zerofx.Step, given: Batches) -> list[float]:
    return [float(step(*args, **kwargs)) for args, kwargs in given]


def saved(folder: str, ways: list[Way]) -> list[Outcome]:
    """Train each way, and save it in the middle: at once, while steps go on, and by DCP; with plain values beside."""
    os.environ["ZEROFX_NVME_DIR"] = folder
    outcomes = []
    for number, way in enumerate(ways):
        step, given = way.step(7)
        trained(step, given[:STEPS])
        place = step.save_checkpoint(Path(folder, str(number)))
        with step.full_parameters() as model:
            whole = {name: value.clone() for name, value in model.state_dict().items()}
        torch.save((whole, step.optimizer.state_dict()), place / f"whole-{world()[0]}.pt")
        dcp_save({"step": step}, checkpoint_id=place / "dcp")
        later = step.save_checkpoint(Path(folder, f"{number} later"), asynchronous=True)
        losses = trained(step, given[STEPS:])
        step.finish_saving()
        assert read_marker(place).files == read_marker(later).files, "written while steps went on, the same"
        outcomes.append(outcome(step, losses))
        step.close()
    return outcomes


def resumed(folder: str, ways: list[Way], *, first: bool = True) -> list[Outcome]:
    """Go on from the middle of each way with other values until then; `first`: before any step."""
    os.environ["ZEROFX_NVME_DIR"] = folder
    outcomes = []
    for number, way in enumerate(ways):
        step, given = way.step(8)
        if not first:
            trained(step, given[:1])
        step.load_checkpoint(Path(folder, str(number)))
        outcomes.append(outcome(step, trained(step, given[STEPS:])))
        step.close()
    return outcomes


def loaded(folder: str, ways: list[Way]) -> list[str]:
    """What is not as it was saved where each of other ways loads it: before its first step, and by DCP."""
    wrong = []
    for way in ways:
        step, given = way.step(9)
        for place in sorted(Path(folder).glob("[0-9]/step-*")):
            step.load_checkpoint(place)
            step.prepare(*given[0][0], **given[0][1])
            wrong += [f"{place.parent.name} by {way}: {what}" for what in differences(step, place)]
            trained(step, given[:1])
            dcp_load({"step": step}, checkpoint_id=place / "dcp")
            wrong += [f"{place.parent.name} by {way}, DCP: {what}" for what in differences(step, place)]
        step.close()
    return wrong


def differences(step: zerofx.Step, place: Path) -> list[str]:
    """Where a step has another value than was saved. Buffers are each rank's own."""
    model, optimizer = torch.load(place / "whole-0.pt")
    own, own_optimizer = step.full_state_dict(), step.optimizer.state_dict()
    buffers = {name for name, _ in step.model.named_buffers()}
    wrong = [name for name, value in model.items() if name not in buffers and not torch.equal(value, own[name])]
    for index, entry in optimizer["state"].items():
        other = own_optimizer["state"][index]
        wrong += [f"{name} of {index}" for name, value in entry.items() if not torch.equal(value, other[name])]
    return wrong


def unread(folder: Path, ways: list[Way]) -> list[str]:
    """What is read by name as something else than it was."""
    wrong = []
    for number, way in enumerate(ways):
        (place,) = (folder / str(number)).glob("step-*")
        model, optimizer = torch.load(place / "whole-0.pt")
        reader = CheckpointReader(place)
        assert set(reader.marker.tensors) | set(reader.marker.aliases) == set(model)
        for name, value in model.items():
            found = reader.read(reader.marker.aliases.get(name, name), Box.whole(value.shape))
            wrong += [f"{way}: {name}"] if not torch.equal(found, value) else []
        names = [name for name, _ in build(way.case).named_parameters()]
        for index, entry in optimizer["state"].items():
            for state in reader.marker.optimizer.states[names[index]]:
                found = reader.read(state_name(names[index], state), Box.whole(entry[state].shape), STATE)
                wrong += [f"{way}: {state} of {names[index]}"] if not torch.equal(found, entry[state]) else []
        reader.close()
    return wrong


def there_and_back(
    folder: str, ways: list[Way], others: list[Way], first: bool
) -> tuple[list[Outcome], list[Outcome], list[str]]:
    """What `ways` come to where they go on and where they are taken up, and what is not as saved with `others`."""
    return saved(folder, ways), resumed(folder, ways, first=first), loaded(folder, others)


def check(folder: Path, ways: list[Way], others: list[Way], *, first: bool = True) -> None:
    """Each of `ways`, on as many ranks, goes on as it would have; all are loaded by `others`, and read by name."""
    num_ranks = ways[0].num_ranks
    fitting = [way for way in others if way.num_ranks == num_ranks]
    for rank, (expected, found, wrong) in enumerate(
        run_ranks(there_and_back, num_ranks, str(folder), ways, fitting, first)
    ):
        differ = {str(way): one.differences(two) for way, one, two in zip(ways, expected, found, strict=True)}
        assert not any(differ.values()) and not wrong, (rank, differ, wrong)
    assert not unread(folder, ways)
    for number in {way.num_ranks for way in others} - {num_ranks}:
        fitting = [way for way in others if way.num_ranks == number]
        assert run_ranks(loaded, number, str(folder), fitting) == [[]] * number


@dataclass
class Position:
    """What each rank saves of its own."""

    number: int

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def saved_of_each(folder: str, way: Way) -> str:
    """Save what each rank has of its own, and give the state of its generator."""
    step, given = way.step(7)
    trained(step, given[:1])
    torch.manual_seed(100 + world()[0])
    step.save_checkpoint(folder, state={"position": Position(world()[0])})
    dcp_save({"step": step}, checkpoint_id=Path(folder, "dcp"))
    step.close()
    return drawn()


def taken_of_each(folder: str, way: Way) -> list[tuple[str, str, int]]:
    """The state of this rank's generator by both formats, and its position; before the first step, and after it."""
    step, given = way.step(8)
    found = []
    for _ in range(2):
        position = Position(-1)
        step.load_checkpoint(folder, state={"position": position})
        own = drawn()
        step.prepare(*given[0][0], **given[0][1])
        dcp_load({"step": step}, checkpoint_id=Path(folder, "dcp"))
        found.append((own, drawn(), position.number))
    step.close()
    return found


def drawn() -> str:
    return bytes(torch.get_rng_state().tolist()).hex()


TWO, PAIRS = {"model": 2}, {"shard": 2, "model": 2}


@pytest.mark.days(3)
def test_two_ranks_that_share_a_model_go_on_and_others_take_it_up(tmp_path: Path) -> None:
    check(tmp_path, [Way(TWO)], [Way({"shard": 2}, 2)])
    assert not loaded(str(tmp_path), [Way({}, 0)])


@pytest.mark.days(3)
def test_two_ranks_that_share_a_model_take_up_what_others_saved(tmp_path: Path) -> None:
    check(tmp_path, [Way({"shard": 2}, options={"precision": "bf16"})], [Way(TWO, 1)], first=False)


@pytest.mark.days(3)
@pytest.mark.parametrize(
    ("mesh", "other", "before"),
    [
        pytest.param({"shard": 2}, PAIRS, (0, 0, 1, 1), marks=pytest.mark.slow),
        (PAIRS, {"shard": 2}, (0, 2)),
        pytest.param(TWO, PAIRS, (0, 1, None, None), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_that_share_a_computation_go_on_with_what_their_group_had(
    tmp_path: Path, mesh: dict[str, int], other: dict[str, int], before: tuple[int | None, ...]
) -> None:
    was = run_ranks(saved_of_each, math.prod(mesh.values()), str(tmp_path), Way(mesh))
    found = run_ranks(taken_of_each, math.prod(other.values()), str(tmp_path), Way(other))
    for rank, number in enumerate(before):
        own = was[number] if number is not None else found[before.index(None)][0][0]
        assert found[rank] == [(own, own, number or 0)] * 2, rank
        assert number is not None or own not in was


MESHES: list[dict[str, int]] = [
    TWO, PAIRS, {"replicate": 2, "model": 2}, {"replicate": 2, "shard": 2}, {"shard": 2}, {"model": 4}, {},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_by_every_other(tmp_path: Path, mesh: dict[str, int]) -> None:
    others = [Way(other, stage % 4) for stage, other in enumerate(m for m in MESHES if m != mesh)]
    check(tmp_path / "parted", [Way(mesh, stage) for stage in range(4)], others)
    for name in ("gpt", "llama", "tied"):
        check(tmp_path / name, [Way(mesh, 3, name)], [Way(way.mesh, way.stage, name) for way in others])
