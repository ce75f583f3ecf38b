"""Checkpoints of one process: what is in them, what they are refused for, and that nothing changes then."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zerofx
from tests.lib.models import batches
from tests.lib.runs.checkpoints import UNEVEN, Uneven, Way, train
from zerofx import CheckpointError, UsageError
from zerofx.disk.checkpoint import folder, reader
from zerofx.disk.checkpoint.folder import read_marker
from zerofx.disk.checkpoint.reader import CheckpointReader


def prepared(model: nn.Module | None = None, optimizer: Callable[..., Any] = torch.optim.AdamW) -> zerofx.Step:
    model = model or Uneven()
    step = zerofx.compile(model, optimizer(model.parameters(), lr=0.01), backend="eager")
    step.prepare(*next(batches(UNEVEN, 0, 1))[0])
    return step


def trained(num_steps: int = 2) -> zerofx.Step:
    step = prepared()
    for args, _ in batches(UNEVEN, 0, num_steps):
        step(*args)
    return step


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after two steps."""
    torch.manual_seed(0)
    step = trained()
    place = step.save_checkpoint(tmp_path_factory.mktemp("saved"), state={"counter": {"batches": 2}})
    step.close()
    return place


@contextmanager
def unchanged(step: zerofx.Step) -> Iterator[None]:
    """Nothing that is trained, drawn from or counted has changed in the end, and the step goes on."""

    def all_of_it() -> Any:
        return (
            step.full_state_dict(), step.optimizer.state_dict()["state"], step.num_steps, torch.get_rng_state()
        )  # fmt: skip

    before, rates = all_of_it(), [group["lr"] for group in step.optimizer.param_groups]
    yield
    torch.testing.assert_close(all_of_it(), before, rtol=0, atol=0)
    assert [group["lr"] for group in step.optimizer.param_groups] == rates
    step(*next(batches(UNEVEN, 0, 1))[0])


def test_a_checkpoint_has_the_models_names_and_is_read_by_the_library(checkpoint: Path) -> None:
    model = Uneven()
    weights = load_file(checkpoint / "model-00000-of-00001.safetensors")
    assert weights.keys() == model.state_dict().keys() - {"head.weight"}  # which is first.weight
    assert {name: tensor.shape for name, tensor in weights.items() if name != "transposed"} == {
        name: tensor.shape for name, tensor in model.state_dict().items() if name not in ("head.weight", "transposed")
    }
    states = load_file(checkpoint / "state-00000-of-00001.safetensors")
    assert {"optimizer.state.up.weight.exp_avg", "random.cpu"} <= states.keys()
    assert not any("frozen" in name for name in states)


def test_latest_is_loaded_and_kept_are_those_saved_last(tmp_path: Path) -> None:
    step = prepared()
    for args, _ in batches(UNEVEN, 0, 4):
        step(*args)
        latest = step.save_checkpoint(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]
    assert step.load_checkpoint(tmp_path) == latest
    assert step.load_checkpoint(tmp_path / "step-00000003").name == "step-00000003" and step.num_steps == 3


def test_parameters_have_their_values_before_the_first_step(checkpoint: Path) -> None:
    model = Uneven()
    step = zerofx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.01), backend="eager")
    step.load_checkpoint(checkpoint, state={"counter": {}})
    other = prepared()
    other.load_checkpoint(checkpoint, state={"counter": {}})
    torch.testing.assert_close(dict(model.state_dict()), other.full_state_dict(), rtol=0, atol=0)
    for refused in (step.optimizer.state_dict, lambda: step.optimizer.load_state_dict({})):
        with pytest.raises(UsageError, match=r"call step\.prepare\(batch\) first"):
            refused()
    (batch,) = (args for args, _ in batches(UNEVEN, 0, 1))
    torch.manual_seed(1)
    loss = step(*batch)
    torch.manual_seed(1)
    assert torch.equal(loss, other(*batch)) and step.num_steps == 3


