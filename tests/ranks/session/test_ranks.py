"""Ranks that differ, or do not come, get an error that names them; and a model that is divided over ranks."""

from __future__ import annotations

import copy
import os
import re
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.users import TOKENS, adamw, facts, ids, same_parameters, tiny
from zerofx import RankMismatchError, ShardedParametersError, Step, ZeroFXError
from zerofx.runtime.comm.control import Control
from zerofx.runtime.tiers.tiers import Tiers

TIMEOUT = 3


def compile_eager(stage: int = 3, model: nn.Module | None = None, **options: Any) -> Step:
    model = model or tiny()
    return zerofx.compile(model, adamw(model), stage, backend="eager", **options)


def run(step: Step, rows: int = 2) -> Tensor:
    loss: Tensor = step(ids(dist.get_rank(), rows), labels=ids(9, rows))
    return loss


def error_of(call: Callable[[], Any]) -> str:
    """Type and text of the error, with the seconds that it took."""
    began = time.monotonic()
    try:
        call()
    except (ZeroFXError, RuntimeError, IndexError) as error:
        assert time.monotonic() - began < 3 * TIMEOUT
        return f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return "no error"


def disagree() -> dict[str, str]:
    """This rank's errors, by what differs; none of them makes a rank wait for the timeout."""
    os.environ["ZEROFX_TIMEOUT"] = "60"
    rank = dist.get_rank()
    found: dict[str, str] = {}
    model = tiny()
    before = facts(model, None)
    found["stage"] = error_of(lambda: compile_eager(3 - rank, model))
    wider = nn.Linear(2 + rank, 2)
    found["model"] = error_of(lambda: compile_eager(model=wider))
    found["backend"] = error_of(lambda: zerofx.compile(model, adamw(model), backend="eager", max_shapes=8 - rank))
    batch = {"ids": ids(), "labels": ids(9)}
    refused: dict[str, Any] = {"memory_budget": 100, "recompute": "none", "tile": "none", "example_batch": batch}
    found["budget"] = error_of(lambda: compile_eager(model=model, **refused))
    step = compile_eager(model=model)
    found["first batch"] = error_of(lambda: run(step, rows=2 + rank))
    labels = ids(9).float() if rank == 1 else ids(9)
    found["capture"] = error_of(lambda: step(ids(), labels=labels[:, :2] if rank == 1 else labels))
    bad = ids().to("meta") if rank == 1 else ids()
    found["bad batch"] = error_of(lambda: step(bad, labels=ids()))
    assert facts(model, None).keys() == before.keys()
    assert {k: v for k, v in facts(model, None).items() if k != ": attributes"} == {
        k: v for k, v in before.items() if k != ": attributes"
    }
    model.head.weight.requires_grad_(rank == 0)
    found["frozen"] = error_of(lambda: run(step))
    model.head.weight.requires_grad_(True)
    run(step)
    found["second batch"] = error_of(lambda: run(step, rows=2 + rank))
    run(step)
    step.optimizer.param_groups[0]["maximize"] = rank == 1
    found["options"] = error_of(lambda: run(step))
    step.optimizer.param_groups[0]["maximize"] = False
    run(step)
    found["call"] = error_of(lambda: step.full_state_dict() if rank == 1 else run(step))
    run(step)
    found["file"] = error_of(lambda: step.load_source(step.source_path if rank == 0 else "nowhere.py"))
    found["last"] = str(step.num_steps)
    return found


