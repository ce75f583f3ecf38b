"""Stages on the axis ``pipe`` train like one process with as many micro-batches, to the bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import RankError, run_ranks
from tests.lib.models import adamw
from tests.lib.runs.stages import Outcome, Run, are_equal, begin_run, check_runs, stage_batch, train_run, train_runs
from zerofx import Machine, OptimizerError, RankMismatchError, UsageError
from zerofx.scheduler.cost.machine import Link
from zerofx.scheduler.plan.mesh import Mesh

CLIPPED = (("max_grad_norm", 0.1),)
TURNS, FIRST, APART = ("order", "micro-batch"), ("order", "layer"), ("order", "zero-bubble")
CHUNKS, ROUNDS = ("order", "interleaved"), ("order", "round-robin")
CPU = Machine.named("cpu")
# On which a byte takes longer than all that a step computes.
SLOW = replace(CPU, intra_node=Link(bandwidth=1.0, latency=1e-6))
# On which an operator takes as long as its numbers, not as it takes to start.
SLOW_TO_COMPUTE = replace(CPU, device=replace(CPU.device, memory_bandwidth=1e6))
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
WEIGHTS_APART = [
    [Run(model, {"pipe": 2}, 6, (*CLIPPED, ("stage", 0), APART), steps=3) for model in ("dropout", "gpt2", "u-net")],
    [Run("gpt", {"pipe": 4}, 8, (*CLIPPED, APART), steps=3)],
]
MORE_APART = [
    [
        Run("dropout", {"pipe": 2}, 8, (("recompute", "full"), APART), steps=2),
        Run("norms", {"pipe": 2}, 2, (APART,), steps=3),
    ],
    [Run("norms", {"pipe": 4}, 9, (APART,), steps=2), Run("llama", {"pipe": 4}, 3, (APART,), steps=2)],
]
IN_CHUNKS = [
    [
        Run("gpt", {"pipe": 2}, 2, (*CLIPPED, ("grad_norms", True), CHUNKS), steps=3),
        Run("llama", {"pipe": 2}, 8, (*CLIPPED, ("stage", 0), CHUNKS), steps=3),
        Run("norms", {"pipe": 2}, 7, (CHUNKS,), steps=3),
        Run("dropout", {"pipe": 2}, 8, (("stage", 0), CHUNKS), steps=3),
    ],
    [Run("deep", {"pipe": 4}, 16, (*CLIPPED, CHUNKS), steps=3)],
]
MORE_IN_CHUNKS = [
    [
        Run("gpt", {"pipe": 2}, 9, (*CLIPPED, ("recompute", "full"), CHUNKS), steps=2),
        Run("u-net", {"pipe": 2}, 7, (CHUNKS,), steps=3),
        Run("telling", {"pipe": 2}, 6, (CHUNKS,), steps=3),
        Run("gpt2", {"pipe": 2}, 3, (*CLIPPED, CHUNKS), steps=3),
    ],
    [Run("deep", {"pipe": 4}, 4, (("stage", 0), CHUNKS), steps=3)],
]
IN_ROUNDS = [
    [
        Run("gpt", {"pipe": 2}, 8, (*CLIPPED, ("grad_norms", True), ROUNDS), steps=3),
        Run("llama", {"pipe": 2}, 2, (("stage", 0), ROUNDS), steps=3),
        Run("gpt2", {"pipe": 2}, 6, (*CLIPPED, ROUNDS), steps=3),
        Run("norms", {"pipe": 2}, 5, (ROUNDS,), steps=3),
        Run("dropout", {"pipe": 2}, 8, (("stage", 0), ROUNDS), steps=3),
    ],
    [Run("deep", {"pipe": 4}, 9, (*CLIPPED, ROUNDS), steps=3)],
]
MORE_IN_ROUNDS = [
    [
        Run("dropout", {"pipe": 2}, 3, (*CLIPPED, ("recompute", "full"), ROUNDS), steps=2),
        Run("u-net", {"pipe": 2}, 7, (ROUNDS,), steps=3),
        Run("telling", {"pipe": 2}, 6, (ROUNDS,), steps=3),
        Run("gpt", {"pipe": 2}, 1, (*CLIPPED, ROUNDS), steps=3),
    ],
    [Run("deep", {"pipe": 4}, 3, (("stage", 0), ROUNDS), steps=3)],
]

EACH, ON_HOST = ("reduce", "each"), ("offload", {"gradients": "host"})
IN_EACH = [
    Run("llama", {"pipe": 2, "shard": 2}, 6, (*CLIPPED, EACH), 3),
    Run("gpt", {"pipe": 2, "shard": 2}, 2, (EACH,), 3),
]
AWAY = [Run("llama", {"pipe": 2}, 6, (*CLIPPED, ON_HOST), 3), Run("gpt", {"pipe": 2}, 2, (ON_HOST,), 3)]
MORE_IN_EACH = [
    Run("gpt2", {"pipe": 2, "shard": 2}, 5, (*CLIPPED, EACH, ("recompute", "full")), 2),
    Run("dropout", {"pipe": 2, "shard": 2}, 6, (EACH, ("precision", "bf16")), 2),
    Run("norms", {"pipe": 2, "shard": 2}, 5, (EACH,), 2),
    Run("gpt", {"pipe": 2, "shard": 2}, 4, (EACH, ("wire", "int8"), ("machine", SLOW)), 2),
]
MORE_AWAY = [
    Run("deep", {"pipe": 4}, 9, (*CLIPPED, ON_HOST), 2),
    Run("gpt2", {"pipe": 4}, 3, (ON_HOST,), 2),
    Run("norms", {"pipe": 4}, 7, (ON_HOST,), 2),
]


def _nightly(runs: list[Run]) -> list[Any]:
    """Those by turns, and as a slow case those of a model that all take forward first, of which u-nets run each day."""
    first = [run for run in runs if FIRST in run.options and run.model != "u-net"]
    return [[run for run in runs if run not in first], pytest.param(first, marks=pytest.mark.slow)]


@pytest.mark.days(3)
@pytest.mark.parametrize("runs", _nightly(ON_TWO), ids=["turns", "forward first"])
def test_two_stages_train_like_one_process(runs: list[Run]) -> None:
    free = [run if run.accumulate > 1 else Run(run.model, run.mesh, 1, steps=run.steps) for run in runs]
    check_runs(runs, 2, [train_runs([run.on(None) for run in free])])


@pytest.mark.parametrize("runs", _nightly(ON_FOUR), ids=["turns", "forward first"])
def test_four_stages_train_like_one_process(runs: list[Run]) -> None:
    check_runs(runs, 4, [train_runs([run.on(None) for run in runs])])


@pytest.mark.days(3)
@pytest.mark.parametrize(("model", "num_ranks"), [("gpt", 2), pytest.param("matrices", 4, marks=pytest.mark.slow)])
def test_stages_that_are_chosen_train_like_ranks_without(model: str, num_ranks: int) -> None:
    """On a slow link two stages are fastest, and of four ranks two pairs of them: that each idles is said of stages."""
    slow = replace(SLOW, ranks_per_node=num_ranks)
    chosen = Run(model, "auto", 8, (*CLIPPED, ("machine", slow)), steps=3)
    once = replace(chosen.on({"replicate": num_ranks // 2}), options=(*chosen.options, ("reduce", "once")))
    check_runs([chosen], num_ranks, run_ranks(train_runs, num_ranks // 2, [once]))


@pytest.mark.parametrize(
    ("num_ranks", "runs"),
    [
        *zip((2, 4), WEIGHTS_APART, strict=True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in zip((2, 4), MORE_APART, strict=True)),
    ],
)
def test_weight_gradients_some_turns_later_have_the_bits_of_one_process(num_ranks: int, runs: list[Run]) -> None:
    check_runs(runs, num_ranks, [train_runs([run.on(None) for run in runs])])


@pytest.mark.parametrize(
    ("num_ranks", "runs"),
    [
        *zip((2, 4), IN_CHUNKS, strict=True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in zip((2, 4), MORE_IN_CHUNKS, strict=True)),
    ],
)
def test_stages_of_two_chunks_have_the_bits_of_one_process(num_ranks: int, runs: list[Run]) -> None:
    check_runs(runs, num_ranks, [train_runs([run.on(None) for run in runs])])


@pytest.mark.parametrize(
    ("num_ranks", "runs"),
    [
        *zip((2, 4), IN_ROUNDS, strict=True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in zip((2, 4), MORE_IN_ROUNDS, strict=True)),
    ],
)
def test_stages_in_rounds_have_the_bits_of_one_process(num_ranks: int, runs: list[Run]) -> None:
    check_runs(runs, num_ranks, [train_runs([run.on(None) for run in runs])])


def _choose_number(run: Run) -> tuple[int, str, Outcome]:
    step, _, ((args, kwargs), *_) = begin_run(run)
    step(*args, **kwargs)
    number, why = step.plan.num_micro_batches, step.plan.micro_batches_reason
    step.close()
    return number, why, train_run(run)


@pytest.mark.parametrize(
    "options",
    [
        (("machine", SLOW_TO_COMPUTE),),
        pytest.param(
            (("machine", CPU), ("memory_budget", 250_000), ("recompute", "none"), TURNS), marks=pytest.mark.slow
        ),
    ],
    ids=["idle", "budget"],
)
def test_the_fastest_number_of_micro_batches_is_taken(options: tuple[tuple[str, Any], ...]) -> None:
    """Where operators take as long as their numbers, stages idle less with more; and more hold less."""
    run = Run("gpt", {"pipe": 2}, 4, (*CLIPPED, *options, ("accumulate", "auto")), steps=2)
    (number, why, first), (same, _, second) = run_ranks(_choose_number, 2, run)
    assert number == same > 1 and "the fastest number" in why
    alone = train_run(replace(run.on(None), options=(*CLIPPED, ("accumulate", number))))
    for outcome in (first, second):
        assert are_equal(outcome, alone) and outcome.measured == outcome.predicted


def test_slices_for_the_budget_of_one_stage_and_by_name_have_the_bits_of_one_process() -> None:
    run = Run("wide", {"pipe": 2}, 2, (*CLIPPED, ("offload", "host"), ("memory_budget", 60_000), TURNS), steps=3)
    found = replace(run.on(None), options=(*CLIPPED, ("tile", {"up.weight": 4, "down.weight": 4})))
    named = Run("wide", {"pipe": 2}, 4, (*CLIPPED, ("tile", {"up.weight": 4, "layers.2.weight": 2}), TURNS), steps=3)
    check_runs([run, named], 2, [train_runs([found, named.on(None)])])


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["shard", "model"])
def test_weight_gradients_and_chunks_in_stages_of_several_ranks(shared: str) -> None:
    options = (*CLIPPED, ("stage", 0 if shared == "model" else 3), APART)
    runs = [Run(model, {"pipe": 2, shared: 2}, 6, options, 3) for model in ("dropout", "llama")]
    runs += [Run("gpt", {"pipe": 2, shared: 2}, 7, (*options[:-1], order), 3) for order in (CHUNKS, ROUNDS)]
    once = [replace(run.on({shared: 2}), options=(*options[:-1], ("reduce", "once"))) for run in runs]
    check_runs(runs, 4, run_ranks(train_runs, 2, once))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "num_stages"), [("bert", 2), ("t5", 2), ("t5", 4), ("vit", 2), ("mixtral", 2)])
def test_models_of_libraries_train_in_stages_like_one_process(model: str, num_stages: int) -> None:
    options = CLIPPED if model == "mixtral" else ()
    runs = [
        Run(model, {"pipe": num_stages}, 3, options),
        Run(model, {"pipe": num_stages}, 6, (*options, TURNS), steps=4),
    ]
    check_runs(runs, num_stages, [train_runs([run.on(None) for run in runs])])


@pytest.mark.days(3)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_stages_of_several_ranks_train_like_those_ranks_without_stages(stage: int) -> None:
    options = (("stage", stage), ("max_grad_norm", 0.1))
    runs = [
        Run("dropout", {"pipe": 2, "shard": 2}, 4, (*options, FIRST), 4),
        Run("dropout", {"pipe": 2, "shard": 2}, 6, (*options, TURNS), 4),
        Run("llama", {"pipe": 2, "shard": 2}, 2, options, 4),
        Run("norms", {"pipe": 2, "shard": 2}, 5, (*options, TURNS), 4),
        Run("matrices", {"pipe": 2, "shard": 2}, 2, options, 3, "Muon"),
    ]
    if stage:
        runs.append(Run("gpt", {"pipe": 2, "shard": 2}, 4, (*options, ("wire", "int8"), ("machine", SLOW), TURNS), 3))
    # A stage reduces gradients once a step.
    alone = [run.on({"shard": 2}) for run in runs]
    once = [replace(run, options=(*run.options, ("reduce", "once"))) for run in alone]
    check_runs(runs, 4, run_ranks(train_runs, 2, once))


@pytest.mark.parametrize(
    ("shard", "runs"),
    [
        (2, IN_EACH),
        (1, AWAY),
        (2, [replace(run, mesh={"pipe": 2, "shard": 2}) for run in AWAY]),
        pytest.param(2, MORE_IN_EACH, marks=pytest.mark.slow),
        pytest.param(1, MORE_AWAY, marks=pytest.mark.slow),
    ],
    ids=["each", "host", "host, sharded", "more each", "more host"],
)
def test_gradients_of_one_micro_batch_go_before_those_of_the_next(shard: int, runs: list[Run]) -> None:
    """They are reduced in each, or wait on the host; with a loop over turns, and with fewer micro-batches than that."""
    alone = [run.on({"shard": shard}) for run in runs]
    expected = run_ranks(train_runs, shard, alone) if shard > 1 else [train_runs(alone)]
    mesh = runs[0].mesh
    assert isinstance(mesh, Mapping)
    check_runs(runs, Mesh(**mesh).num_ranks, expected)


def _go_on(run: Run, folder: Path, *, save: bool) -> Outcome | None:
    """The first half of a training, saved, or the second half of it, of a model with other values."""
    step, optimizer, given = begin_run(run)
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


@pytest.mark.days(3)
@pytest.mark.parametrize("to_stages", [True, False])
@pytest.mark.parametrize(
    ("model", "optimizer", "options"),
    [("gpt2", "AdamW", ()), ("norms", "AdamW", ()), ("matrices", "Muon", ()), ("dropout", "AdamW", (ROUNDS,))],
)
def test_checkpoints_go_between_stages_and_one_process(
    model: str, optimizer: str, options: tuple[Any, ...], tmp_path: Path, *, to_stages: bool
) -> None:
    run = Run(model, {"pipe": 2}, 2, options, steps=4, optimizer=optimizer)
    alone = run.on(None)
    if to_stages:
        _go_on(alone, tmp_path, save=True)
        result = run_ranks(_continue, 2, run, tmp_path)[1]
    else:
        run_ranks(_save, 2, run, tmp_path)
        result = _continue(alone, tmp_path)
    expected = _train_through(alone)
    assert are_equal(result, expected)


def _save(run: Run, folder: Path) -> None:
    _go_on(run, folder, save=True)


def _continue(run: Run, folder: Path) -> Outcome:
    outcome = _go_on(run, folder, save=False)
    assert outcome is not None
    return outcome


def _train_through(run: Run) -> Outcome:
    step, optimizer, given = begin_run(run)
    losses = [step(*args, **kwargs).clone() for args, kwargs in given][len(given) // 2 :]
    whole = step.full_state_dict()
    step.close()
    return Outcome([*losses, *whole.values()], optimizer.state_dict()["state"], {}, {}, None)


def _lose_one(lost: int, folder: Path) -> None:
    """Write what the other rank says of one that dies while it waits for what that is to send."""
    step, _, given = begin_run(Run("gpt", {"pipe": 2}, 4, steps=2))
    (args, _), (again, _) = given
    step(*args)
    if dist.get_rank() == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankMismatchError) as failure:
        step(*again)
    (folder / "reason").write_text(str(failure.value))


@pytest.mark.days(3)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_stage_that_dies_ends_all_with_its_reason(lost: int, tmp_path: Path) -> None:
    with pytest.raises((RankError, RuntimeError)):  # of the test's own group, which has lost a rank too
        run_ranks(_lose_one, 2, lost, tmp_path)
    assert f"rank {lost}" in (tmp_path / "reason").read_text()


def _evaluate(runs: list[Run]) -> list[tuple[list[Tensor], bool]]:
    """What steps and evaluations give, of batches of two shapes in turn; and whether bytes are as planned."""
    outcomes = []
    for run in runs:
        step, _, given = begin_run(run)
        values = list[Tensor]()
        for number, (args, kwargs) in enumerate(given):
            values.append(step(*args, **kwargs).clone())
            few, named = stage_batch(run.model, run.accumulate * (1 + number % 2), torch.Generator().manual_seed(9))
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


@pytest.mark.days(3)
@pytest.mark.filterwarnings("ignore:a batch of another shape")
def test_stages_evaluate_and_train_on_batches_of_any_shape_like_one_process() -> None:
    runs = [Run("gpt2", {"pipe": 2}, 2, steps=2), Run("norms", {"pipe": 2}, 2, steps=2)]
    runs.append(Run("gpt2", {"pipe": 2}, 3, (ROUNDS,), steps=2))
    alone = _evaluate([run.on(None) for run in runs])
    for outcomes in run_ranks(_evaluate, 2, runs):
        for (values, alike), (expected, _) in zip(outcomes, alone, strict=True):
            assert alike and all(map(torch.equal, values, expected)) and len(values) == len(expected)


def _refuse() -> list[str]:
    """What is refused, with the step as usable as it was."""
    step, _, given = begin_run(Run("gpt", {"pipe": 2}, 2, steps=1))
    (args, _), texts = given[0], list[str]()
    step(*args)
    norm = nn.BatchNorm1d(4, affine=False)  # whose statistics would be sent back for each micro-batch
    model = nn.Sequential(norm, nn.Linear(4, 4), norm, nn.Linear(4, 4))
    other = zerofx.compile(model, adamw(model), mesh={"pipe": 2}, loss_fn=nn.MSELoss(), backend="eager")
    with pytest.raises(UsageError, match="which stage 1 changes, read in another") as refusal:
        other(torch.ones(2, 4), torch.ones(2, 4))
    texts.append(str(refusal.value))
    combining, _, given = begin_run(Run("matrices", {"pipe": 2}, 2, steps=1, optimizer="by all norms"))
    with pytest.raises(OptimizerError, match="which combines those of all stages"):
        combining(*given[0][0])
    step(*args)
    tiled, _, given = begin_run(Run("matrices", {"pipe": 2}, 2, (("tile", {"": 2}),), steps=1))
    with pytest.raises(UsageError, match="expected tile to name parameters"):
        tiled(*given[0][0])
    one = nn.Linear(4, 4)
    short = zerofx.compile(one, adamw(one), mesh={"pipe": 2}, loss_fn=nn.MSELoss(), backend="eager")
    with pytest.raises(UsageError, match="expected at least 2 parts of a step"):
        short(torch.ones(2, 4), torch.ones(2, 4))
    return texts


def test_what_stages_do_not_do_is_said_on_all_ranks() -> None:
    first, second = run_ranks(_refuse, 2)
    assert first == second