def test_a_deferred_model_takes_its_values_from_a_checkpoint(checkpoint: Path) -> None:
    with zerofx.empty_init():
        model = Uneven()
    step = zerofx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.01), backend="eager")
    step.load_checkpoint(checkpoint, state={"counter": {}})
    step.prepare(*next(batches(UNEVEN, 0, 1))[0])
    other = prepared()
    other.load_checkpoint(checkpoint, state={"counter": {}})
    torch.testing.assert_close(step.full_state_dict(), other.full_state_dict(), rtol=0, atol=0)


def test_hyperparameters_and_the_users_state_come_back(tmp_path: Path) -> None:
    step, scheduler = Way(2).step()
    train(step, scheduler, batches(UNEVEN, 0, 4))
    position = {"epoch": 3, "order": torch.arange(5), "names": ("a", 1.5)}
    step.save_checkpoint(tmp_path, state={"scheduler": scheduler, "position": position})
    again, fresh = Way(2).step()
    found: dict[str, Any] = {"stale": True}
    with pytest.warns(zerofx.ZeroFXWarning, match="stays there: scheduler"):
        again.load_checkpoint(tmp_path, state={"position": found})
    again.load_checkpoint(tmp_path, state={"scheduler": fresh, "position": found})
    assert found.keys() == position.keys() and found["names"] == ("a", 1.5)
    assert fresh.state_dict() == scheduler.state_dict()
    assert again.optimizer.param_groups[0]["lr"] == step.optimizer.param_groups[0]["lr"] != 0.01


def test_a_rate_in_a_tensor_comes_back_as_it_was(tmp_path: Path) -> None:
    def compiled(rate: float) -> zerofx.Step:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(rate))
        return zerofx.compile(model, optimizer, backend="eager", loss_fn=lambda outputs, _: outputs.square().mean())

    step, again = compiled(0.25), compiled(0.5)
    step(torch.ones(2, 4))
    step.save_checkpoint(tmp_path)
    again.load_checkpoint(tmp_path)
    assert torch.equal(again.optimizer.param_groups[0]["lr"], torch.tensor(0.25))


def _flip(place: Path) -> None:
    path = place / "state-00000-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def _cut(place: Path) -> None:
    path = place / "model-00000-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _edit(place: Path) -> None:
    path = place / "checkpoint.json"
    path.write_text(path.read_text().replace('"lr":0.01', '"lr":0.02'))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte flipped": (_flip, r"expected the hash \w+ of .*state-00000-of-00001.safetensors"),
    "a file cut short": (_cut, r"model-00000-of-00001.safetensors \([\d,]+ bytes of [\d,]+\)"),
    "a file missing": (
        lambda place: (place / "state-00000-of-00001.safetensors").unlink(), r"state-00000.* \(No such file"
    ),
    "another marker": (_edit, r"checkpoint.json .* was changed since"),
    "no marker": (lambda place: (place / "checkpoint.json").unlink(), r"neither checkpoint.json nor latest"),
}  # fmt: skip


def test_damage_is_found_and_named_before_anything_is_changed(checkpoint: Path, tmp_path: Path) -> None:
    step = trained(1)
    for name, (damage, message) in DAMAGES.items():
        place = tmp_path / name
        shutil.copytree(checkpoint, place)
        damage(place)
        with unchanged(step), pytest.raises(CheckpointError, match=message):
            step.load_checkpoint(place, state={"counter": {}})