class Late(nn.Module):
    """Fails while it is traced on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny()

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("only here")
        return self.inner(ids, labels)


def test_ranks_that_differ_are_named_at_once() -> None:
    zero, one = run_ranks(disagree, 2)
    both = {
        "stage": "same model, optimizer and options .* on rank 1:\n  rank 0: stage: 3\n  rank 1: stage: 2",
        "model": r"on rank 1:\n  rank 0: parameter weight: float32\[2, 2\]\n  rank 1: parameter weight: float32\[2, 3",
        "backend": "rank 0: max_shapes: 8\n  rank 1: max_shapes: 7",
        "first batch": r"on rank 1:\n  rank 0: batch\[0\]: int64\[2, 3\].*\n  rank 1: batch\[0\]: int64\[3, 3\]",
        "second batch": r"rank 1: batch\[0\]: int64\[3, 3\]",
        "options": r"rank 0: maximize of param group 0: False\n  rank 1: maximize of param group 0: True",
        "call": r"rank 0: call step\(batch\)\n  rank 1: call step.full_state_dict\(\)",
    }
    for name, pattern in both.items():
        assert zero[name] == one[name]
        assert re.match("RankMismatchError", zero[name])
        assert re.search(pattern, zero[name]), zero[name]
    assert zero["budget"] == one["budget"], "what only rank 0 has found out is raised everywhere"
    assert zero["budget"].startswith("BudgetMissedError: memory_budget=100 B cannot be met")
    assert re.search(r"found another on rank 1.*(?s:.)*labels: int64\[2, 3\]", zero["capture"])
    assert one["bad batch"].startswith("UsageError: expected the batch on cpu")
    assert re.search("rank 1: raise UsageError: expected the batch on cpu", zero["bad batch"])
    assert zero["frozen"].startswith("RankMismatchError")
    assert one["file"].startswith("PlanError")
    match = "RankMismatchError.*rank 1 could not: PlanError: expected a generated step at nowhere.py"
    assert re.search(match, zero["file"])
    assert zero["last"] == one["last"] == "4"


def be_absent() -> dict[str, str]:
    """This rank's errors, by what rank 1 did not do."""
    os.environ["ZEROFX_TIMEOUT"] = str(TIMEOUT)
    rank = dist.get_rank()
    found: dict[str, str] = {}

    def alone(name: str, call: Callable[[], Any]) -> None:
        if rank == 0:
            found[name] = error_of(call)
        dist.barrier()

    alone("compile", compile_eager)
    failing = compile_eager(model=Late())
    found["capture"] = error_of(lambda: run(failing))
    step = compile_eager()
    alone("first step", lambda: run(step))
    step = compile_eager()
    run(step)
    alone("later step", lambda: run(step))
    step = compile_eager()
    run(step)
    alone("full_parameters", step.full_state_dict)
    step = compile_eager(stage=0)
    run(step)
    if rank == 1:
        bad = torch.full((2, 3), TOKENS)
        found["midway"] = error_of(lambda: step(bad, labels=ids(9)))
        found["after"] = error_of(lambda: run(step))
    dist.barrier()
    return found


@pytest.mark.days(3)
def test_ranks_that_do_not_come_are_named_within_the_timeout() -> None:
    zero, one = run_ranks(be_absent, 2)
    for name, call in (
        ("compile", "call zerofx.compile"),
        ("first step", r"call step\(batch\)"),
        ("later step", r"call step\(batch\)"),
        ("full_parameters", r"call step.full_state_dict\(\)"),
    ):
        pattern = rf"RankMismatchError: expected all 2 ranks to {call} within {TIMEOUT} s, but rank 1 did not come"
        assert re.match(pattern, zero[name]), zero[name]
    assert re.match("CaptureError: .*ValueError: only here", one["capture"])
    assert re.match("RankMismatchError: .*capture a step, found that rank 1 could not: CaptureError", zero["capture"])
    assert re.match("IndexError: .*nothing had been updated yet.*restart all ranks", one["midway"])
    assert re.match("RankMismatchError: .*step 2 failed on rank 1 .*restart all ranks", one["after"])


def fail_on_a_device_that_is_lost() -> str:
    """This rank's error where a step fails on rank 1, which cannot wait for its copies any more."""
    os.environ["ZEROFX_TIMEOUT"] = "60"
    step = compile_eager()
    run(step)
    if dist.get_rank() == 0:
        return error_of(lambda: run(step))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tiers, "settle", _lost)
        bad = torch.full((2, 3), TOKENS)
        return error_of(lambda: step(bad, labels=ids(9)))


