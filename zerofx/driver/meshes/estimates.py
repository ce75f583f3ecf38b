"""Estimates of a step's cost on each mesh, and lower bounds, from a few of its layers.

A mesh is planned and simulated with a few of the layers (``short_steps.py``), which determines the cost of all of them,
within a memory budget too. Results that do not depend on the layout of ranks along ``replicate`` and ``shard`` are
found once for each number of ``model`` ranks: how they share the computation, and the time of one such group by itself.
A mesh whose parameters and states alone exceed the memory, or whose computation or links are busy longer than another
mesh takes, is skipped on these grounds.

On a mesh with an axis ``pipe`` a few layers are cut into stages (``short_stages.py``).
"""

from __future__ import annotations

import math
from dataclasses import replace

from zerofx.budgets import budget_bytes, tiers_for
from zerofx.driver.captures import Captures
from zerofx.driver.meshes.short_stages import ShortStages, StepInStages
from zerofx.driver.meshes.short_steps import Floor, Savings, Short, ShortSteps, StepTotals, Unlimited
from zerofx.driver.prepared import Request
from zerofx.driver.shardings import shardings_of, share_one_rank
from zerofx.errors import UsageError, ZeroFXError
from zerofx.report.meshes import MeshOutcome
from zerofx.scheduler.cost.stages import least_pipeline_seconds
from zerofx.scheduler.cost.wire_volume import ACROSS, WITHIN
from zerofx.scheduler.plan.mesh import Mesh

_FORWARD = 0.25  # of the seconds of forward and backward, that forward takes at least


