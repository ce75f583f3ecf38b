"""A step inside torch's distributed checkpoints, and to and from what plain torch, DDP and FSDP2 save there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, batches
from tests.lib.runs.checkpoints import UNEVEN, Uneven, Way, train
from tests.lib.runs.training import build, world
from zerofx import CheckpointError, UsageError
from zerofx.runtime.state.on_host import read_on_host

pytestmark = pytest.mark.filterwarnings("ignore:.*(ShardedTensor|TypedStorage|no_dist|torch.distributed is).*")


def _save(folder: str, way: Way) -> tuple[dict[str, Any], dict[str, Any], torch.Tensor]:
    rank, _ = world()
    step, scheduler = way.step()
    assert isinstance(step, Stateful)
    train(step, scheduler, batches(way.case, rank, 3))
    dcp_save({"step": step}, checkpoint_id=folder)
    return step.full_state_dict(), step.optimizer.state_dict(), torch.rand(3)


def _load(folder: str, way: Way) -> tuple[dict[str, Any], dict[str, Any], torch.Tensor, int]:
    step, _ = way.step(9)
    step.prepare(*next(batches(way.case, 0, 1))[0])
    dcp_load({"step": step}, checkpoint_id=folder)
    return step.full_state_dict(), step.optimizer.state_dict(), torch.rand(3), step.num_steps


def _check(folder: Path, saved_by: tuple[int, Way], loaded_by: tuple[int, Way]) -> None:
    expected = run_ranks(_save, saved_by[0], str(folder), saved_by[1])
    found = run_ranks(_load, loaded_by[0], str(folder), loaded_by[1])
    for rank, (model, optimizer, drawn, num_steps) in enumerate(found):
        parameters = {name: value for name, value in model.items() if not name.startswith("norm.running")}
        torch.testing.assert_close(parameters, {n: expected[0][0][n] for n in parameters}, rtol=0, atol=0)
        torch.testing.assert_close(optimizer, expected[0][1], rtol=0, atol=0)
        assert num_steps == 3
        assert rank >= saved_by[0] or torch.equal(drawn, expected[rank][2])
    assert len({tuple(drawn.tolist()) for *_, drawn, _ in found}) == loaded_by[0]


def test_a_step_stands_in_a_users_own_call_on_any_ranks(tmp_path: Path) -> None:
    _check(tmp_path, (2, Way(3, "bf16")), (3, Way(2)))


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_all_stages_by_other_stages(tmp_path: Path, stage: int) -> None:
    _check(tmp_path, (3, Way(stage)), (2, Way(3 - stage, "bf16")))
    _check(tmp_path / "one", (1, Way(stage)), (4, Way(3 - stage)))


def _plain(name: str, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A case under FSDP2 or DDP."""
    model = build(CASES[name])
    if kind == "ddp":
        return DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=0.01)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _, kwargs in batches(CASES["gpt2"], dist.get_rank(), steps):
        model(**kwargs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _zerofx(stage: int, precision: str | None) -> zerofx.Step:
    case = CASES["gpt2"]
    model = build(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step = zerofx.compile(model, optimizer, stage, loss_fn=case.loss_fn, backend="eager", precision=precision)  # type: ignore[arg-type]  # a word
    step.prepare(**next(batches(case, 0, 1))[1])
    return step


def _whole(state: Any) -> dict[str, Any]:
    return {n: v.full_tensor() if isinstance(v, DTensor) else v.clone() for n, v in state.items()}


def _entry(states: Any, name: str) -> Any:
    return states["state"][name]


def _both_ways(folder: str) -> None:
    """What FSDP2 and DDP save is taken over, and the other way round; values are those that were saved."""
    for kind, stage, precision in (("fsdp2", 2, "bf16"), ("ddp", 3, None)):
        model, optimizer = _plain("gpt2", kind)
        _train_plain(model, optimizer, 2)
        weights, states = get_state_dict(model, optimizer)
        dcp_save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/{kind}")
        step = _zerofx(stage, precision)
        taken = {name: value for name, value in step.state_dict().items() if name != "zerofx"}
        dcp_load(taken, checkpoint_id=f"{folder}/{kind}")
        step.load_state_dict(taken)
        assert step.optimizer.param_groups[0]["lr"] == 0.01
        torch.testing.assert_close(step.full_state_dict(), _whole(weights), rtol=0, atol=0)
        names = [name for name, _ in step.model.named_parameters()]
        found = step.optimizer.state_dict()["state"]
        for number, name in enumerate(names):
            torch.testing.assert_close(found[number], _whole(_entry(states, name)), rtol=0, atol=0)
        for _, kwargs in batches(CASES["gpt2"], dist.get_rank(), 2):
            step(**kwargs)
        mine = step.state_dict()
        dcp_save({"model": mine["model"], "optimizer": mine["optimizer"]}, checkpoint_id=f"{folder}/{kind}-back")
        fresh, other = _plain("gpt2", kind)
        _train_plain(fresh, other, 1)
        weights, states = get_state_dict(fresh, other)
        dcp_load({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/{kind}-back")
        set_state_dict(fresh, other, model_state_dict=weights, optim_state_dict=states)
        again, states = get_state_dict(fresh, other)
        torch.testing.assert_close(_whole(again), step.full_state_dict(), rtol=0, atol=0)
        found = step.optimizer.state_dict()["state"]
        for number, name in enumerate(names):
            torch.testing.assert_close(_whole(_entry(states, name)), found[number], rtol=0, atol=0)
        step.close()


@pytest.mark.days(3)
def test_to_and_from_fsdp2_and_ddp(tmp_path: Path) -> None:
    run_ranks(_both_ways, 2, str(tmp_path))


def _prepared() -> zerofx.Step:
    model = Uneven()
    step = zerofx.compile(model, torch.optim.AdamW(model.parameters()), backend="eager")
    step.prepare(*next(batches(UNEVEN, 0, 1))[0])
    return step


def test_whole_tensors_of_plain_torch_are_taken_over() -> None:
    torch.manual_seed(4)
    plain = Uneven()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for args, _ in batches(UNEVEN, 0, 2):
        plain(*args).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(plain, optimizer)
    step = _prepared()
    step.load_state_dict({"model": plain.state_dict()})
    torch.testing.assert_close(step.full_state_dict(), dict(plain.state_dict()), rtol=0, atol=0)
    assert step.optimizer.param_groups[0]["lr"] == 0.001
    step.load_state_dict({"model": weights, "optimizer": states})
    (args,) = (args for args, _ in batches(UNEVEN, 0, 1))
    torch.manual_seed(8)
    loss = step(*args)
    torch.manual_seed(8)
    plain.zero_grad()
    expected = plain(*args)
    assert torch.equal(loss, expected.detach())
    expected.backward()
    optimizer.step()
    torch.testing.assert_close(step.full_state_dict(), dict(plain.state_dict()), rtol=0, atol=0)


def test_what_does_not_fit_is_named_and_nothing_is_changed() -> None:
    step = _prepared()
    before = step.full_state_dict()
    good = Uneven().state_dict()
    for state, message in (
        ({"model": {n: v for n, v in good.items() if n != "scale"}}, "found nothing for scale"),
        ({"model": good | {"scale": torch.ones(2)}}, r"found \[2\] for scale, which is \[\]"),
        (step.state_dict(), "that nothing has been loaded into"),
        ({"model": None}, "expected 'model' to be model.state_dict"),
        ({"model": good, "optimizer": step.optimizer.state_dict()}, "with parameters by name, .* by number"),
        ({"model": good, "optimizer": 3}, "with parameters by name, .* found int"),
    ):
        with pytest.raises(CheckpointError, match=message):
            step.load_state_dict(state)
    with pytest.raises(UsageError, match="expected a state dictionary with 'model'"):
        step.load_state_dict(good)
    with pytest.raises(UsageError, match="a state dictionary with 'model', found NoneType"):
        step.load_state_dict(None)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(UsageError, match=r"it has none of its own"):
        step.state_dict()["model"]["up.weight"].clone()
    torch.testing.assert_close(step.full_state_dict(), before, rtol=0, atol=0)


def _saved(state: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """The model's tensors, and the momentum, as DCP finds them in what it saves of ``state``."""
    dcp_save(state, checkpoint_id=folder)
    step = _prepared()
    dcp_load({"step": step}, checkpoint_id=folder)
    momentum = step.optimizer.state_dict()["state"]
    return step.full_state_dict() | {f"momentum {n}": entry["exp_avg"] for n, entry in momentum.items()}


@pytest.mark.days(3)
def test_a_dictionary_that_is_saved_again_has_what_steps_have_come_to_since(tmp_path: Path) -> None:
    step = _prepared()
    given = [args for args, _ in batches(UNEVEN, 0, 3)]
    step(*given[0])
    state = {"step": step.state_dict()}
    _saved(state, tmp_path / "first")
    step(*given[1])
    again = _saved(state, tmp_path / "again")
    torch.testing.assert_close(again, _saved({"step": step}, tmp_path / "after"), rtol=0, atol=0, check_stride=False)
    dcp_load(state, checkpoint_id=tmp_path / "first")  # and not taken over
    step(*given[2])
    third = _saved(state, tmp_path / "third")
    torch.testing.assert_close(third, _saved({"step": step}, tmp_path / "last"), rtol=0, atol=0, check_stride=False)


def test_threads_of_a_writer_read_several_buckets_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread reads a bucket; another asks for another bucket meanwhile."""
    step = _prepared()
    model = step.state_dict()["model"]
    items = {name: model[name].__create_write_items__(name, None)[0].index for name in ("up.weight", "frozen")}
    whole = step.full_state_dict()
    begun, read_meanwhile = threading.Event(), threading.Event()

    @contextmanager
    def slowly(*about: Any) -> Iterator[torch.Tensor]:
        with read_on_host(*about) as values:
            if not begun.is_set():
                begun.set()
                read_meanwhile.wait(0.5)  # which is over where nothing can be
            yield values

    monkeypatch.setattr("zerofx.checkpoints.stateful.read_on_host", slowly)

    def read(name: str) -> torch.Tensor:
        values: torch.Tensor = model[name].__get_tensor_shard__(items[name])
        return values

    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(read, "up.weight")
        assert begun.wait(5)
        quick = pool.submit(read, "frozen")
        quick.add_done_callback(lambda _: read_meanwhile.set())
        assert torch.equal(slow.result(), whole["up.weight"])
        assert torch.equal(quick.result(), whole["frozen"])
    assert all(torch.equal(read(name), whole[name]) for name in ("frozen", "up.weight", "frozen"))
