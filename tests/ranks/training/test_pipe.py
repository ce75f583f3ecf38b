"""Stages on the axis ``pipe`` train like one process with as many micro-batches, to the bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.distributed import RankError, run_ranks
from tests.lib.models import adamw
from tests.lib.models.huggingface import bert, mixtral, t5, vit
from zerofx import RankMismatchError, UsageError
from zerofx.scheduler.plan.mesh import Mesh

STEPS = 10
Given = tuple[tuple[Tensor, ...], dict[str, Tensor]]


class Dropping(nn.Module):
    """A GPT with dropout behind each block."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(vocab=19, dim=16, depth=4, heads=2, block=16)
        for block in self.gpt.layers:
            block.register_forward_hook(lambda _module, _given, result: nn.functional.dropout(result, 0.2))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        result: Tensor = self.gpt(ids, targets)
        return result


class UNet(nn.Module):
    """Convolutions without layers that repeat, whose values skip over others."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_convolution(3, 8), _convolution(8, 16)])
        self.middle = _convolution(16, 16)
        self.up = nn.ModuleList([_convolution(32, 8), _convolution(16, 8)])
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        skipped = []
        for down in self.down:
            skipped.append(down(images))
            images = nn.functional.avg_pool2d(skipped[-1], 2)
        images = self.middle(images)
        for up in self.up:
            images = up(torch.cat([nn.functional.interpolate(images, scale_factor=2), skipped.pop()], 1))
        return nn.functional.mse_loss(self.head(images), targets)


class Scaled(nn.Module):
    """Divides by a running mean of magnitudes, which it changes then: its backward reads what it was."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        scaled = images / self.scale.clone()
        self.scale.lerp_(images.detach().abs().mean(), 0.3)
        return scaled


class Norms(nn.Module):
    """Convolutions, each with batch norm, and a scale that is a buffer too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Scaled())
            for channels in (3, 8, 8, 8)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            images = block(images)
        return nn.functional.cross_entropy(self.head(images.mean((2, 3))), labels)


def _convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU())


def _gpt() -> nn.Module:
    return GPT(vocab=19, dim=16, depth=4, heads=2, block=16)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=19, num_key_value_heads=2, max_position_embeddings=16, **sizes))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=19, n_embd=16, n_layer=4, n_head=2, n_positions=16, **ends))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "gpt": _gpt, "dropout": Dropping, "u-net": UNet, "llama": _llama, "gpt2": _gpt2, "norms": Norms,
    "bert": partial(bert, 0.1), "t5": partial(t5, 0.1), "vit": partial(vit, 0.1), "mixtral": mixtral,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A training: of the ranks along ``data``, each has batches of its own."""

    model: str
    mesh: Mapping[str, int] | None
    accumulate: int
    options: tuple[tuple[str, Any], ...] = ()
    steps: int = STEPS

    def on(self, mesh: Mapping[str, int] | None) -> Run:
        """The same training on other ranks, in the order of micro-batches that is usual there."""
        return Run(self.model, mesh, self.accumulate, tuple(o for o in self.options if o[0] != "order"), self.steps)


@dataclass(frozen=True)
class Outcome:
    """Losses, draws after the last step, parameters in and after the step, states, and peaks."""

    values: list[Tensor]
    states: dict[str, Any]
    predicted: dict[str, int]
    measured: dict[str, int]
    idle_seconds: float | None


def _batch(model: str, rows: int, generator: torch.Generator) -> Given:
    if model == "u-net":
        images, targets = torch.randn(2, rows, 3, 8, 8, generator=generator)
        return (images, targets), {}
    if model in ("norms", "vit"):
        images = torch.randn(rows, 3, 8, 8, generator=generator)
        labels = torch.randint(5, (rows,), generator=generator)
        return ((images, labels), {}) if model == "norms" else ((), {"pixel_values": images, "labels": labels})
    ids, labels = torch.randint(19, (2, rows, 16), generator=generator)
    return ((ids, labels), {}) if model in ("gpt", "dropout") else ((), {"input_ids": ids, "labels": labels})


