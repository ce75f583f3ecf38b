"""What meshes make of a step, read from a few of its layers, and what they take at least.

A mesh is planned and simulated for a few of the layers (``short_steps.py``), which says what all of them take, within a
memory budget too. What does not depend on how ranks are laid out along ``replicate`` and ``shard`` is found once for
each number of ``model`` ranks: how they share the computation, and how long one such group takes by itself. A mesh that
holds more than fits of parameters and states alone, or whose computation or links are busy for longer than another
takes, is left out with that.
"""

from __future__ import annotations

from dataclasses import replace

from zerofx.budgets import budget_bytes, tiers_for
from zerofx.driver.captures import Captures
from zerofx.driver.meshes.short_steps import GivingUp, Short, ShortSteps, StepTotals, WhenKept
from zerofx.driver.prepared import Request
from zerofx.driver.shardings import shardings_of, shared_as
from zerofx.errors import UsageError, ZeroFXError
from zerofx.report.meshes import MeshOutcome
from zerofx.scheduler.cost.wire_volume import ACROSS, WITHIN
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.search.mesh_floor import Floor


class Estimates:
    """What the meshes of ``num_ranks`` ranks make of the step of ``request``, which is for any; ``on_cpu`` as for
    ``Target``."""

    def __init__(self, request: Request, captures: Captures, num_ranks: int, *, on_cpu: bool) -> None:
        self.verbose = request.verbose
        machine = request.machine.for_ranks(num_ranks)
        self._request = replace(request, machine=machine, verbose=False)
        self._captures, self._num_ranks = captures, num_ranks
        self._short = ShortSteps(self._request, captures, on_cpu=on_cpu)
        self._shared: dict[int, Short[Captures] | ZeroFXError] = {}
        self._alone: dict[int, StepTotals] = {}
        self._keeping: dict[Mesh, WhenKept] = {}
        self._given_up: dict[tuple[int, bool], list[tuple[GivingUp, float]]] = {}
        self._floors: dict[Mesh, Floor] = {}

    def of(self, mesh: Mesh, fastest: float | None = None) -> MeshOutcome:
        """What a step on ``mesh`` takes, or why it cannot run there.

        Where it needs more memory than there is for parameters and states alone, or takes at least ``fastest`` seconds
        a sample, what it takes at least. None: the step is simulated in any case.
        """
        outcome, request = self._outcome(mesh), self._on(mesh)
        limit = outcome.limit_bytes
        try:
            if fastest is not None:
                shown = self._shown_by_fewer(mesh)
                if shown >= fastest:
                    return replace(outcome, is_least=True, step_seconds=shown * outcome.num_samples)
                floor = self._floor(request)
                held, seconds = max(round(floor.held_bytes) - self._away_bytes, 0), self._least(request)
                least = replace(outcome, is_least=True, peak_bytes=held, step_seconds=seconds)
                if held > limit or least.seconds_per_sample >= fastest:
                    return least
            numbers = self._kept(request).all
            if numbers.peak_bytes > limit and request.options.memory_budget is not None:
                numbers = self._giving_up(request, numbers, limit).within(numbers, limit)
        except ZeroFXError as error:
            return replace(outcome, trouble=str(error))
        return replace(
            outcome, peak_bytes=round(numbers.peak_bytes), step_seconds=numbers.step_seconds,
            exposed_seconds=max(numbers.exposed_seconds, 0.0),  # read from a few layers, less than nothing is none
            wire_bytes={WITHIN: round(numbers.within), ACROSS: round(numbers.across)},
        )  # fmt: skip

    def least_seconds(self, mesh: Mesh, fastest: float) -> float:
        """What a step on ``mesh`` takes at least for a sample, of all ranks together; nothing where it cannot run.

        Where that is known to be ``fastest`` or more, it is not found any closer.
        """
        shown = self._shown_by_fewer(mesh)
        try:
            return shown if shown >= fastest else self._least(self._on(mesh)) / self._outcome(mesh).num_samples
        except ZeroFXError:
            return 0.0

    def _shown_by_fewer(self, mesh: Mesh) -> float:
        """Seconds that a sample takes at least, as groups of fewer ``model`` ranks have shown.

        Let a group of m ranks compute c(m) seconds for its batch. It could do what a group of 2m does, each rank the
        work of two of those, and would send less: c(m) <= 2 c(2m). There are half as many groups of 2m ranks, and so
        half as many samples at a time, each of which takes no less than with groups of m.
        """
        seconds = [
            numbers.computing / self._outcome(Mesh(shard=self._num_ranks // model, model=model)).num_samples
            for model, numbers in self._alone.items()
            if mesh.model > model and mesh.model % model == 0
        ]
        return max(seconds, default=0.0)

    @property
    def _away_bytes(self) -> int:
        """What a rank may hold elsewhere than on its device."""
        options, machine = self._request.options, self._request.machine
        tiers = tiers_for(options.offload, machine) if options.memory_budget is not None else ()
        share = {"host": machine.host_bytes_per_rank, "nvme": machine.nvme_bytes_per_rank}
        return sum(share[tier] for tier in tiers)

    def _outcome(self, mesh: Mesh) -> MeshOutcome:
        machine = self._request.machine
        budget = budget_bytes(self._request.options.memory_budget, machine)
        limit = machine.device.memory_bytes if budget is None else budget
        return MeshOutcome(mesh, captured_samples(self._request) * mesh.num_ranks // mesh.model, limit_bytes=limit)

    def _on(self, mesh: Mesh) -> Request:
        return replace(self._request, mesh=mesh)

    def _least(self, request: Request) -> float:
        """Seconds that no step on the mesh is faster than: one group computes as long by itself, and links are busy.

        What a budget asks for comes on top, as far as other meshes with as many ``model`` ranks have shown it, and what
        does not fit of parameters and states goes to the host and back.
        """
        mesh, floor = request.mesh, self._floor(request)
        alone = self._alone.get(mesh.model)
        if alone is None:
            alone = self._alone[mesh.model] = self._kept(self._on(Mesh(model=mesh.model))).all
        limit, given_up = self._outcome(mesh).limit_bytes, 0.0
        for shown, held_bytes in self._given_up.get((mesh.model, mesh.shard > 1), ()):
            peak = shown.keeping.peak_bytes + floor.held_bytes - held_bytes
            within = shown.within(replace(shown.keeping, peak_bytes=peak), limit)
            given_up = max(given_up, within.computing - shown.keeping.computing)
        away_bytes = max(floor.held_bytes - limit, 0.0)
        path = self._request.machine.host.to_device
        return max(alone.computing + given_up, floor.busy_seconds, away_bytes / path.bandwidth)

    def _giving_up(self, request: Request, numbers: StepTotals, limit: int) -> GivingUp:
        """What layers give up for ``limit``, as another mesh has shown it that has to free about as much, or this one;
        ``numbers``: what it takes otherwise."""
        mesh = request.mesh
        known = self._given_up.setdefault((mesh.model, mesh.shard > 1), [])
        for shown, _ in known:
            if shown.reaches(numbers, limit):
                return shown
        own = self._short.giving_up(request, self._captures_of(request), self._kept(request), limit)
        known.append((own, self._floor(request).held_bytes))
        return own

    def _floor(self, request: Request) -> Floor:
        if request.mesh not in self._floors:
            self._floors[request.mesh] = self._short.floor(request, self._captures_of(request))
        return self._floors[request.mesh]

    def _captures_of(self, request: Request) -> Short[Captures]:
        """The short steps as one rank of the model axis runs them: the same for all meshes with as many there."""
        model = request.mesh.model
        if model not in self._shared:
            request = self._on(Mesh(shard=self._num_ranks // model, model=model))
            try:
                parts = self._short.parts(shardings_of(request, self._captures))
                self._shared[model] = parts.each(lambda part: shared_as(request, *part))
            except ZeroFXError as error:
                self._shared[model] = error
        shared = self._shared[model]
        if isinstance(shared, ZeroFXError):
            raise shared
        return shared

    def _kept(self, request: Request) -> WhenKept:
        if request.mesh not in self._keeping:
            self._keeping[request.mesh] = self._short.keeping(request, self._captures_of(request))
        return self._keeping[request.mesh]


def captured_samples(request: Request) -> int:
    """Samples of the batch that a rank is given; 1 where it has none that could be counted."""
    try:
        return request.batch.size()
    except UsageError:
        return 1
