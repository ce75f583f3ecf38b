"""The step of a batch: found among those that were built, or built; the first one takes the model over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from zerofx.budgets import budget_bytes, host_budget_bytes
from zerofx.capture.absent_gradients import AbsentGradients
from zerofx.capture.by_size import KnownSizes
from zerofx.capture.cache import per_call_settings
from zerofx.capture.checks import check_batch, device_of
from zerofx.capture.leaked_tensors import warn_of_leaked_tensors
from zerofx.capture.objective.loss import Objective
from zerofx.capture.objective.module_state import Change
from zerofx.capture.objective.token_weighted_loss import add_term_counts
from zerofx.capture.python_state.watch import PythonState
from zerofx.capture.replay import Replay
from zerofx.capture.traceable import Forward, trace_device
from zerofx.capture.values.constant_arguments import ConstantArguments
from zerofx.codegen.cpu.extras import CHANNELS
from zerofx.driver.asked import machine_at_hand
from zerofx.driver.driver import build_step
from zerofx.driver.given_plan import take_plan
from zerofx.driver.plan_only import best_mesh
from zerofx.driver.prepared import Request
from zerofx.driver.shardings import check_digests, digest_of
from zerofx.errors import MemoryBudgetError, UsageError, notify
from zerofx.ir.batch import Batch
from zerofx.lengths.padded_batches import PaddedBatches
from zerofx.lowering.load import CompiledStep
from zerofx.mesh_option import AUTO, mesh_for
from zerofx.optimizers import Optimizers
from zerofx.options import CompileOptions
from zerofx.progress import watch_progress
from zerofx.runtime.comm.collectives import is_on_cpu
from zerofx.runtime.comm.comparisons import Comparison
from zerofx.runtime.cuda_graphs.obstacles import machine_obstacle, step_obstacle
from zerofx.runtime.state.loss_scaler import LossScaler
from zerofx.runtime.state.optimizer import Advance
from zerofx.runtime.state.row_room import RowRoom
from zerofx.runtime.state.values import Values
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.target import Target
from zerofx.session.batches.agreement import MICRO_BATCHES, Agreement, forward_parts, update_parts
from zerofx.session.edited import EditedStep
from zerofx.session.ending import end_connections, let_go
from zerofx.session.guards import Guard, ModeWatch
from zerofx.session.lending.lenders import Lenders
from zerofx.session.lending.owners import Owner
from zerofx.session.life import Life
from zerofx.session.seeds import SeedWatch
from zerofx.session.shapes import BatchKey, Match, Shapes
from zerofx.session.taken_over import Awaited, TakenOver
from zerofx.settings import Settings

RUNNING = "call step(batch)"
"""What ranks agree to do where a step is run."""


@dataclass(frozen=True)
class ReadyStep:
    """The step for a batch, built and about to run: its model, its scalars, and the ranks that have to agree."""

    compiled: CompiledStep
    taken: TakenOver
    advance: Advance
    agreement: Agreement


class Steps:
    """The compiled steps of one model and its optimizers, by batch shape and update.

    ``taken`` is the model once the first step has been built, ``tiers`` what its plan asks for. ``python`` is the state
    that forwards read. ``what`` names model and optimizers. ``scaler`` has the loss's scale, if it is scaled.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        options: CompileOptions,
        settings: Settings,
        life: Life,
        owner: Owner,
    ) -> None:
        self.model, self.optimizers, self.life, self._owner = model, optimizers, life, owner
        self.what = f"{type(model).__name__} with {optimizers.name}"
        self.options, self._settings, self._control = options, settings, life.control
        # Where the fastest is asked for, one batch a rank until the first step is built.
        self.mesh = mesh_for(None if options.mesh == AUTO else options.mesh, life.control.num_ranks)
        self._chooses_mesh = options.mesh == AUTO
        self.seeds = SeedWatch(life.control)
        self.shapes = Shapes(options.max_shapes)
        self.taken: TakenOver | None = None
        self.tiers: Tiers | None = None
        self.machine: Machine | None = None
        self.device = device_of(model)
        self.gradients = AbsentGradients(model)
        self._constant = ConstantArguments(options.constant, model, options.objective.forward)
        self.modes = ModeWatch(options.objective.modules_by_prefix(model))
        self.python = PythonState(model, options.objective, (Guard,))
        self.lenders = Lenders(model, options, life)
        owner.lend(self)
        self.values = Values(model, options.weights, life.control)
        self.scaler = None if options.loss_scale is None else LossScaler(options.loss_scale)
        self._edited = EditedStep()
        self._kernels_deferred = False
        self._sizes = None if options.lengths is None else KnownSizes()
        self.effects: Sequence[Change] = ()  # what the latest forward leaves on its modules
        self.replay: Replay | None = None  # of the latest forward, if it reads values for logs
        self.rows = RowRoom(options.copied_experts)
        self.num_given_back = 0  # times that the model was given back, to be taken over anew
        self.before_give_back: Callable[[], None] = lambda: None
        self._awaited: Awaited | None = None
        self.lengths = None if options.lengths is None else PaddedBatches(options.lengths, model, options, life.control)
        if options.plan is not None:
            self.machine = machine_at_hand(self.device, options, life.control)
            self.options = take_plan(options, self.machine, life.control)
            if isinstance(self.options.plan, Plan):
                self.mesh, self._chooses_mesh = self.options.plan.mesh, False

    def batch_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, counts: bool = True) -> Batch:
        """The batch of ``step(*args, **kwargs)``, checked. ``counts``: whether terms of its loss are counted.

        Raises:
            ZeroFXError: it cannot be; the other ranks hear of it.
        """
        if self.taken is not None:
            self.taken.unpark()
        with self._control.report_errors():
            terms = self.options.loss_terms if counts else None
            added = () if self.lengths is None else self.lengths.filling.extra_keywords
            named = add_term_counts(terms, args, kwargs, self._control.num_ranks, added)
            batch = self._constant.add_hashes(Batch.from_call(args, named))
            check_batch(self.model, batch)
            self.lenders.check()
            if self.lenders.has_changed():
                self.lenders.find()
            self.options.objective.free_tensors.check()
            if self.taken is not None:
                self.taken.watch.check()
        return batch

    def step_for(self, batch: Batch, purpose: str, num_micro_batches: int | None = None) -> ReadyStep:
        """The step for a batch, built if need be.

        ``num_micro_batches``: how many the batch is divided into, where that is not what ``accumulate`` says.
        """
        setting, options = {"training mode": self.modes.mode()} | per_call_settings(), self.options
        if num_micro_batches not in (None, options.accumulate):
            options = replace(options, accumulate=num_micro_batches, plan=None)
            setting |= {MICRO_BATCHES: str(num_micro_batches)}
        key = BatchKey(batch.description(), setting, None if self.lengths is None else self.lengths.form(batch))
        with self._control.report_errors():
            changed = self.taken.find_changed() if self.taken is not None else ""
            advance = self.taken.advance() if self.taken is not None and not changed else None
        variant = self._variant()
        match = self.find(self.shapes, key, variant, batch, options.objective)
        self._finish_updates(match.compiled)
        agreement = self.begin_agreement(
            purpose,
            batch,
            lambda: [
                # Stages have updates of their own.
                *update_parts(self.optimizers, variant if self.mesh.pipe == 1 else "", changed),
                *forward_parts(key, self.lenders.key, match),
            ],
        )
        if changed and self.taken is not None:
            agreement.wait()
            self._give_back(self.taken, changed)
            match = self.shapes.find(key.signature, self._variant())
        compiled = match.compiled
        if compiled is None:
            agreement.wait()
            self.announce(self.shapes, key, match)
            compiled, self.taken = self._build(batch, options)
            self.lenders.agree(self.taken.state)
            advance = advance or self.taken.advance()
            objective = options.objective
            match = self.keep(self.shapes, key, self._variant(), compiled, batch, objective, objective.effects)
        self.shapes.latest, self.effects, self.replay = compiled, match.effects, match.replay
        if self.lengths is not None:
            self.lengths.note(batch, compiled.plan, has_run=purpose == RUNNING)
        self.lenders.settle(agreement.wait)
        if purpose == RUNNING and self._kernels_deferred:
            agreement.wait()
            self.build_deferred_kernels()
        assert self.taken is not None and advance is not None
        return ReadyStep(compiled, self.taken, advance, agreement)

    def announce(self, shapes: Shapes, key: BatchKey, match: Match) -> None:
        """Say why a batch is about to be captured, where it is not the first.

        Raises:
            UsageError: as ``Shapes.announce``.
        """
        self.python.note(match.changes)
        shapes.announce(key, match)

    def keep(
        self, shapes: Shapes, key: BatchKey, variant: str, compiled: CompiledStep, batch: Batch, objective: Objective,
        effects: Mapping[str, Change],
    ) -> Match:  # fmt: skip
        """Keep a step, or evaluation, that was built for a batch, with the Python state of now and what its forward
        does besides computing; ``effects`` are what it leaves on its modules."""
        reads = self.python.read(compiled.arguments.constants.values())
        replay = self.replay_of(batch, compiled, objective)
        return shapes.put(key, variant, compiled, reads, tuple(effects.values()), replay)

    def _finish_updates(self, compiled: CompiledStep | None) -> None:
        """Finish what the last step, and those whose models are read, have let run on; ``compiled`` waits for its own.

        Before ranks agree to run a step: in that each may read what the others have.
        """
        waits = compiled is not None and self.taken is not None and self.taken.state.is_placed(compiled.plan)
        with self._control.report_errors():
            self.lenders.finish_updates()
            if self.tiers is not None and not waits:
                self.tiers.finish_updates()

    def find(self, shapes: Shapes, key: BatchKey, variant: str, batch: Batch, objective: Objective) -> Match:
        """The step, or evaluation, for a batch, if ``shapes`` has one; where Python state has changed by which the
        forward is no other, which may be on some ranks alone, that of the state before."""
        match = shapes.find(key.signature, variant)
        if match.reads is None or match.compiled is not None:
            return match
        if any(change.is_settled for change in match.changes):
            return match
        forward = Forward(self.model, batch, loss_fn=objective, compute_dtype=self.options.compute_dtype)
        with self.allow_capture():
            if not self.python.leaves_alone(forward, match.reads):
                return match
        renew = partial(self.replay_of, batch, objective=objective)
        is_same = shapes.accept(key.signature, variant, match.reads, renew)
        return shapes.find(key.signature, variant) if is_same else match

    def replay_of(self, batch: Batch, compiled: CompiledStep, objective: Objective) -> Replay | None:
        """The rest of a forward, to be run after a step, where it reads values for logs."""
        if not objective.logging.is_on:
            return None
        options, num = self.options, compiled.plan.num_micro_batches
        strides = {} if self.taken is None else self.taken.earlier.state.strides()
        casts = options.casts(self.model)
        # Numbers that are inputs of the step are plain ones here, as they are when it runs again.
        with self._control.report_errors(), self.capturable(), self.lenders.lift_guards():
            return Replay.make(Forward(self.model, batch.first_of(num), objective, casts, num, strides))

    def run_again(self, replay: Replay | None, shapes: Shapes, compiled: CompiledStep, tensors: Sequence[Any]) -> None:
        """Do what the forward of ``compiled`` does besides computing, for each micro-batch, with the values that it has
        read among ``tensors``."""
        if replay is None:
            return
        with self.capturable(), self.lenders.lift_guards(), shapes.learn_own(compiled):
            for of_micro_batch in compiled.tensors_to_log(tensors):
                replay.run(of_micro_batch)

    def defer_kernels(self) -> None:
        """Leave kernels of a step that was built to ``build_deferred_kernels``, where other lengths share them."""
        self._kernels_deferred = self.lengths is not None and self.options.compiles_regions

    def build_deferred_kernels(self) -> None:
        """Build the kernels that steps wait for, before one runs. Collective, where there are any.

        Raises:
            CompilerError: one cannot be built.
        """
        if self._kernels_deferred:
            # Inductor takes seconds to import: only who needs it pays.
            from zerofx.codegen.inductor.compile import finish_shared

            with watch_progress("building kernels", show=self._control.rank == 0):
                self._control.attempt("build kernels", finish_shared)
            self._kernels_deferred = False

    def _give_back(self, taken: TakenOver, changed: str) -> None:
        """Give model and optimizer back, to be taken over as they are by the step that is built next. Collective.

        Raises:
            UsageError: nothing would be trained, or a plan was given, which is for what was.
        """
        if isinstance(self.options.plan, Plan) or not any(p.requires_grad for p in self.model.parameters()):
            why = "with a plan, which is made for those" if self.options.plan is not None else "and nothing to train"
            raise UsageError(
                f"expected the parameters that compile found to be trained, and no others, found {changed}, {why}: "
                f"call step.close(), then compile again"
            )
        self.before_give_back()
        self.gradients.remove()
        with self._control.fail_together("make the step anew"):
            taken.give_back()
        let_go(self.model, taken.guards)
        absence = end_connections(taken, self.life)
        self.taken, self._edited = None, EditedStep()
        self.num_given_back += 1
        self.shapes.forget()
        if absence is not None:
            raise absence
        self.gradients = AbsentGradients(self.model)
        self.values = Values(self.model, None, self._control)
        notify(f"requires_grad asks for {changed}: the step is made anew, with the same values and optimizer states")

    def _variant(self) -> str:
        """Tells the updates that hold now, and the places of what is read of other steps, from others."""
        update = self.taken.binding.variant if self.taken is not None else "not traced yet"
        return "\n".join(filter(None, (update, self.lenders.key, self.rows.key)))

    def begin_agreement(self, purpose: str, batch: Batch, compare: Callable[[], Sequence[Comparison]]) -> Agreement:
        """Begin to compare what ranks are about to do with a batch; as ``Control.start``."""
        started = self._control.start(
            purpose, compare, self.seeds.digest(self.device, self.mesh) + digest_of(batch, self.mesh),
            lambda notes: check_digests([note[16:] for note in notes], batch, self.mesh, self._control.gather),
        )  # fmt: skip
        return Agreement(started)

    def choose_mesh(self, batch: Batch, options: CompileOptions | None = None) -> Mesh:
        """The mesh that steps run on; the fastest for a batch where it is to be chosen, once. Collective then."""
        if self._chooses_mesh:
            with self.allow_capture():
                self.mesh, self._chooses_mesh = best_mesh(self.request(batch, options), self._control), False
        return self.mesh

    def request(self, batch: Batch, options: CompileOptions | None = None) -> Request:
        """The request for a step with a batch, by its own ``options`` if it has some."""
        # A capture has the same device.
        machine = self.machine or machine_at_hand(trace_device(self.model, batch), self.options, self._control)
        stays = self.lengths is not None and self.taken is not None and self.options.delayed_update is None
        return Request(
            self.model, self.optimizers, batch, options or self.options, self._settings, self.mesh, machine,
            verbose=self._control.rank == 0, lenders=self.lenders.borrowed,
            fixed=self.taken.state.locations() if self.taken is not None and stays else None, sizes=self._sizes,
            capacity=self.rows.size[0], num_rounds=self.rows.size[1], num_copies=self.rows.copies[0],
            needed=self.rows.copies[1],
        )  # fmt: skip

    @contextlib.contextmanager
    def allow_capture(self) -> Iterator[None]:
        """While open, the model may be captured: a capture looks at all that a parameter has."""
        self.lenders.find()
        with self.python.substitute_numbers(), self.capturable(), self.lenders.lift_guards():
            yield

    @contextlib.contextmanager
    def capturable(self) -> Iterator[None]:
        """While open, the model is as one that no step trains."""
        self.gradients.remove()
        try:
            with self.life.lift_guard():
                yield
        finally:
            if self.taken is not None:
                self.gradients.put()

    def _build(self, batch: Batch, options: CompileOptions) -> tuple[CompiledStep, TakenOver]:
        self._edited.warn_of_another()
        self.choose_mesh(batch, options)
        with self.allow_capture():
            request = self.request(batch, options)
            try:
                built = build_step(request, self.taken.earlier if self.taken is not None else None, self._control)
            except MemoryBudgetError:
                self.rows.give_up()
                raise
        if self.shapes.is_empty:
            warn_of_leaked_tensors(self.model, self.options.objective.forward or self.options.objective.loss_fn)
        self.machine, compiled = request.machine, built.compiled
        self.rows.note_built(compiled.plan)
        self.defer_kernels()
        self._check_built(compiled)
        tiers = self._prepare_tiers(compiled)
        if self.taken is not None:
            self.taken.open_links(compiled)
            return compiled, self.taken
        taken = TakenOver(
            self.model, built, self.options, self.values, tiers, self.life,
            reads_memory=CHANNELS not in self._settings.disable, scaler=self.scaler, read_lent=self.lenders.read,
        )  # fmt: skip
        self._owner.keep()
        if self._awaited is not None:
            self._awaited.take_over(taken)
            self.await_checkpoint(None)
        self.device = compiled.device
        self.gradients.put()
        return compiled, taken

    def _check_built(self, compiled: CompiledStep) -> None:
        if self.options.on_nonfinite == "skip" and compiled.returned.by_call:
            raise UsageError(
                "expected forward to return its loss alone with on_nonfinite='skip', under which a step that is left "
                "out has nothing else to return, found more: give on_nonfinite='raise'"
            )
        if self.options.cuda_graphs is True and (obstacle := self.graph_obstacle(compiled)):
            raise UsageError(
                f"expected a step that CUDA graphs can be made of, since cuda_graphs=True, found that {obstacle}: give "
                f"cuda_graphs='auto' to have them where they are possible"
            )

    def graph_obstacle(self, compiled: CompiledStep) -> str:
        """The reason why the kernels of ``compiled`` are not launched as CUDA graphs; empty where they may be."""
        if self.options.cuda_graphs is False:
            return "cuda_graphs=False"
        if edited := self._edited.obstacle(compiled):
            return edited
        return machine_obstacle(self.device) or step_obstacle(compiled.lowered, self.device, self.budget)

    @property
    def budget(self) -> int | None:
        """The bytes that a step may have on the device; None where there is no limit."""
        assert self.machine is not None, "a compiled step has been planned for one"
        return budget_bytes(self.options.memory_budget, self.machine)

    @property
    def _host_budget(self) -> int | None:
        """The bytes that a step may have on the host; None where there is no limit."""
        assert self.machine is not None, "a compiled step has been planned for one"
        return host_budget_bytes(self.options.host_budget, self.machine)

    def _prepare_tiers(self, compiled: CompiledStep) -> Tiers:
        tiers = self.tiers = self.tiers or Tiers(compiled.device, self._settings.nvme_dirs, self._host_budget)
        peaks = compiled.plan.peak_bytes
        if "nvme" in peaks:
            purpose = "prepare the nvme tier"
            num_local_ranks = len(self._control.ranks_of_host(purpose))
            self._control.attempt(purpose, lambda: tiers.prepare(peaks, num_local_ranks))
        return tiers

    def spare_host_bytes(self) -> int | None:
        """Bytes of the host budget that the latest step leaves; None where there is no limit."""
        assert self.shapes.latest is not None, "a step has been captured"
        limit = self._host_budget
        return None if limit is None else limit - self.shapes.latest.lowered.simulation.live.host_block_bytes

    def await_checkpoint(self, awaited: Awaited | None) -> None:
        """Have a checkpoint taken over by the first step that is built, in the place of one that was to be."""
        if self._awaited is not None:
            self._awaited.end()
        self._awaited = awaited

    def release(self) -> None:
        """Let go of all steps and of the model, once the step is closed."""
        self.gradients.remove()
        self.await_checkpoint(None)
        self.taken = None
        self.shapes.forget()

    def load_source(self, compiled: CompiledStep, path: str | Path) -> None:
        """Run the edited file in the place of ``compiled``, the latest step.

        Raises:
            PlanError: the file cannot be loaded; the step runs as before.
            CompilerError: an edited region cannot be compiled; the step runs as before.
        """
        assert self.machine is not None, "a captured step has one"
        target = Target.create(self.machine, self.options, self._settings, self.device, on_cpu=is_on_cpu(self.device))
        self.shapes.replace(compiled, self._edited.load(path, compiled, target, self._control))