def _begin(run: Run) -> tuple[zerofx.Step, torch.optim.Optimizer, list[Given]]:
    torch.manual_seed(0)
    model = MODELS[run.model]()
    optimizer = adamw(model)
    options = {"backend": "eager", **dict(run.options)}
    step = zerofx.compile(model, optimizer, mesh=run.mesh, accumulate=run.accumulate, **options)
    sizes = Mesh(**(run.mesh or {}))
    data = dist.get_rank() % (sizes.replicate * sizes.shard) if dist.is_initialized() else 0
    torch.manual_seed(data)
    generator = torch.Generator().manual_seed(data + 1)
    return step, optimizer, [_batch(run.model, 2 * run.accumulate, generator) for _ in range(run.steps)]


def _train(run: Run) -> Outcome:
    step, optimizer, given = _begin(run)
    losses = [step(*args, **kwargs).clone() for args, kwargs in given]
    draws, whole = torch.rand(3), step.full_state_dict()
    args, kwargs = given[0]
    torch.manual_seed(7)
    measured, plan = step.measure(*args, **kwargs, num_steps=1), step.plan
    norm = [step.grad_norm] if "max_grad_norm" in dict(run.options) else []
    step.close()
    given_back = [tensor.detach().clone() for tensor in (*step.model.parameters(), *step.model.buffers())]
    idle = None if plan.prediction is None else plan.prediction.idle_seconds
    values = [*losses, draws, *whole.values(), *norm, *given_back]
    return Outcome(values, optimizer.state_dict()["state"], plan.peak_bytes, measured.peak_bytes, idle)


def _train_all(runs: list[Run]) -> list[Outcome]:
    return [_train(run) for run in runs]


def _equal(result: Outcome, expected: Outcome) -> bool:
    alike = all(torch.equal(mine, other) for mine, other in zip(result.values, expected.values, strict=True))
    states = result.states.keys() == expected.states.keys() and all(
        torch.equal(torch.as_tensor(result.states[key][name]), torch.as_tensor(value))
        for key, entry in expected.states.items()
        for name, value in entry.items()
    )
    return alike and states


def _check(runs: list[Run], num_ranks: int, expected: list[list[Outcome]]) -> None:
    """Each rank has the bits of the rank with its data, and the bytes that were planned."""
    for rank, outcomes in enumerate(run_ranks(_train_all, num_ranks, runs)):
        for number, (run, result) in enumerate(zip(runs, outcomes, strict=True)):
            alone = expected[rank % len(expected)][number]
            assert _equal(result, alone), f"rank {rank}: {run}"
            assert result.measured == result.predicted, f"rank {rank}: {run}"
            assert result.idle_seconds is not None and result.idle_seconds >= 0  # the slowest may never wait


CLIPPED = (("max_grad_norm", 0.1),)
TURNS, FIRST = ("order", "micro-batch"), ("order", "layer")
ON_TWO = [
    Run("gpt", {"pipe": 2}, 4, CLIPPED),
    Run("gpt", {"pipe": 2}, 6, (*CLIPPED, TURNS)),
    Run("dropout", {"pipe": 2}, 5, (("stage", 0), FIRST)),
    Run("dropout", {"pipe": 2}, 8, (("stage", 0), TURNS)),
    Run("llama", {"pipe": 2}, 5, (TURNS,)),
    Run("gpt2", {"pipe": 2}, 3, (("stage", 0), ("max_grad_norm", 0.1), FIRST)),
    Run("gpt2", {"pipe": 2}, 6, (("stage", 0), ("max_grad_norm", 0.1), TURNS)),
    Run("u-net", {"pipe": 2}, 2, (FIRST,)),
    Run("norms", {"pipe": 2}, 5, (FIRST,)),
    Run("norms", {"pipe": 2}, 6, (TURNS,)),
    Run("gpt", {"pipe": 2}, 1, (("memory_budget", 245_000), ("recompute", "auto")), steps=2),
    Run("dropout", {"pipe": 2}, 2, (("recompute", "full"), FIRST), steps=2),
    Run("dropout", {"pipe": 2}, 8, (("recompute", "full"), TURNS), steps=2),
    Run("dropout", {"pipe": 2}, 8, (("memory_budget", 330_000), TURNS), steps=2),
]
ON_FOUR = [
    Run("gpt2", {"pipe": 4}, 5, (*CLIPPED, FIRST)),
    Run("gpt2", {"pipe": 4}, 7, (*CLIPPED, TURNS)),
    Run("u-net", {"pipe": 4}, 8, (TURNS,), steps=4),
    Run("norms", {"pipe": 4}, 2, (FIRST,)),
    Run("norms", {"pipe": 4}, 8, (TURNS,), steps=4),
    Run("dropout", {"pipe": 4}, 2, (("stage", 0), FIRST), steps=4),
    Run("dropout", {"pipe": 4}, 8, (("stage", 0), TURNS), steps=4),
    Run("llama", {"pipe": 4}, 3, (TURNS,), steps=4),
]


