"""A step that runs from a recording trains the same bits: graphs are emulated on the CPU."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerofx
from tests.lib.capturing import EmulatedCapturer
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES
from tests.lib.runs.pairs import Pair, momentum
from tests.lib.runs.scaling import train_scaled, unlike
from tests.lib.runs.training import differences, train_compiled, train_plain
from tests.lib.users import ids
from zerofx import CompilerError, UsageError, ZeroFXWarning
from zerofx.runtime.cuda_graphs.graphed import MOST_RECORDINGS, NUM_WARM_UP_STEPS
from zerofx.runtime.cuda_graphs.recording import record
from zerofx.session import step as step_module
from zerofx.session import steps


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> EmulatedCapturer:
    return emulate(monkeypatch)


def emulate(monkeypatch: pytest.MonkeyPatch) -> EmulatedCapturer:
    """Have steps captured on the CPU; what else would be in the way of it still is."""
    capturer = EmulatedCapturer()
    monkeypatch.setattr(steps, "machine_obstacle", lambda device: "")
    monkeypatch.setattr(step_module, "CudaCapturer", lambda device: capturer)
    return capturer


def trained(name: str, stage: int, steps: int, **options: Any) -> list[str]:
    """Differences between eager training of a case and training from a recording."""
    plain, ours = (
        train_plain(CASES[name], steps),
        train_compiled(CASES[name], stage, steps, cuda_graphs=True, **options),
    )
    return differences(plain, ours)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "name", ["gpt", "batchnorm", "tied", "buffers", "swapped buffers", "arguments", "dropout", "view as loss", "frozen"]
)
def test_a_recording_trains_what_eager_mode_trains(name: str, emulated: EmulatedCapturer) -> None:
    assert trained(name, 0, 5) == []
    assert (emulated.num_warm_ups, emulated.num_sessions) == (NUM_WARM_UP_STEPS, 1)


def test_a_step_that_clips_is_recorded_with_its_norm(emulated: EmulatedCapturer) -> None:
    case, options = CASES["stack"], {"max_grad_norm": 0.5}
    plain = train_compiled(case, 0, 5, **options)
    assert differences(plain, train_compiled(case, 0, 5, cuda_graphs=True, **options)) == []
    assert len({float(norm) for norm in plain.norms}) == 5 and emulated.num_sessions == 1


def test_a_step_whose_loss_is_scaled_is_recorded_and_skips_as_it_does(emulated: EmulatedCapturer) -> None:
    cases: list[dict[str, Any]] = [{}, {"max_grad_norm": 1e6}]
    for options in cases:
        plain = train_scaled("spiky", 0, 40, **options)
        assert len(plain.skipped) > 3 and plain.skipped[-1] > NUM_WARM_UP_STEPS
        assert unlike(plain, train_scaled("spiky", 0, 40, cuda_graphs=True, **options)) == []


def _ranks() -> list[str]:
    found = []
    for stage, accumulate in ((0, 1), (1, 1), (3, 2)):
        with pytest.MonkeyPatch.context() as patch:
            capturer = emulate(patch)
            plain = train_plain(CASES["gpt"], 4, accumulate)
            options: dict[str, Any] = {"accumulate": accumulate, "reduce": "once"}
            ours = train_compiled(CASES["gpt"], stage, 4, cuda_graphs=True, **options)
            found += [f"stage {stage}, {accumulate} micro-batches: {text}" for text in differences(plain, ours)]
            assert capturer.num_sessions == 1
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        plain, ours = (train_compiled(CASES["stack"], 3, 4, max_grad_norm=0.5, cuda_graphs=on) for on in (False, True))
        found += [f"clipped: {text}" for text in differences(plain, ours)]
    return found


@pytest.mark.days(3)
def test_ranks_train_from_recordings() -> None:
    assert run_ranks(_ranks, 2) == [[], []]


class _Buffers:
    """A runtime whose gathers write ones, and give what nobody is to read."""

    def empty_gradients(self, bucket: int) -> torch.Tensor:
        return torch.zeros(4)

    def all_gather_into(self, full: torch.Tensor, shard: torch.Tensor, bucket: int, *, over: str) -> None:
        full.fill_(1.0)

    def wait(self, pending: None, source: None) -> torch.Tensor:
        return torch.full((4,), -1.0)


def _gathered_in_place(runtime: Any, state: Any, batch: Any) -> Any:
    gradients = runtime.empty_gradients(0)
    return runtime.wait(runtime.all_gather_into(gradients, gradients, 0))


def test_what_is_gathered_in_a_buffer_of_the_graphs_is_that_buffer() -> None:
    """So that nothing else is captured into its memory for as long as the step has a name for it."""
    runtime: Any = _Buffers()
    recording = record(EmulatedCapturer(), _gathered_in_place, {}, frozenset(), runtime, {}, {})
    assert torch.equal(torch.ones(4), recording.run(runtime, {}, {}))  # type: ignore[arg-type]


def test_numbers_of_the_optimizer_may_change_with_every_step(emulated: EmulatedCapturer) -> None:
    pair = Pair(stage=0, cuda_graphs="auto")
    for step in range(6):
        pair.set(lr=1e-2 / (1 + step), betas=(0.9 - 0.01 * step, 0.99))
        pair.train()
    assert pair.same() and emulated.num_sessions == 1
    assert pair.step.launches.num_graphs > 1 and not pair.step.launches.reason
    assert "CUDA graphs with" in str(pair.step)


def test_each_batch_shape_has_a_recording(emulated: EmulatedCapturer) -> None:
    pair = Pair(momentum, stage=0, cuda_graphs="auto")
    pair.train(rows=2)
    with pytest.warns(ZeroFXWarning, match="another shape"):
        pair.train(rows=3)
    for rows in (2, 3, 2, 3, 2, 3):
        pair.train(rows=rows)
    assert pair.same() and emulated.num_sessions == 2


def test_what_was_replaced_is_recorded_anew_a_few_times(emulated: EmulatedCapturer) -> None:
    class Scaled(nn.Module):
        scale: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x)
            return (y * self.scale).sum()

    model, x = Scaled(), torch.ones(2, 4)
    weight, bias = model.linear.weight.detach().clone(), model.linear.bias.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = zerofx.compile(model, optimizer, 0, backend="eager", cuda_graphs="auto")
    for number in range(MOST_RECORDINGS + 4):
        held, model.scale = model.scale, torch.full((4,), float(number))
        expected = float((F.linear(x, weight, bias) * number).sum())
        assert float(step(x)) == pytest.approx(expected) and held is not model.scale
    assert emulated.num_sessions == MOST_RECORDINGS
    assert "have been replaced by others" in step.launches.reason


def test_states_that_are_loaded_are_recorded_anew(emulated: EmulatedCapturer) -> None:
    pair = Pair(stage=0, cuda_graphs="auto")
    pair.train(4)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
    pair.train(2)
    for optimizer, state in zip(pair.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    pair.train(2)
    assert pair.same()


def test_a_loss_is_the_callers_own(emulated: EmulatedCapturer) -> None:
    pair = Pair(momentum, stage=0, cuda_graphs="auto")
    losses = [pair.step(ids(seed), labels=ids(9)) for seed in range(5)]
    assert len({float(loss) for loss in losses}) == 5


def test_the_loss_of_a_step_that_is_left_out_is_the_callers_own(emulated: EmulatedCapturer) -> None:
    model = nn.Linear(4, 1)
    step = zerofx.compile(
        model, momentum(model), stage=0, loss_fn=F.mse_loss, on_nonfinite="skip", cuda_graphs=True, backend="eager"
    )
    train = partial(step, torch.ones(2, 4))
    for _ in range(NUM_WARM_UP_STEPS + 1):
        train(torch.ones(2, 1))
    with pytest.warns(ZeroFXWarning, match="nothing has been updated"):
        skipped = train(torch.full((2, 1), torch.nan))
    assert train(torch.ones(2, 1)).isfinite() and skipped.isnan()


def test_a_capture_that_fails_changes_nothing(emulated: EmulatedCapturer) -> None:
    emulated.fail_at = lambda func: "mm" in str(func)
    pair = Pair(stage=0, cuda_graphs="auto")
    with pytest.warns(ZeroFXWarning, match="one by one: recording failed .operation not permitted"):
        pair.train(4)
    assert pair.same() and "recording failed" in pair.step.launches.reason
    required = Pair(stage=0, cuda_graphs=True)
    required.train(2)
    with pytest.raises(CompilerError, match="since cuda_graphs=True"):
        required.step(ids(), labels=ids(1))
    assert required.same()


def test_steps_that_are_measured_or_edited_run_line_by_line(emulated: EmulatedCapturer, tmp_path: Any) -> None:
    pair = Pair(momentum, stage=0, cuda_graphs="auto")
    pair.train(4)
    assert not pair.step.launches.reason
    x, y = ids(5), ids(6)
    assert pair.step.measure(x, labels=y, num_steps=1).region_seconds
    path = tmp_path / "step.py"
    path.write_text(pair.step.source)
    pair.step.load_source(path)
    assert "every line of" in pair.step.launches.reason
    pair.step(x, labels=y)
    assert emulated.num_sessions == 1


def test_a_close_lets_go_of_recordings(emulated: EmulatedCapturer) -> None:
    pair = Pair(momentum, stage=0, cuda_graphs="auto")
    pair.train(4)
    assert not pair.step.launches.reason
    pair.step.close()
    assert pair.step.launches.reason


def test_on_a_cpu_kernels_are_launched_one_by_one() -> None:
    pair = Pair(momentum, stage=0, cuda_graphs="auto")
    pair.train(1)
    assert pair.step.launches.reason == "the model is on cpu, and only CUDA has graphs"
    assert "not as CUDA graphs: the model is on cpu" in str(pair.step)
    with pytest.raises(UsageError, match="since cuda_graphs=True, found that the model is on cpu"):
        Pair(momentum, stage=0, cuda_graphs=True).train(1)
    off = Pair(momentum, stage=0)
    off.train(1)
    assert off.step.launches.reason == "cuda_graphs=False" and "graphs" not in str(off.step)
