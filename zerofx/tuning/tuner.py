"""Run the plans that could be the fastest, and keep the one that is: ``zerofx.tune``.

Plans with different strategies are made (``variations``), the most promising are run on a copy of the training, and
predictions are corrected by the measured seconds of their regions, collectives and copies. From the corrected costs
plans are made again; one that then promises to beat the best is run too. Rank 0 plans, times are those of the slowest
rank, and all ranks return the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn
from tqdm import tqdm

from zerofx.budgets import budget_bytes
from zerofx.capture.checks import check_batch
from zerofx.capture.objective.token_weighted_loss import add_term_counts
from zerofx.capture.values.constant_arguments import ConstantArguments
from zerofx.codegen.regions import Region
from zerofx.deferred import make_buffers
from zerofx.driver.asked import check_training, describe_request, measure_machine
from zerofx.driver.driver import prepare_together, target_of
from zerofx.driver.prepared import Request
from zerofx.errors import MemoryBudgetError, PlanError, UsageError
from zerofx.garbage import freeze_objects
from zerofx.ir.batch import Batch
from zerofx.lowering.lower import lower
from zerofx.mesh_option import AUTO, mesh_for
from zerofx.optimizers import Optimizers
from zerofx.option_checks import check_batch_form, check_count, has_stages
from zerofx.option_table import check_names, document_options
from zerofx.options import CompileOptions, TuneKeywords, check_options
from zerofx.progress import watch_progress
from zerofx.report.saved import SavedPlan
from zerofx.runtime.comm.control import Control
from zerofx.runtime.state.state import process_group
from zerofx.scheduler.cost.cpu.peaks import refuse_profilers
from zerofx.scheduler.cost.links import Transfer
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.measured import MeasuredCosts
from zerofx.session.lending.owners import claim, release
from zerofx.settings import ShortTraceback, read_settings
from zerofx.torch_private.profiler import is_profiling
from zerofx.tuning.candidates import Planner, best_of, conclude, most_promising, promises_more
from zerofx.tuning.result import Candidate, TuneResult, candidate_table
from zerofx.tuning.trial import PlanTrial, TunedTraining, free_copies, run_trial, slowest
from zerofx.units import format_bytes

_ROUNDS = 2  # at most so many rounds of plans from corrected costs


@document_options(TuneKeywords, CompileOptions)
@ShortTraceback()
def tune(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    batch: tuple[Any, ...] | Mapping[str, Any],
    stage: int = 3,
    *,
    machine: Machine | str | None = None,
    num_steps: int = 5,
    num_candidates: int = 4,
    save: str | Path | None = None,
    **options: Unpack[TuneKeywords],
) -> TuneResult:
    """Measure plans on the device at hand, and keep the fastest whose measured peak is within the budget.

    Nothing is trained: plans are run on a copy of model and optimizer, one at a time, and random generators are set
    back. Ranks call it together, and all return the same.

    Args:
        model, optimizer, stage: as for ``zerofx.compile``.
        batch: a batch to run: a tuple of positional arguments, or a dict of keywords.
        machine: what plans are predicted for at first; None for the machine at hand, which is measured unless it was
            (``Machine.measure``).
        num_steps: steps to measure of each candidate, after two that warm up; on CPU the last is recorded for its
            memory, and not timed.
        num_candidates: how many plans to run at first; a few more may follow once costs are corrected.
        save: a file for the best plan with its schedule, written by rank 0: for ``zerofx.compile(plan=...)`` and
            ``zerofx report``.
        options: as for ``zerofx.compile``: they say what the first candidate is, and what the others may change.
            ``memory_budget`` is the copy's alone.

    Raises:
        MemoryBudgetError: no plan fits, as predicted or as measured; says what became of each.
        PlanError: every candidate failed; says how.
        UsageError: on CPU, a profiler runs on some rank.
        ZeroFXError: as ``zerofx.compile`` would.
    """
    check_names(options, TuneKeywords, "tune")
    checked = check_options(stage=stage, machine=machine, **options)
    if checked.mesh == AUTO:
        raise UsageError(
            "expected the number of ranks on each axis for zerofx.tune, which compares plans of one mesh, found "
            "mesh='auto': give the one that zerofx.plan(mesh='auto') chooses"
        )
    if has_stages(checked.mesh):
        raise UsageError(
            f"expected a mesh without the axis 'pipe' for zerofx.tune, which measures one plan for all ranks, found "
            f"{checked.mesh}: plan its stages with zerofx.plan"
        )
    optimizers = Optimizers.from_user(optimizer, checked.average)
    check_training(model, optimizers, checked)
    make_buffers(model)
    for name, number, least in (("num_steps", num_steps, 2), ("num_candidates", num_candidates, 1)):
        check_count(name, number, least, f"to be at least {least}")
    if not isinstance(save, str | Path | None):
        raise UsageError(f"expected save to be the path of a file, found {type(save).__name__}")
    check_batch_form(batch)
    args, keywords = ((), batch) if isinstance(batch, Mapping) else (tuple(batch), {})
    tuner = _Tuner(TunedTraining(model, optimizers, args, keywords), checked, num_steps, num_candidates)
    owner = claim(model, tuner)
    try:
        return tuner.run(Path(save) if save is not None else None)
    finally:
        release(model, owner)


class _Tuner:
    """One call of ``tune`` on one rank."""

    def __init__(self, training: TunedTraining, options: CompileOptions, num_steps: int, num_candidates: int) -> None:
        self._training, self._options = training, options
        self._num_steps, self._num_candidates = num_steps, num_candidates
        self._settings = read_settings()
        self._candidates: list[Candidate] = []
        self._region_seconds: dict[str, list[float]] = {}
        self._regions: list[Region] = []
        self._transfers: dict[str, list[Transfer]] = {}
        self._in_step = True

    def run(self, save: Path | None) -> TuneResult:
        """Plan, run, correct, plan again; the same on every rank."""
        with closing(Control(process_group(), self._settings.timeout_seconds, "call zerofx.tune")) as control:
            control.agree(
                "call zerofx.tune",
                describe_request(self._training.model, self._training.optimizers, self._options, self._settings)
                + f"\nnum_steps: {self._num_steps}\nnum_candidates: {self._num_candidates}",
                "model, optimizer and options",
                "Tune the same on every rank.",
            )
        # From here on a rank may wait for another's whole candidate, and for the end of that one's timeout with it.
        rank_timeout_seconds = 2 * self._settings.timeout_seconds
        with closing(Control(process_group(), rank_timeout_seconds, "tune")) as self._control:
            return self._tune(save)

    def _tune(self, save: Path | None) -> TuneResult:
        control = self._control
        if self._training.device.type == "cpu":
            refuse_profilers(control.gather(is_profiling(), "measure steps"))
        self._machine = measure_machine(self._training.device, self._options, self._settings, control)
        self._budget = budget_bytes(self._options.memory_budget, self._machine)
        control.attempt("save the plan", lambda: self._check_folder(save))
        request = control.attempt("check the batch", self._request)
        # A candidate is compared with others of the same buckets.
        self._prepared = replace(prepare_together(request, control), may_be_sliced=False)
        # Rank 0 alone decides: what it shares, all have.
        planner = Planner(self._prepared, target_of(self._prepared))
        self._candidates = control.share("share the plans to try", planner.plan)
        # Garbage is collected after each candidate: of what the candidates have left alone.
        with watch_progress("tuning", "candidates", show=control.rank == 0) as bar, freeze_objects():
            chosen = most_promising(self._candidates, self._num_candidates)
            bar.total = len(chosen)
            for index in chosen:
                self._measure(index, bar)
            costs = self._correct(planner)
            for _ in range(_ROUNDS):
                better = promises_more(self._candidates)
                if better is None:
                    break
                bar.total += 1
                self._measure(better, bar)
                costs = self._correct(planner)
        return self._conclude(costs, save)

    # ------------------------------------------------------------------------------------------------ planning

    def _check_folder(self, save: Path | None) -> None:
        if save is not None and self._control.rank == 0 and not save.parent.is_dir():
            raise UsageError(f"expected a folder to save the plan in, found that {save.parent} is none")

    def _request(self) -> Request:
        training = self._training
        constant = ConstantArguments(self._options.constant, training.model, self._options.objective.forward)
        named = add_term_counts(self._options.loss_terms, training.args, training.keywords, self._control.num_ranks)
        batch = constant.add_hashes(Batch.from_call(training.args, named))
        check_batch(training.model, batch)
        asked = self._options.mesh
        assert asked != AUTO, "refused before"
        return Request(
            training.model, training.optimizers, batch, self._options, self._settings,
            mesh_for(asked, self._control.num_ranks), self._machine, verbose=self._control.rank == 0,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ running

    def _measure(self, index: int, bar: tqdm[Any]) -> None:
        """Run one candidate, and record the result."""
        control, candidate = self._control, self._candidates[index]
        bar.set_description(f"tuning: {candidate.name}", refresh=False)
        plan = candidate.plan
        assert plan is not None
        if not self._in_step:
            reason = "not run: another failed amid a step, and ranks may not be in the same place since"
            self._candidates[index] = replace(candidate, outcome=reason)
            return
        trial, regions = control.attempt(
            "run a candidate", lambda: run_trial(self._training, plan, self._options, self._num_steps)
        )
        free_copies(self._training.device)
        trials = control.gather(trial, "compare what was measured")
        self._in_step = control.num_ranks == 1 or all(trial_of_rank.in_step for trial_of_rank in trials)
        self._candidates[index] = self._outcome(candidate, trials)
        measured = self._candidates[index].measured
        for key, seconds in measured.region_seconds.items() if measured else ():
            self._region_seconds.setdefault(key, []).append(seconds)
        for stream, transfers in measured.transfers.items() if measured else ():
            self._transfers.setdefault(stream, []).extend(transfers)
        self._regions += regions
        bar.update()

    def _outcome(self, candidate: Candidate, trials: Sequence[PlanTrial]) -> Candidate:
        failed = {rank: trial.failure for rank, trial in enumerate(trials) if trial.measured is None}
        if failed:
            rank, why = next(iter(failed.items()))
            return replace(candidate, outcome=f"failed{f' on rank {rank}' if len(trials) > 1 else ''}: {why}")
        mesh = self._prepared.request.mesh
        measured = slowest([trial.measured for trial in trials if trial.measured is not None], mesh)
        over = measured.peak_bytes["device"] - self._budget if self._budget is not None else 0
        outcome = f"does not fit: measured {format_bytes(over)} too much" if over > 0 else ""
        return replace(candidate, measured=measured, outcome=outcome)

    def _correct(self, planner: Planner) -> MeasuredCosts:
        """Costs from all measurements; predictions, and plans within a budget, are made again from them."""
        costs, self._candidates = self._control.share(
            "share corrected costs",
            lambda: planner.correct(self._candidates, self._region_seconds, self._regions, self._transfers),
        )
        return costs

    def _conclude(self, costs: MeasuredCosts, save: Path | None) -> TuneResult:
        best = best_of(self._candidates)
        if best is None:
            table = candidate_table(self._candidates)
            if any(candidate.measured is not None for candidate in self._candidates):
                raise MemoryBudgetError(
                    f"expected a plan whose measured peak is within memory_budget={format_bytes(self._budget or 0)}, "
                    f"found none:\n{table}\nAllow more, or use a smaller batch"
                )
            raise PlanError(f"expected a plan that runs, found that every candidate failed:\n{table}")
        candidates = tuple(conclude(candidate, best) for candidate in self._candidates)
        chosen = candidates[self._candidates.index(best)]
        result = TuneResult(candidates, chosen, costs, self._budget)
        if save is not None:
            self._control.attempt("save the plan", lambda: self._save(result, save))
        return result

    def _save(self, result: TuneResult, path: Path) -> None:
        """Rank 0 writes the best plan with its schedule; times in both are those from measured costs."""
        if self._control.rank > 0:
            return
        prepared = self._prepared
        captured = prepared.graph_for(result.plan)
        target = replace(target_of(prepared), verbose=False).replace_costs(result.costs, prepared.request.mesh)
        lowered = lower(captured, result.plan, prepared.layout, prepared.programs, target)
        training = self._training
        what = f"{type(training.model).__name__} with {training.optimizers.name}, times from measured costs"
        saved = SavedPlan.from_lowered(lowered, self._machine, what)
        try:
            saved.save(path)
        except OSError as error:
            raise UsageError(f"expected to write the plan to {path}, found that it cannot be: {error}") from error