def _nightly(runs: list[Run]) -> list[Any]:
    """Those by turns, and as a slow case those of a model that all take forward first, of which u-nets run each day."""
    first = [run for run in runs if FIRST in run.options and run.model != "u-net"]
    return [[run for run in runs if run not in first], pytest.param(first, marks=pytest.mark.slow)]


@pytest.mark.parametrize("runs", _nightly(ON_TWO), ids=["turns", "forward first"])
def test_two_stages_train_like_one_process(runs: list[Run]) -> None:
    free = [run if run.accumulate > 1 else Run(run.model, run.mesh, 1, steps=run.steps) for run in runs]
    _check(runs, 2, [_train_all([run.on(None) for run in free])])


@pytest.mark.parametrize("runs", _nightly(ON_FOUR), ids=["turns", "forward first"])
def test_four_stages_train_like_one_process(runs: list[Run]) -> None:
    _check(runs, 4, [_train_all([run.on(None) for run in runs])])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "num_stages"), [("bert", 2), ("t5", 2), ("t5", 4), ("vit", 2), ("mixtral", 2)])
def test_models_of_libraries_train_in_stages_like_one_process(model: str, num_stages: int) -> None:
    runs = [Run(model, {"pipe": num_stages}, 3, CLIPPED if model == "mixtral" else ())]
    _check(runs, num_stages, [_train_all([run.on(None) for run in runs])])


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_stages_of_several_ranks_train_like_those_ranks_without_stages(stage: int) -> None:
    options = (("stage", stage), ("max_grad_norm", 0.1))
    runs = [
        Run("dropout", {"pipe": 2, "shard": 2}, 4, (*options, FIRST), 4),
        Run("dropout", {"pipe": 2, "shard": 2}, 6, (*options, TURNS), 4),
        Run("llama", {"pipe": 2, "shard": 2}, 2, options, 4),
        Run("norms", {"pipe": 2, "shard": 2}, 5, (*options, TURNS), 4),
    ]
    # A stage reduces gradients once a step.
    once = [replace(run.on({"shard": 2}), options=(*options, ("reduce", "once"))) for run in runs]
    _check(runs, 4, run_ranks(_train_all, 2, once))


def _go_on(run: Run, folder: Path, *, save: bool) -> Outcome | None:
    """The first half of a training, saved, or the second half of it, of a model with other values."""
    step, optimizer, given = _begin(run)
    half = len(given) // 2
    if save:
        for args, kwargs in given[:half]:
            step(*args, **kwargs)
        step.save_checkpoint(folder)
        step.close()
        return None
    with torch.no_grad():
        for tensor in (*step.model.parameters(), *step.model.buffers()):
            tensor.fill_(0.5)
    step.load_checkpoint(folder)
    losses = [step(*args, **kwargs).clone() for args, kwargs in given[half:]]
    whole = step.full_state_dict()
    step.close()
    return Outcome([*losses, *whole.values()], optimizer.state_dict()["state"], {}, {}, None)


@pytest.mark.parametrize("to_stages", [True, False])
@pytest.mark.parametrize("model", ["gpt2", "norms"])
def test_checkpoints_go_between_stages_and_one_process(model: str, tmp_path: Path, *, to_stages: bool) -> None:
    run = Run(model, {"pipe": 2}, 2, steps=4)
    alone = run.on(None)
    if to_stages:
        _go_on(alone, tmp_path, save=True)
        result = run_ranks(_continue, 2, run, tmp_path)[1]
    else:
        run_ranks(_save, 2, run, tmp_path)
        result = _continue(alone, tmp_path)
    expected = _train_through(alone)
    assert _equal(result, expected)


def _save(run: Run, folder: Path) -> None:
    _go_on(run, folder, save=True)


def _continue(run: Run, folder: Path) -> Outcome:
    outcome = _go_on(run, folder, save=False)
    assert outcome is not None
    return outcome


