"""A step that an earlier run has kept is the step that would be built, and is not used for any other program."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.models import DIM, Layer, adamw
from zerofx.disk.cache import DiskCache
from zerofx.driver import driver
from zerofx.driver.kept import step_cache
from zerofx.lowering import lower as lowering
from zerofx.lowering.load import build
from zerofx.lowering.lower import lower
from zerofx.optimizers import UpdateProgram

pytestmark = pytest.mark.captures


def _mse(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, y)


def _layers(change: Callable[[nn.Sequential], object] = lambda model: None) -> nn.Module:
    model = nn.Sequential(*(Layer() for _ in range(5)))
    change(model)
    return model


@dataclass(frozen=True)
class Seen:
    """What a user sees of a step: texts, and the losses of two steps."""

    plan: str
    source: str
    stages: tuple[tuple[str, str], ...]
    schedule: str
    summary: str
    reports: tuple[Any, ...]
    losses: tuple[float, ...]


class Starts:
    """Starts a program anew, and counts the steps that were built, and the graphs that were lowered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_built = self.num_lowered = 0

        def counted_build(*args: Any, **kwargs: Any) -> Any:
            self.num_built += 1
            return build(*args, **kwargs)

        def counted_lower(*args: Any, **kwargs: Any) -> Any:
            self.num_lowered += 1
            return lower(*args, **kwargs)

        monkeypatch.setattr(driver, "build", counted_build)
        monkeypatch.setattr(driver, "lower", counted_lower)
        monkeypatch.setattr(step_cache, "lower", counted_lower)

    def step(self, model: Callable[[], nn.Module] = _layers, **options: Any) -> tuple[zerofx.Step, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        made = model()
        optimizer = options.pop("optimizer", adamw)(made)
        rows = options.pop("rows", 64)
        batch = (torch.randn(rows, DIM), torch.randn(rows, DIM))
        given: dict[str, Any] = {"stage": 3, "backend": "eager", "loss_fn": _mse} | options
        return zerofx.compile(made, optimizer, example_batch=batch, **given), batch

    def see(self, **options: Any) -> Seen:
        step, batch = self.step(**options)
        losses = tuple(float(step(*batch)) for _ in range(2))
        stages = tuple((one.name, one.text) for one in step.stages)
        reports = tuple(
            (one.report.added, one.report.removed, one.report.peak_bytes_before, one.report.peak_bytes_after)
            for one in step.stages
            if one.report is not None
        )
        found = Seen(step.plan.to_json(), step.source, stages, str(step.schedule()), str(step), reports, losses)
        assert (step.source_path.parent / "plan.json").read_text() == found.plan
        step.close()
        return found

    def is_built(self, **options: Any) -> bool:
        """Whether the step has to be built, of which nothing but two steps is asked."""
        before = self.num_built, self.num_lowered
        step, batch = self.step(**options)
        step(*batch)
        step(*batch)
        step.close()
        built, lowered = self.num_built - before[0], self.num_lowered - before[1]
        assert (built > 0) == (lowered > 0)
        return built > 0


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Starts:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ZEROFX_DUMP_DIR", str(tmp_path / "dumps"))
    return Starts(monkeypatch)


def _kept(folder: Path) -> list[Path]:
    return list((folder / "cache").glob("step-*"))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stage": 0},
        {"memory_budget": 46_000},
        {"accumulate": 2, "max_grad_norm": 1.0},
        {"tile": {"0.up.weight": 2}},
        {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)},
    ],
)
def test_a_second_start_builds_nothing_and_shows_the_same(
    starts: Starts, tmp_path: Path, options: dict[str, Any]
) -> None:
    first = starts.see(**options)
    num_built = starts.num_built
    assert len(_kept(tmp_path)) == num_built
    assert not starts.is_built(**options)
    assert starts.see(**options) == first
    assert starts.num_built == num_built


def test_a_kept_step_is_measured_as_one_that_was_built(starts: Starts) -> None:
    found = []
    for _ in range(2):
        step, batch = starts.step()
        measured = step.measure(*batch, num_steps=2)
        found.append((measured.peak_bytes, measured.model_state_bytes, measured.wire_bytes, step.tiers()))
        step.close()
    assert starts.num_built == 1 and found[0] == found[1]