class Other(Uneven):
    """Has a layer more, one less, and one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(2))
        self.scale = nn.Parameter(torch.ones(3))
        del self.frozen
        self.frozen = 0.0  # type: ignore[assignment]  # nothing to add

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.down(self.up(self.norm(self.first(x)))) * self.more.sum()
        return (x + self.scale.sum() - target).sum()


def test_another_model_or_optimizer_is_refused_by_what_differs(checkpoint: Path) -> None:
    model = Other()
    step = zerofx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.01), backend="eager")
    with pytest.raises(
        CheckpointError,
        match=r"1 missing \(more\), 1 that the model has not \(frozen\), 1 of another shape \(scale \(float32\[\] for "
        r"float32\[3\]\)\)",
    ):
        step.load_checkpoint(checkpoint)
    with pytest.raises(CheckpointError, match=r"found one of torch\.optim\.adamw\.AdamW"):
        prepared(optimizer=torch.optim.SGD).load_checkpoint(checkpoint)
    fitting = Uneven()
    apart = [{"params": [fitting.scale]}, {"params": [p for p in fitting.parameters() if p is not fitting.scale]}]
    step = zerofx.compile(fitting, torch.optim.AdamW(apart, lr=0.01), backend="eager")
    with pytest.raises(CheckpointError, match="found 1 param groups for 2"):
        step.load_checkpoint(checkpoint)


def test_state_that_was_not_saved_is_refused(checkpoint: Path) -> None:
    step = trained(1)
    with unchanged(step), pytest.raises(CheckpointError, match=r"found no 'loader' \(there is: 'counter'\)"):
        step.load_checkpoint(checkpoint, state={"loader": {}})
    with unchanged(step), pytest.raises(UsageError, match="found 'loader': object"):
        step.load_checkpoint(checkpoint, state={"loader": object()})


def test_plain_values_of_the_users_are_given_back_in_the_dictionary(tmp_path: Path) -> None:
    step = trained(1)
    saved = {"epoch": 3, "best": float("inf"), "seen": [1, (2, 3)], "name": "run", "mean": torch.tensor([0.5, 2.0])}
    step.save_checkpoint(tmp_path, state=saved)
    given: dict[str, Any] = {"epoch": 0, "best": None, "seen": [], "name": "", "mean": None}
    seen = given["seen"]
    step.load_checkpoint(tmp_path, state=given)
    mean = given.pop("mean")
    assert torch.equal(mean, saved.pop("mean")) and given == saved  # type: ignore[arg-type]
    assert seen == []  # a list is another one, as any value is
    with unchanged(step), pytest.raises(UsageError, match="which cannot be changed: give a dict"):
        step.load_checkpoint(tmp_path, state=MappingProxyType({"epoch": 0}))
    with (
        unchanged(step),
        pytest.warns(zerofx.ZeroFXWarning, match="stays there"),
        pytest.raises(CheckpointError, match="expected a dictionary that was saved as 'epoch'"),
    ):
        step.load_checkpoint(tmp_path, state={"epoch": {}})
    endless: list[Any] = []
    endless.append(endless)
    with unchanged(step), pytest.raises(CheckpointError, match="a state that does not hold itself"):
        step.save_checkpoint(tmp_path, state={"endless": endless})


def test_a_run_saves_and_takes_up_plain_values(tmp_path: Path) -> None:
    state = {"epoch": 0}
    run = zerofx.Run(prepared(), tmp_path, every=1, state=state)
    for (args, _), number in zip(batches(UNEVEN, 0, 3), run.steps(3), strict=True):
        run.step(*args)
        state["epoch"] = 10 * number
    again = {"epoch": 0}
    assert zerofx.Run(prepared(), tmp_path, state=again).resumed_from is not None and again == {"epoch": 30}


@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_checkpoint_may_be_removed_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_prepared: bool
) -> None:
    """As by ``keep=`` of the run that writes there."""
    saved = trained()
    place = saved.save_checkpoint(tmp_path)
    losses = [saved(*args) for args, _ in batches(UNEVEN, 0, 2)]
    step = prepared()
    if not is_prepared:
        step.close()
        step = zerofx.compile(step.model, step.optimizer, backend="eager")
    verify = CheckpointReader.verify

    def removed(reader: CheckpointReader, share: int, num_shares: int) -> None:
        verify(reader, share, num_shares)
        shutil.rmtree(place)

    monkeypatch.setattr(CheckpointReader, "verify", removed)
    step.load_checkpoint(tmp_path)
    assert not place.exists()
    assert [step(*args) for args, _ in batches(UNEVEN, 0, 2)] == losses
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]


def test_the_latest_may_change_while_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = trained(1)
    first = step.save_checkpoint(tmp_path)
    resolved: list[Path] = []

    def resolve(path: Path) -> Path:
        resolved.append(folder.resolve(path))
        if len(resolved) == 1:  # another process saves right after
            folder_of(first)
        return resolved[-1]

    def folder_of(gone: Path) -> None:
        gone.rename(tmp_path / "step-00000009")
        (tmp_path / "latest").write_text("step-00000009")

    monkeypatch.setattr(reader, "resolve", resolve)
    assert step.load_checkpoint(tmp_path).name == "step-00000009"


def test_what_cannot_be_written_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    step = trained(1)
    first = step.save_checkpoint(tmp_path)
    there = sorted(tmp_path.rglob("*"))
    (tmp_path.parent / "a file").touch()
    with unchanged(step), pytest.raises(CheckpointError, match="give a folder that can be written to"):
        step.save_checkpoint(tmp_path.parent / "a file" / "inside")
    with unchanged(step), pytest.raises(CheckpointError, match=r"function at state\.counter\.f"):
        step.save_checkpoint(tmp_path, state={"counter": {"f": print, "g": lambda: 1}} | {"counter": {"f": lambda: 1}})
    with pytest.raises(UsageError, match="expected keep to be None"):
        step.save_checkpoint(tmp_path, keep=0)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1][1]))  # as on a drive that is full
    try:
        with pytest.raises(CheckpointError, match="look at the space that is left"):
            step.save_checkpoint(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[1])
        signal.signal(signal.SIGXFSZ, before[0])
    assert sorted(tmp_path.rglob("*")) == there and step.load_checkpoint(tmp_path) == first


def test_a_step_that_has_not_been_prepared_has_nothing_to_save(tmp_path: Path) -> None:
    model = Uneven()
    step = zerofx.compile(model, torch.optim.AdamW(model.parameters()), backend="eager")
    with pytest.raises(UsageError, match="once a step has been prepared"):
        step.save_checkpoint(tmp_path)
    step.abandon()
    with pytest.raises(UsageError, match="found the step closed"):
        step.load_checkpoint(tmp_path)


def test_nothing_is_saved_or_loaded_between_micro_batches(checkpoint: Path, tmp_path: Path) -> None:
    model = Uneven()
    step = zerofx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.01), backend="eager", accumulate=2)
    for args, _ in batches(UNEVEN, 0, 2):
        step.micro(*args)
    step.update()
    ((args, _),) = batches(UNEVEN, 0, 1)
    step.micro(*args)
    calls: list[Callable[[], Path]] = [
        lambda: step.save_checkpoint(tmp_path), lambda: step.load_checkpoint(checkpoint)
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UsageError, match="micro"):
            call()
    step.micro(*args)
    step.update()
    assert step.save_checkpoint(tmp_path).name == "step-00000002"


def test_the_scale_of_the_loss_is_saved(tmp_path: Path) -> None:
    def scaled() -> zerofx.Step:
        model = Uneven()
        step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=1e-3), backend="eager", precision="fp16")
        step.prepare(*next(batches(UNEVEN, 0, 1))[0])
        return step

    step, fresh = scaled(), scaled().loss_scale
    ((x, target), _) = next(batches(UNEVEN, 0, 1))
    for factor in (1.0, math.inf, 1.0):
        step(x * factor, target)
    counted = (step.loss_scale, step.num_steps, step.num_skipped)
    assert step.num_skipped >= 1 and step.loss_scale < fresh
    step.save_checkpoint(tmp_path)
    again = scaled()
    again.load_checkpoint(tmp_path)
    assert (again.loss_scale, again.num_steps, again.num_skipped) == counted


class Extra(nn.Module):
    """Keeps a number of its own in the state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Uneven()
        self.seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        return self.inner(x, target)


