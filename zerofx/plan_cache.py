"""Plans kept on disk: what a search has found for equal graph, layout, optimizer, machine and options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields

from zerofx.buckets import BucketLayout
from zerofx.codegen.kernels.table import kernels_in_use
from zerofx.disk_cache import DiskCache, key_of
from zerofx.graph import StepGraph
from zerofx.optimizers import UpdateProgram
from zerofx.options import CompileOptions
from zerofx.scheduler.machine import Machine
from zerofx.settings import Settings
from zerofx.stamp import canonical

# What a plan does not depend on, or depends on through the graph, the layout or the budget in bytes.
_ELSEWHERE = frozenset({"loss_fn", "machine", "plan", "max_shapes", "weights", "policy", "tile"})


def kept_plan(
    captured: StepGraph,
    layout: BucketLayout,
    programs: Mapping[int, UpdateProgram],
    machine: Machine,
    options: CompileOptions,
    settings: Settings,
    memory_budget: int | None,
    search: Callable[[], str],
) -> str:
    """The JSON of the plan that ``search`` gives, or that it gave in an earlier run for the same question.

    ``memory_budget`` is in bytes. What raises is not kept.
    """
    cache = DiskCache(settings.cache_dir)
    # Without a search a plan is made in less time than is needed to find one; other micro-batches are other graphs.
    searched = memory_budget is not None or options.recompute == "full" or options.wire != "exact"
    if cache.folder is None or not searched or options.accumulate == "auto":
        return search()
    policy = options.policy
    parts = (
        captured.text(), canonical(captured.graph), str(captured.device), repr(captured.parameters),
        repr(sorted(captured.units)), repr((captured.mutation_names, captured.gradient_names, captured.slices)),
        repr(layout), repr(machine), repr(memory_budget), repr(sorted(settings.disable)),
        repr(sorted(kernels_in_use(settings.kernels, captured.device))),
        *(f"{one.name}: {getattr(options, one.name)!r}" for one in fields(options) if one.name not in _ELSEWHERE),
        _mapping_text(options.tile), str(policy.prefetch), _mapping_text(policy.keep),
        *(f"{index}: {_program_text(program)}" for index, program in sorted(programs.items())),
    )  # fmt: skip
    key = key_of("plan", parts)
    text = cache.read(key)
    if text is None:
        text = search()
        cache.write(key, text)
    return text


def _mapping_text(given: Collection[str] | Mapping[str, object]) -> str:
    """A text that does not depend on the order of a set; that of a mapping counts."""
    if isinstance(given, str):
        return given
    return repr(list(given.items()) if isinstance(given, Mapping) else sorted(given))


def _program_text(program: UpdateProgram) -> str:
    state = sorted(program.state_before), sorted(program.state_after), program.tensor_scalars, program.num_scalars
    return f"{program.optimizer} {program.dtype} {program.fused} {program.first_step_only} {state}\n" + "\n".join(
        map(str, (program.states, program.scalar_states, program.host_source, program.graph))
    )
