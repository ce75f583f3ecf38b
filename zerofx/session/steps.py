"""The step of a batch: found among those that were built, or built; the first one takes the model over."""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofx.budgets import budget_bytes, host_budget_bytes
from zerofx.capture.absent_gradients import AbsentGradients
from zerofx.capture.checks import check_batch, device_of
from zerofx.capture.constant_arguments import ConstantArguments
from zerofx.capture.counted import counted
from zerofx.capture.kept_tensors import tell_kept_tensors
from zerofx.capture.traceable import tracing_device
from zerofx.capture.tracing_settings import dtype_settings
from zerofx.codegen.cpu.extras import CHANNELS
from zerofx.codegen.kernels.current_device import on_device
from zerofx.driver.asked import machine_at_hand
from zerofx.driver.best_mesh import best_mesh
from zerofx.driver.driver import build_step, fits_budget, kept_plan
from zerofx.driver.given_plan import take_plan
from zerofx.driver.prepared import Request
from zerofx.driver.sharing import check_digests, digest_of
from zerofx.errors import MemoryBudgetError, UsageError, ZeroFXError, warn
from zerofx.ir.batch import Batch
from zerofx.lengths.lengths import Lengths, Size
from zerofx.lowering.load import CompiledStep, load_step, read_edited
from zerofx.meshes import AUTO, mesh_for
from zerofx.options import CompileOptions
from zerofx.progress import watched
from zerofx.runtime.comm.collectives import is_on_cpu
from zerofx.runtime.cuda_graphs.obstacles import machine_obstacle, step_obstacle
from zerofx.runtime.state.loss_scaler import LossScaler
from zerofx.runtime.state.optimizer import Advance, hyperparameters
from zerofx.runtime.state.values import Values
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.target import Target
from zerofx.session.awaited import Awaited
from zerofx.session.guards import ModeWatch, NumberWatch, Owner
from zerofx.session.life import Life
from zerofx.session.seeds import SeedWatch
from zerofx.session.shapes import Shapes
from zerofx.session.taken_over import TakenOver
from zerofx.settings import Settings

RUNNING = "call step(batch)"
"""What ranks agree to do where a step is run."""

Agreed = Callable[[], Sequence[bytes]]
"""Waits until all ranks agree to run the same step; gives a digest of every rank's random generators, in rank order."""