def test_extra_state_of_modules_is_saved(tmp_path: Path) -> None:
    model = Extra()
    step = prepared(model)
    model.seen = 7
    place = step.save_checkpoint(tmp_path)
    model.seen = 0
    step.load_checkpoint(place)
    assert model.seen == 7


def test_the_marker_is_json_and_says_what_is_there(checkpoint: Path) -> None:
    text = json.loads((checkpoint / "checkpoint.json").read_text())["checkpoint"]
    assert text["num_steps"] == 2 and text["aliases"] == {"head.weight": "first.weight"}
    assert text["optimizer"]["groups"][0]["lr"] == 0.01
    assert read_marker(checkpoint).tensors["transposed"].shape == (8, 5, 2)


def test_weights_alone_leave_the_optimizer_and_the_counts_as_they_are(tmp_path: Path) -> None:
    step = trained()
    step.save_checkpoint(tmp_path)
    saved = step.full_state_dict()
    for args, _ in batches(UNEVEN, 0, 3):
        step(*args)
    states, count = step.optimizer.state_dict()["state"], step.num_steps
    step.load_checkpoint(tmp_path, weights_only=True)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in step.full_state_dict().items())
    after = step.optimizer.state_dict()["state"]
    assert all(torch.equal(after[index][name], states[index][name]) for index in states for name in states[index])
    assert step.num_steps == count and step.is_prepared and not step.is_closed