def _train_through(run: Run) -> Outcome:
    step, optimizer, given = _begin(run)
    losses = [step(*args, **kwargs).clone() for args, kwargs in given][len(given) // 2 :]
    whole = step.full_state_dict()
    step.close()
    return Outcome([*losses, *whole.values()], optimizer.state_dict()["state"], {}, {}, None)


def _lose_one(lost: int, folder: Path) -> None:
    """Write what the other rank says of one that dies while it waits for what that is to send."""
    step, _, given = _begin(Run("gpt", {"pipe": 2}, 4, steps=2))
    (args, _), (again, _) = given
    step(*args)
    if dist.get_rank() == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankMismatchError) as failure:
        step(*again)
    (folder / "reason").write_text(str(failure.value))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_stage_that_dies_ends_all_with_its_reason(lost: int, tmp_path: Path) -> None:
    with pytest.raises((RankError, RuntimeError)):  # of the test's own group, which has lost a rank too
        run_ranks(_lose_one, 2, lost, tmp_path)
    assert f"rank {lost}" in (tmp_path / "reason").read_text()


def _evaluate(runs: list[Run]) -> list[tuple[list[Tensor], bool]]:
    """What steps and evaluations give, of batches of two shapes in turn; and whether bytes are as planned."""
    outcomes = []
    for run in runs:
        step, _, given = _begin(run)
        values = list[Tensor]()
        for number, (args, kwargs) in enumerate(given):
            values.append(step(*args, **kwargs).clone())
            few, named = _batch(run.model, run.accumulate * (1 + number % 2), torch.Generator().manual_seed(9))
            result = step.evaluate(*few, **named)
            values += [result] if isinstance(result, Tensor) else [result["loss"], result["logits"]]
            values.append(step(*few, **named).clone())
        measured, evaluation = step.measure_evaluation(*few, **dict[str, Any](named)), step.evaluation
        assert evaluation is not None
        alike = measured.peak_bytes == evaluation.plan.peak_bytes
        values += [tensor.clone() for tensor in step.full_state_dict().values()]
        outcomes.append(([*values, torch.rand(3)], alike))
        step.close()
    return outcomes


@pytest.mark.filterwarnings("ignore:a batch of another shape")
def test_stages_evaluate_and_train_on_batches_of_any_shape_like_one_process() -> None:
    runs = [Run("gpt2", {"pipe": 2}, 2, steps=2), Run("norms", {"pipe": 2}, 2, steps=2)]
    alone = _evaluate([run.on(None) for run in runs])
    for outcomes in run_ranks(_evaluate, 2, runs):
        for (values, alike), (expected, _) in zip(outcomes, alone, strict=True):
            assert alike and all(map(torch.equal, values, expected)) and len(values) == len(expected)


def _refuse() -> list[str]:
    """What is refused, with the step as usable as it was."""
    step, _, given = _begin(Run("gpt", {"pipe": 2}, 2, steps=1))
    (args, _), texts = given[0], []
    step(*args)
    for ask in (lambda: list(step.weights()), lambda: step.full("head").__enter__()):
        with pytest.raises(UsageError, match="axis 'pipe'") as refusal:
            ask()
        texts.append(str(refusal.value))
    step(*args)
    norm = nn.BatchNorm1d(4, affine=False)  # whose statistics would be sent back for each micro-batch
    model = nn.Sequential(norm, nn.Linear(4, 4), norm, nn.Linear(4, 4))
    other = zerofx.compile(model, adamw(model), mesh={"pipe": 2}, loss_fn=nn.MSELoss(), backend="eager")
    with pytest.raises(UsageError, match="which stage 1 changes, read in another") as refusal:
        other(torch.ones(2, 4), torch.ones(2, 4))
    one = nn.Linear(4, 4)
    short = zerofx.compile(one, adamw(one), mesh={"pipe": 2}, loss_fn=nn.MSELoss(), backend="eager")
    with pytest.raises(UsageError, match="expected at least 2 parts of a step"):
        short(torch.ones(2, 4), torch.ones(2, 4))
    return texts


def test_what_stages_do_not_do_is_said_on_all_ranks() -> None:
    first, second = run_ranks(_refuse, 2)
    assert first == second


def test_stages_of_ranks_that_share_a_computation_are_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match="leave one of them out"):
        zerofx.compile(model, adamw(model), mesh={"pipe": 2, "model": 2})