class Steps:
    """The compiled steps of one model and optimizer, by batch shape and update.

    ``taken`` is the model once the first step has been built, ``tiers`` what its plan asks for. ``numbers`` are watched
    for changes that a step does not see. ``scaler`` has the loss's scale, if it is scaled.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        options: CompileOptions,
        settings: Settings,
        life: Life,
        owner: Owner,
    ) -> None:
        self._model, self._optimizer, self._life, self._owner = model, optimizer, life, owner
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
        watched = options.objective.watched(model)
        self._modes = ModeWatch(watched)
        self.numbers = NumberWatch(watched)
        self.values = Values(model, options.weights, life.control)
        self.scaler = None if options.loss_scale is None else LossScaler(options.loss_scale)
        self._loaded: Path | None = None
        self._awaited: Awaited | None = None
        self.lengths = None if options.lengths is None else Lengths(options.lengths, model, options, life.control)
        if options.plan is not None:
            self.machine = machine_at_hand(self.device, options, life.control)
            self.options = take_plan(options, self.machine, life.control)
            if isinstance(self.options.plan, Plan):
                self.mesh, self._chooses_mesh = self.options.plan.mesh, False

    def batch_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, counts: bool = True) -> Batch:
        """What ``step(*args, **kwargs)`` is called with, checked. ``counts``: whether terms of its loss are counted.

        Raises:
            ZeroFXError: it cannot be; the other ranks hear of it.
        """
        try:
            terms = self.options.loss_terms if counts else None
            added = () if self.lengths is None else self.lengths.filling.added
            named = counted(terms, args, kwargs, self._control.num_ranks, added)
            batch = self._constant.of(Batch.of(args, named))
            check_batch(self._model, batch)
            self.options.objective.outside.check()
            if self.taken is not None:
                self.taken.watch.check()
        except ZeroFXError as error:
            # The other ranks are about to compare their batches with this one's: they hear of it there.
            self._control.start(f"raise {type(error).__name__}: {error}")
            raise
        return batch

    def of(self, batch: Batch, purpose: str) -> tuple[CompiledStep, TakenOver, Advance, Agreed]:
        """The step for a batch, built if need be, with its scalars, and what waits until all ranks agree to run it."""
        setting = {"training mode": self._modes.mode()} | dtype_settings()
        described = batch.described() | setting
        signature = "\n".join(f"{name}: {text}" for name, text in described.items())
        form = signature if self.lengths is None else f"{self.lengths.form(batch)}; {setting}"
        advance = self.taken.advance() if self.taken is not None else None
        variant = self.taken.binding.variant if self.taken is not None else "not traced yet"
        agreed = self.agreement(
            purpose,
            batch,
            f"{signature}\noptimizer update: {variant}\n{hyperparameters(self._optimizer)}",
            "batch shapes, modes, autocast and optimizer options",
            "Give every rank batches of the same shapes, for example by padding, and the same optimizer options: a "
            "scheduler that follows a loss has to be given the mean of all ranks' losses.",
        )
        compiled = self.shapes.take(signature, variant)
        if compiled is None:
            agreed()
            compiled, self.taken = self._build(batch, form, described)
            advance = advance or self.taken.advance()
            self.shapes.put(signature, self.taken.binding.variant, described, compiled, form)
        if self.lengths is not None:
            self.lengths.note(batch, compiled.plan, has_run=purpose == RUNNING)
        assert self.taken is not None and advance is not None
        return compiled, self.taken, advance, agreed

    def fitted(self, batch: Batch) -> Batch:
        """The batch, padded to a rung where ``lengths=`` asks for that. Collective then.

        Raises:
            UsageError: it cannot be padded, on all ranks.
            MemoryBudgetError: as ``prepare_all``.
        """
        lengths = self.lengths
        if lengths is None:
            return batch
        self._begin_ladder(lengths, batch)
        return lengths.padded(batch, lengths.size_for(lengths.sizes_of(batch)))

    def alike(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """The micro-batches of one update, padded to the same tokens and samples. Collective before the first step.

        Raises:
            UsageError: they cannot be padded.
        """
        lengths = self.lengths
        assert lengths is not None, "batches of any length are asked for"
        if not lengths.is_settled:
            with self.capturing():
                lengths.settle(self.batch_of(*batches[0].call), len(batches))
        return lengths.alike(batches)

    def dealt(self, batch: Batch, given: Batch, compiled: CompiledStep) -> Batch:
        """A ``batch`` that was ``given`` with fewer samples, dealt out to the micro-batches of its step."""
        lengths = self.lengths
        if lengths is None or batch is given:
            return batch
        return lengths.spread(batch, given.size(), compiled.plan.num_micro_batches)

    def prepare_all(self, batch: Batch) -> None:
        """Build the steps of all rungs, the one that takes the most first, and load that of a batch.

        Raises:
            UsageError: the model's batches cannot be padded.
            MemoryBudgetError: not all rungs fit the budget; says which is the longest that does.
        """
        lengths = self.lengths
        if lengths is not None:
            self._begin_ladder(lengths, batch)
            with watched("preparing lengths", "lengths", len(lengths.known), show=self._control.rank == 0) as bar:
                for size in lengths.known:
                    self._prepare_rung(lengths, lengths.example(batch, size))
                    bar.update()
        self.prepare(batch)

    def prepare(self, batch: Batch) -> None:
        """Build the step of a batch alone, and where there is none yet that of the rung that takes the most.

        Raises:
            ZeroFXError: as ``prepare_all``.
        """
        self.of(self.fitted(batch), "prepare a step")[-1]()

    def _prepare_rung(self, lengths: Lengths, example: Batch) -> None:
        """Build the step of a rung, unless an earlier run has: that is loaded when it is first met."""
        if not lengths.is_built(example):
            assert self.taken is not None, "the first rung has been built"
            with self.capturing():
                plan = kept_plan(self.request(example), self.taken.earlier, self._control)
            if plan is not None:
                lengths.note(example, plan, has_run=False)
                return
        self.of(example, "prepare a step")[-1]()

    def _begin_ladder(self, lengths: Lengths, batch: Batch) -> None:
        """Build the step of the rung that takes the most first: its buckets are those of all."""
        if not lengths.is_settled:
            with self.capturing():
                lengths.settle(batch)
        if self.taken is not None:
            return
        first, *others = lengths.known
        try:
            self.of(lengths.example(batch, first), "prepare a step")[-1]()
        except MemoryBudgetError as error:
            longest = self._longest_that_fits(lengths, batch, others)
            if longest is None:
                raise
            raise MemoryBudgetError(
                f"{error}. Of lengths= the longest that fits is {longest}, not {first[0]}: give lengths up to "
                f"{longest}, or a larger memory_budget"
            ) from error

    def _longest_that_fits(self, lengths: Lengths, batch: Batch, sizes: Sequence[Size]) -> int | None:
        """The tokens of the first of ``sizes``, of which each takes less than the one before, that has a plan within
        the budget."""

        def fits(size: Size) -> bool:
            with self.capturing():
                return fits_budget(self.request(lengths.example(batch, size)), self._control)

        index = bisect_left(sizes, True, key=fits)
        return sizes[index][0] if index < len(sizes) else None

    def agreement(self, purpose: str, batch: Batch, text: str, what: str, hint: str) -> Agreed:
        """Begin to compare what ranks are about to do with a batch; as ``Control.start``."""
        started = self._control.start(
            purpose, text, what, hint,
            self.seeds.digest(self.device, self.mesh) + digest_of(batch, self.mesh),
            lambda notes: check_digests([note[16:] for note in notes], batch, self.mesh, self._control.gather),
        )  # fmt: skip

        @functools.cache  # what it gives is not to be gathered twice
        def agreed() -> Sequence[bytes]:
            return [note[:16] for note in started()]

        return agreed

    def request(self, batch: Batch) -> Request:
        """The request for a step with a batch."""
        # A capture has the same device.
        machine = self.machine or machine_at_hand(tracing_device(self._model, batch), self.options, self._control)
        stays = self.lengths is not None and self.taken is not None and self.options.delayed_update is None
        return Request(
            self._model, self._optimizer, batch, self.options, self._settings, self.mesh, machine,
            verbose=self._control.rank == 0,
            homes=self.taken.state.locations() if self.taken is not None and stays else None,
        )  # fmt: skip

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """While open, the model may be captured: a capture looks at all that a parameter has."""
        self.gradients.remove()
        try:
            with self.numbers.capturing(), self._life.unguarded():
                yield
        finally:
            if self.taken is not None:
                self.gradients.put()

    def mode(self) -> str:
        """Which modules are in training mode now."""
        return self._modes.mode()

    def _build(self, batch: Batch, form: str, described: Mapping[str, str]) -> tuple[CompiledStep, TakenOver]:
        if torch.is_inference_mode_enabled():
            raise UsageError(
                "expected the first step of a batch shape outside of torch.inference_mode(), found it inside, where "
                "nothing that is made can be trained: leave it first"
            )
        self.shapes.announce(form, described)
        if self._loaded is not None:
            warn(
                f"the edited step {self._loaded} runs for the batch shape and optimizer options it was loaded for; "
                f"this call has others and runs a newly generated step"
            )
        with self.capturing():
            request = self.request(batch)
            if self._chooses_mesh:
                self.mesh, self._chooses_mesh = best_mesh(request, self._control), False
                request = replace(request, mesh=self.mesh)
            built = build_step(request, self.taken.earlier if self.taken is not None else None, self._control)
        if self.shapes.is_empty:
            tell_kept_tensors(self._model, self.options.objective.forward or self.options.objective.loss_fn)
        self.machine, compiled = request.machine, built.compiled
        self._check_built(compiled)
        tiers = self._prepared_tiers(compiled, self.machine)
        if self.taken is not None:
            return compiled, self.taken
        taken = TakenOver(
            self._model, built, self.options, self.values, tiers, self._life,
            reads_memory=CHANNELS not in self._settings.disable, scaler=self.scaler,
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
        """Why the kernels of ``compiled`` are not launched as CUDA graphs; empty where they may be."""
        if self.options.cuda_graphs is False:
            return "cuda_graphs=False"
        if self._loaded is not None and compiled.source_path == self._loaded:
            return f"every line of {self._loaded} is to run in every step"
        assert self.machine is not None, "a compiled step has been planned for one"
        budget = budget_bytes(self.options.memory_budget, self.machine)
        device = device_of(self._model)
        return machine_obstacle(device) or step_obstacle(compiled.lowered, device, budget)

    def _prepared_tiers(self, compiled: CompiledStep, machine: Machine) -> Tiers:
        limit = host_budget_bytes(self.options.host_budget, machine)
        tiers = self.tiers = self.tiers or Tiers(compiled.device, self._settings.nvme_dirs, limit)
        peaks = compiled.plan.peak_bytes
        if "nvme" in peaks:
            purpose = "prepare the nvme tier"
            num_local_ranks = len(self._control.ranks_of_host(purpose))
            self._control.attempt(purpose, lambda: tiers.prepare(peaks, num_local_ranks))
        return tiers

    def spare_host_bytes(self) -> int | None:
        """What the latest step leaves of the host budget; None where there is no limit."""
        assert self.machine is not None and self.shapes.latest is not None, "a step has been captured"
        limit = host_budget_bytes(self.options.host_budget, self.machine)
        return None if limit is None else limit - self.shapes.latest.simulation.live.host_block_bytes

    def await_checkpoint(self, awaited: Awaited | None) -> None:
        """Have a checkpoint taken over by the first step that is built, in the place of one that was to be."""
        if self._awaited is not None:
            self._awaited.end()
        self._awaited = awaited

    def forget(self) -> None:
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
        functions = compiled.emitted.functions
        text = self._control.attempt("load an edited step", lambda: read_edited(path, functions))
        self._control.agree("load an edited step", text, "edited step", "Give every rank the same file.")
        assert self.machine is not None, "a captured step has one"
        target = Target.of(self.machine, self.options, self._settings, self.device, on_cpu=is_on_cpu(self.device))
        with on_device(self.device):
            loaded = load_step(text, str(path), compiled.regions, functions, target, self._control, edited=True)
        replaced = replace(
            compiled, function=loaded.function, updates=loaded.updates, source_path=Path(path),
            emitted=replace(compiled.emitted, source=text),
        )  # fmt: skip
        self.shapes.replace(compiled, replaced)
        self._loaded = Path(path)