@pytest.mark.parametrize("is_prepared", [False, True])
def test_weights_alone_are_taken_over_whatever_the_optimizer(tmp_path: Path, is_prepared: bool) -> None:
    saved = trained()
    saved.save_checkpoint(tmp_path)
    step = prepared(optimizer=torch.optim.SGD)
    if not is_prepared:
        step.close()
        step = zerofx.compile(step.model, step.optimizer, backend="eager")
    with pytest.raises(CheckpointError, match="weights_only=True"):
        step.load_checkpoint(tmp_path)
    step.load_checkpoint(tmp_path, weights_only=True)
    whole = step.full_state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in saved.full_state_dict().items())


def test_a_running_step_takes_over_options_that_its_update_follows_from(tmp_path: Path) -> None:
    saved = trained()
    saved.save_checkpoint(tmp_path)
    losses = [saved(*args) for args, _ in batches(UNEVEN, 0, 2)]
    step = prepared(optimizer=partial(torch.optim.AdamW, amsgrad=True))
    step(*next(batches(UNEVEN, 0, 1))[0])
    step.load_checkpoint(tmp_path)
    assert not step.optimizer.param_groups[0]["amsgrad"]
    assert [step(*args) for args, _ in batches(UNEVEN, 0, 2)] == losses
    whole = step.full_state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in saved.full_state_dict().items())


def test_weights_alone_are_taken_over_before_the_first_step_too(tmp_path: Path) -> None:
    saved = trained()
    saved.save_checkpoint(tmp_path)
    model = Uneven()
    step = zerofx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.01), backend="eager")
    step.load_checkpoint(tmp_path, weights_only=True)
    assert not step.is_prepared and not step.optimizer.state_dict()["state"]
    step.prepare(*next(batches(UNEVEN, 0, 1))[0])
    assert all(torch.equal(tensor, saved.full_state_dict()[name]) for name, tensor in step.full_state_dict().items())
    with zerofx.empty_init():
        deferred = Uneven()
    step = zerofx.compile(deferred, torch.optim.AdamW(deferred.parameters(), lr=0.01), backend="eager")
    with pytest.raises(UsageError, match="weights= in its place"):
        step.load_checkpoint(tmp_path, weights_only=True)
    step.close()
    assert step.is_closed