class Estimates:
    """Estimates of the step of ``request``, which has no mesh yet, on meshes of ``num_ranks`` ranks."""

    def __init__(self, request: Request, captures: Captures, num_ranks: int, *, on_cpu: bool) -> None:
        self.verbose = request.verbose
        machine = request.machine.for_ranks(num_ranks)
        self._request = replace(request, machine=machine, verbose=False)
        self._captures, self._num_ranks = captures, num_ranks
        self._short = ShortSteps(self._request, captures, on_cpu=on_cpu)
        self._shared: dict[int, Short[Captures] | ZeroFXError] = {}
        self._alone: dict[int, StepTotals] = {}
        self._keeping: dict[Mesh, Unlimited] = {}
        self._given_up: dict[tuple[int, bool], list[tuple[Savings, float]]] = {}
        self._floors: dict[Mesh, Floor] = {}
        self._unfit: dict[tuple[int, int], int] = {}

    def estimate(self, mesh: Mesh, fastest: float | None = None) -> MeshOutcome:
        """The cost of a step on ``mesh``, or the reason why it cannot run there.

        A lower bound, if parameters and states alone need more memory than there is, or a sample takes at least
        ``fastest`` seconds. With None the step is always simulated.
        """
        outcome, request = self._outcome(mesh), self._request_on(mesh)
        limit = outcome.limit_bytes
        budget = limit if request.options.memory_budget is not None else None
        try:
            if fastest is not None:
                shown = self._bound_by_fewer(mesh)
                if shown >= fastest:
                    return replace(outcome, is_least=True, step_seconds=shown * outcome.num_samples)
                held = max(round(self._floor(request).held_bytes / mesh.pipe) - self._offload_bytes, 0)
                seconds = self._least(request)
                least = replace(outcome, is_least=True, peak_bytes=held, step_seconds=seconds)
                if held > limit or least.seconds_per_sample >= fastest:
                    return least
                if mesh.pipe > 1 and (mesh.pipe, mesh.model) in self._unfit:  # with whole slices, which hold least
                    return replace(least, peak_bytes=self._unfit[mesh.pipe, mesh.model])
            numbers: StepTotals | StepInStages
            if mesh.pipe > 1:
                stages = ShortStages.of(self._short, request, self._captures_of(request).few)
                slowest = math.inf if fastest is None else fastest * outcome.num_samples
                if (seconds := stages.least_seconds(slowest)) >= slowest:
                    return replace(outcome, is_least=True, step_seconds=seconds)
                numbers = stages.simulate(budget, slowest)
                if budget is not None and numbers.peak_bytes > budget and numbers.step_seconds >= slowest:
                    return replace(outcome, is_least=True, step_seconds=numbers.step_seconds)
                if numbers.peak_bytes > limit and mesh.replicate == 1:
                    self._unfit[mesh.pipe, mesh.model] = round(numbers.peak_bytes)
            else:
                numbers = self._simulate_unlimited(request).all
                if budget is not None and numbers.peak_bytes > budget:
                    numbers = self._memory_savings(request, numbers, budget).apply(numbers, budget)
        except ZeroFXError as error:
            return replace(outcome, trouble=str(error))
        return replace(
            outcome, peak_bytes=round(numbers.peak_bytes), step_seconds=numbers.step_seconds,
            exposed_seconds=max(numbers.exposed_seconds, 0.0),  # read from a few layers, less than nothing is none
            wire_bytes={WITHIN: round(numbers.within), ACROSS: round(numbers.across)},
        )  # fmt: skip

    def least_seconds(self, mesh: Mesh, fastest: float) -> float:
        """A lower bound of the seconds per sample on ``mesh``, of all ranks together; 0 if it cannot run.

        A bound of ``fastest`` or more is not refined.
        """
        shown = self._bound_by_fewer(mesh)
        try:
            return shown if shown >= fastest else self._least(self._request_on(mesh)) / self._outcome(mesh).num_samples
        except ZeroFXError:
            return 0.0

    def _bound_by_fewer(self, mesh: Mesh) -> float:
        """A lower bound of the seconds per sample, from groups of fewer ``model`` ranks.

        Let a group of m ranks compute c(m) seconds for its batch. m ranks can emulate 2m with twice the work each and
        less traffic, so c(m) <= 2 c(2m). There are half as many groups of 2m ranks, and so half as many samples at a
        time, each of which takes no less than with groups of m.
        """
        seconds = [
            numbers.computing / self._outcome(Mesh(shard=self._num_ranks // model, model=model)).num_samples
            for model, numbers in self._alone.items()
            if mesh.model > model and mesh.model % model == 0
        ]
        return max(seconds, default=0.0)

    @property
    def _offload_bytes(self) -> int:
        """The bytes that a rank may hold off its device."""
        options, machine = self._request.options, self._request.machine
        tiers = tiers_for(options.offload, machine) if options.memory_budget is not None else ()
        share = {"host": machine.host_bytes_per_rank, "nvme": machine.nvme_bytes_per_rank}
        return sum(share[tier] for tier in tiers)

    def _outcome(self, mesh: Mesh) -> MeshOutcome:
        machine = self._request.machine
        budget = budget_bytes(self._request.options.memory_budget, machine)
        limit = machine.device.memory_bytes if budget is None else budget
        return MeshOutcome(mesh, count_samples(self._request) * mesh.num_batches, limit_bytes=limit)

    def _request_on(self, mesh: Mesh) -> Request:
        return replace(self._request, mesh=mesh)

    def _least(self, request: Request) -> float:
        """A lower bound of the step's seconds on the mesh: one group computes as long by itself, and links are busy.

        The cost of a budget is added as far as other meshes with as many ``model`` ranks have shown it, and parameters
        and states that do not fit go to the host and back.
        """
        mesh = request.mesh
        alone = self._alone.get(mesh.model)
        if alone is None:
            alone = self._alone[mesh.model] = self._simulate_unlimited(self._request_on(Mesh(model=mesh.model))).all
        if mesh.pipe > 1:
            idle = _FORWARD if request.options.order == "auto" else 1.0
            num = self._captures.candidates[0]
            return least_pipeline_seconds(alone.computing / num, idle, mesh.pipe, num)
        floor = self._floor(request)
        limit, given_up = self._outcome(mesh).limit_bytes, 0.0
        for shown, held_bytes in self._given_up.get((mesh.model, mesh.shard > 1), ()):
            peak = shown.keeping.peak_bytes + floor.held_bytes - held_bytes
            within = shown.apply(replace(shown.keeping, peak_bytes=peak), limit)
            given_up = max(given_up, within.computing - shown.keeping.computing)
        away_bytes = max(floor.held_bytes - limit, 0.0)
        path = self._request.machine.host.to_device
        return max(alone.computing + given_up, floor.busy_seconds, away_bytes / path.bandwidth)

    def _memory_savings(self, request: Request, numbers: StepTotals, limit: int) -> Savings:
        """The savings of layers for ``limit``, as shown by another mesh that has to free about as much, or by this one;
        ``numbers``: its totals without a limit."""
        mesh = request.mesh
        known = self._given_up.setdefault((mesh.model, mesh.shard > 1), [])
        for shown, _ in known:
            if shown.reaches(numbers, limit):
                return shown
        own = self._short.find_savings(request, self._captures_of(request), self._simulate_unlimited(request), limit)
        known.append((own, self._floor(request).held_bytes))
        return own

    def _floor(self, request: Request) -> Floor:
        """Of all stages together, where there are some."""
        request = self._request_on(replace(request.mesh, pipe=1))
        if request.mesh not in self._floors:
            self._floors[request.mesh] = self._short.floor(request, self._captures_of(request))
        return self._floors[request.mesh]

    def _captures_of(self, request: Request) -> Short[Captures]:
        """The short steps as one rank of the model axis runs them: the same for all meshes with as many ranks there."""
        model = request.mesh.model
        if model not in self._shared:
            request = self._request_on(Mesh(shard=self._num_ranks // model, model=model))
            try:
                parts = self._short.parts(shardings_of(request, self._captures))
                self._shared[model] = parts.each(lambda part: share_one_rank(request, *part))
            except ZeroFXError as error:
                self._shared[model] = error
        shared = self._shared[model]
        if isinstance(shared, ZeroFXError):
            raise shared
        return shared

    def _simulate_unlimited(self, request: Request) -> Unlimited:
        if request.mesh not in self._keeping:
            self._keeping[request.mesh] = self._short.simulate_unlimited(request, self._captures_of(request))
        return self._keeping[request.mesh]


def count_samples(request: Request) -> int:
    """The samples of the batch that a rank is given; 1 if they cannot be counted."""
    try:
        return request.batch.size()
    except UsageError:
        return 1