def _lost(_: Tiers) -> None:
    raise RuntimeError("the device is lost")


def test_others_hear_of_a_failure_before_anything_is_waited_for() -> None:
    zero, one = run_ranks(fail_on_a_device_that_is_lost, 2)
    assert re.match("IndexError: .*did not arrive .RuntimeError: the device is lost", one)
    assert re.match("RankMismatchError: .*step 2 failed on rank 1 .IndexError", zero)


def fail_at_work() -> str:
    """What this rank raises where rank 0 looks up what is not there while the other waits for it."""
    control = Control(dist.group.WORLD, TIMEOUT)

    def make() -> str:
        return dict[str, str]()["missing"]

    try:
        control.share("share what rank 0 makes", make)
    except (KeyError, ZeroFXError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_ranks_that_wait_for_work_hear_how_it_failed() -> None:
    zero, one = run_ranks(fail_at_work, 2)
    assert zero == "KeyError: 'missing'"
    assert one == (
        "RankMismatchError: expected all ranks to share what rank 0 makes, found that rank 0 could not: "
        "KeyError: 'missing'"
    )


def use_divided_model(folder: str) -> None:
    os.environ["ZEROFX_TIMEOUT"] = "30"
    rank = dist.get_rank()
    plain = tiny()
    plain_optimizer = adamw(plain)
    model = tiny()
    step = compile_eager(3, model)
    for seed in range(3):
        with torch.inference_mode(seed > 0):
            step(ids(seed + rank), labels=ids(9))
        losses = [plain(ids(seed + other), labels=ids(9)) for other in range(2)]
        plain_optimizer.zero_grad()
        (torch.stack(losses).sum() / 2).backward()
        plain_optimizer.step()
    whole = r"with step.full_parameters\(\)"
    for call, expected in (
        (lambda: model(ids()), f"expected Tiny to be called .*{whole}"),
        (lambda: model.head(torch.zeros(1, 4)), f"expected Linear to be called .*{whole}"),
        (lambda: nn.Sequential(model.layers[0])(torch.zeros(1, 4)), "expected Linear to be called"),
        (lambda: model.state_dict(), r"step.full_state_dict\(\)"),
        (lambda: model.load_state_dict(plain.state_dict()), "write_back=True"),
        (lambda: copy.deepcopy(model), "expected a copy of the model"),
        (lambda: torch.save(model, Path(folder, f"{rank}.pt")), "expected the model to be pickled"),
    ):
        with pytest.raises(ShardedParametersError, match=expected):
            call()
    with pytest.raises(ShardedParametersError, match="isnan to be called where parameters are whole"):
        model.head.weight.isnan()
    full = step.full_state_dict()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(full[name], tensor)
    with step.full_parameters():
        model.eval()
        torch.testing.assert_close(model(ids()), plain(ids()))
        average = copy.deepcopy(model)
        model.train()
    torch.testing.assert_close(average(ids()), plain(ids()))
    with step.full_parameters(write_back=True):
        model.load_state_dict(plain.state_dict())
    theirs = [copy.deepcopy(o.state_dict()) for o in (step.optimizer, plain_optimizer)]
    torch.testing.assert_close(*theirs)
    step.close()
    assert same_parameters(model, plain)
    step.optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    for m, o in ((model, step.optimizer), (plain, plain_optimizer)):
        o.zero_grad()
        m(ids(), labels=ids(9)).backward()
        o.step()
    assert same_parameters(model, plain)

    step = compile_eager(stage=2, model=plain)
    step(ids(rank), labels=ids(9))
    assert plain(ids()).isfinite().all()
    dist.barrier()
    dist.destroy_process_group()
    for match in ("found 1: save", "found another process group: save"):
        for use in (lambda: step(ids(), labels=ids()), step.full_state_dict, step.close):
            with pytest.raises(RankMismatchError, match=match):
                use()
        if not dist.is_initialized():
            store = Path(folder, "store").as_uri()
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))


def test_a_divided_model_is_used_through_its_step() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(use_divided_model, 2, folder)