def test_graphs_are_lowered_when_a_report_asks_and_once(starts: Starts) -> None:
    starts.see()
    before = starts.num_lowered
    step, batch = starts.step()
    step(*batch)
    assert (step.num_regions, starts.num_lowered) == (step.num_regions, before)
    step.schedule()
    assert step.stages and step.compiled.lowered.graph and starts.num_lowered == before + 1
    step.close()


class _Flagged(nn.Module):
    """A layer whose code reads what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor, self.settings = Layer(), 1.0, {"double": False}

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) * self.factor
        return found * 2 if self.settings["double"] else found


def _flagged(change: Callable[[nn.Sequential], object] = lambda model: None) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = nn.Sequential(*(_Flagged() for _ in range(6)))
        change(model)
        return model

    return made


class _Counting(nn.Module):
    """A layer that is the same as the others, and does something else the fourth time that any of them is called."""

    calls = 0
    special = 4

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()

    def forward(self, x: Tensor) -> Tensor:
        _Counting.calls = _Counting.calls % 6 + 1
        found: Tensor = self.inner(x)
        return found.tanh() if _Counting.calls == _Counting.special else found


def _hooked(model: nn.Sequential) -> None:
    model[3].register_forward_hook(lambda module, args, output: output * 3)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda model: setattr(model[3], "factor", 2.0),
    "an entry": lambda model: model[3].settings.update(double=True),
    "its forward": lambda model: setattr(model[3], "forward", lambda x: x + 1),
    "frozen": lambda model: model[3].requires_grad_(False),
    "dropout": lambda model: model.__setitem__(3, nn.Dropout(0.5)),
    "one more": lambda model: model.append(_Flagged()),
    "a buffer": lambda model: model[3].register_buffer("more", torch.ones(1)),
    "a parameter": lambda model: model[3].register_parameter("more", nn.Parameter(torch.ones(3))),
    "a hook": _hooked,
}


@pytest.mark.days(3)
def test_a_change_of_one_layer_is_seen(starts: Starts) -> None:
    assert starts.is_built(model=_flagged())
    assert not starts.is_built(model=_flagged())
    for what, change in CHANGES.items():
        assert starts.is_built(model=_flagged(change)), what
    assert not starts.is_built(model=_flagged())


def test_code_that_counts_its_calls_is_seen(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> nn.Module:
        monkeypatch.setattr(_Counting, "calls", 0)
        return nn.Sequential(*(_Counting() for _ in range(6)))

    assert starts.is_built(model=made)
    assert not starts.is_built(model=made)
    monkeypatch.setattr(_Counting, "special", 5)
    assert starts.is_built(model=made)


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first]}, {"params": others}])


REQUESTS: dict[str, dict[str, Any]] = {
    "rows": {"rows": 32},
    "stage": {"stage": 1},
    "micro-batches": {"accumulate": 2},
    "nothing ahead": {"prefetch": 0},
    "bf16": {"precision": "bf16"},
    "clipped": {"max_grad_norm": 1.0},
    "a budget": {"memory_budget": 46_000},
    "all again": {"recompute": "full"},
    "a machine": {"machine": "h100-sxm"},
    "kept": {"keep_gathered": ("0",)},
    "another loss": {"loss_fn": lambda out, x, y: F.l1_loss(out, y)},
    "another optimizer": {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1)},
    "its options": {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True)},
    "its groups": {"optimizer": _two_groups},
}


@pytest.mark.days(3)
def test_another_request_is_built(starts: Starts) -> None:
    starts.is_built()
    for what, options in REQUESTS.items():
        assert starts.is_built(**options), what
        assert not starts.is_built(**options), what
    assert not starts.is_built()


@pytest.mark.days(3)
def test_switches_count(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    starts.is_built()
    for name, found in (("ZEROFX_DISABLE", "prefetch"), ("ZEROFX_VERIFY", "0")):
        with monkeypatch.context() as changed:
            changed.setenv(name, found)
            assert starts.is_built() and not starts.is_built()
    for name, found in (("ZEROFX_VERIFY", "2"), ("ZEROFX_DEBUG", "1"), ("ZEROFX_CACHE_DIR", "0")):
        with monkeypatch.context() as changed:
            changed.setenv(name, found)
            assert starts.is_built() and starts.is_built()
    monkeypatch.setattr(step_cache, "kernels_in_use", lambda asked, device: frozenset({"update"}))
    assert starts.is_built()


def test_another_number_of_threads_counts(starts: Starts) -> None:
    starts.see()
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert starts.is_built()
    finally:
        torch.set_num_threads(before)
    assert not starts.is_built()


def test_states_that_the_optimizer_holds_already_count(starts: Starts) -> None:
    def trained(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        model(torch.randn(4, DIM)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    assert starts.is_built()
    first = starts.is_built(optimizer=trained), starts.see(optimizer=trained).losses
    again = starts.is_built(optimizer=trained), starts.see(optimizer=trained).losses
    assert first[1] == again[1]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", ["step", "capture"])
@pytest.mark.parametrize(
    "damage", [lambda data: data[:-20], lambda data: data[:50] + b"?" + data[51:], lambda data: b""]
)
def test_a_damaged_file_is_a_cold_start(
    starts: Starts, tmp_path: Path, kind: str, damage: Callable[[bytes], bytes]
) -> None:
    first = starts.see()
    (path,) = (tmp_path / "cache").glob(f"{kind}-*")
    path.write_bytes(damage(path.read_bytes()))
    assert starts.see() == first
    assert starts.num_built == 2
    assert not starts.is_built()


def test_an_entry_with_code_in_it_is_a_cold_start(starts: Starts, tmp_path: Path) -> None:
    first = starts.see()
    (path,) = _kept(tmp_path)
    mark = tmp_path / "executed"
    cache = DiskCache(path.parent)
    data = json.loads(cache.read(path.name) or "")
    call = ["call", "", [], [], [], False, [], "(" + "a" * 120 + f" open({str(mark)!r}, 'w').close()"]
    data["file"][4].insert(0, ["loop", 1, [], [call], [], []])
    cache.write(path.name, json.dumps(data))
    assert starts.see() == first
    assert starts.num_built == 2 and not mark.exists()


def test_a_kept_step_has_no_source(starts: Starts, tmp_path: Path) -> None:
    source = starts.see().source
    (path,) = _kept(tmp_path)
    text = DiskCache(path.parent).read(path.name) or ""
    assert "def step(" in source and "def " not in text


def test_generated_files_are_not_read_back(starts: Starts, tmp_path: Path) -> None:
    first = starts.see()
    mark = tmp_path / "executed"
    files = list((tmp_path / "dumps").rglob("*.py"))
    assert files
    for file in files:
        file.write_text(f"open({str(mark)!r}, 'w').close()")
    assert starts.see() == first and not mark.exists()


def test_a_step_for_another_update_is_a_cold_start(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    starts.is_built()
    monkeypatch.setattr(UpdateProgram, "text", "other code of the optimizer")
    assert starts.is_built()


def test_a_report_of_what_is_not_the_step_that_runs_is_refused(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    starts.is_built()
    step, _ = starts.step()
    monkeypatch.setattr(lowering, "_header", lambda plan, machine: "another step")
    with pytest.raises(AssertionError, match="what was kept"):
        step.schedule()
    step.close()


@pytest.mark.days(3)
def test_a_kept_step_does_not_hold_the_batch(starts: Starts) -> None:
    starts.is_built()
    step, batch = starts.step()
    held = [weakref.ref(one) for one in batch]
    del batch
    gc.collect()
    assert [one() for one in held] == [None, None]
    step.close()


def test_the_steps_of_further_batches_are_kept_too(starts: Starts) -> None:
    found = []
    for num_built in (2, 2):
        step, batch = starts.step()
        losses = [float(step(*batch))]
        with pytest.warns(zerofx.errors.ZeroFXWarning, match="another shape"):
            losses.append(float(step(batch[0][:32], batch[1][:32])))
        assert starts.num_built == num_built
        found.append((losses, step.source, str(step.schedule())))
        step.close()
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_compiled_step_is_kept_with_what_its_regions_hold(
    starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zerofx.codegen.inductor import compile as inductor

    first, again = starts.see(backend="inductor"), starts.see(backend="inductor")
    assert starts.num_built == 1 and first == again
    # A compiler that has regions hold something else makes another step.
    monkeypatch.setattr(inductor, "memory_record", lambda *_: ())
    assert starts.is_built(backend="inductor")
    assert not starts.is_built(backend="inductor")
