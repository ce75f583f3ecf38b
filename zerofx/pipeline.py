"""The ordered list of passes, and the loop that runs, verifies and reports them."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from zerofx.codegen.kernels.table import check_kernels
from zerofx.errors import UsageError, working
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.optimizers import UpdateProgram
from zerofx.passes.base import Pass, PassReport, op_counts
from zerofx.passes.buffers import Buffers
from zerofx.passes.clip import Clip
from zerofx.passes.direct import Direct
from zerofx.passes.divide import Divide
from zerofx.passes.gather import Gather
from zerofx.passes.gradients import Gradients
from zerofx.passes.guard_loss import GuardLoss
from zerofx.passes.in_place import InPlace
from zerofx.passes.merge import Merge
from zerofx.passes.offload import Offload
from zerofx.passes.prefetch import Prefetch
from zerofx.passes.recompute import Recompute
from zerofx.passes.reduce import Reduce
from zerofx.passes.shard import Shard
from zerofx.passes.tile import Tile
from zerofx.passes.update import Update
from zerofx.passes.verify import verify
from zerofx.passes.wire.gathers import QuantiseGathers
from zerofx.passes.wire.reductions import QuantiseReductions
from zerofx.scheduler.cost.liveness import liveness
from zerofx.scheduler.plan.plan import Plan
from zerofx.settings import Settings
from zerofx.units import format_bytes, format_seconds

_OPTIONAL = frozenset({"prefetch", "in_place"})


def passes(
    layout: BucketLayout, programs: Mapping[int, UpdateProgram], plan: Plan, *, guarded: bool = False
) -> tuple[Pass, ...]:
    """Every pass, in order; ``guarded`` as the step's graph is."""
    return (
        Tile(),  # output layer and loss a few rows at a time
        *((Divide(),) if plan.pieces else ()),  # what is outside layers in pieces that are decided about one by one
        Recompute(),  # activations that are not kept, computed again in backward
        Offload(),  # activations that wait for backward in a slower tier
        Shard(layout),  # parameters become views of flat buckets
        *((Gather(layout),) if plan.has_residencies else ()),  # a gather before first use, a release after last
        Reduce(layout),  # gradients into flat buffers, reduced as soon as complete
        Direct(),  # products written straight into those buffers
        *((Gradients(layout),) if plan.gradients else ()),  # gradients that wait for the next micro-batch elsewhere
        *((Clip(layout),) if plan.max_grad_norm is not None else ()),  # the norm of all gradients, and a factor
        Update(layout, programs),  # the optimizer, on each bucket as soon as it is reduced
        Buffers(),  # mutated buffers written back
        Prefetch(),  # gathers issued ahead of their use
        *((Merge(),) if any(gather.merged for gather in plan.gathers) else ()),  # several gathers as one collective
        # what is not sent exactly as it is: in few bits, or from second shards on each node
        *((QuantiseGathers(layout), QuantiseReductions(layout)) if plan.wires else ()),
        *((GuardLoss(),) if guarded else ()),  # no update where a loss is not finite, if that is asked for
        *((InPlace(),) if plan.gathers and plan.num_ranks > 1 else ()),  # gathers that ranks of one host need not copy
    )


@dataclass(frozen=True)
class Stage:
    """The graph as text after one pass, and what the pass did (None for the captured graph)."""

    name: str
    text: str
    report: PassReport | None

    def __str__(self) -> str:
        return f"# after {self.name}\n{self.text}"


def check_disabled(settings: Settings) -> None:
    """Check the names in ``ZEROFX_DISABLE`` and ``ZEROFX_KERNELS``.

    Raises:
        UsageError: one of them is no pass that can be left out, or no kernel.
    """
    check_kernels(settings.kernels)
    allowed = _OPTIONAL | {"simplify", "stamp"}
    unknown = settings.disable - allowed
    if unknown:
        raise UsageError(
            f"expected ZEROFX_DISABLE to name passes that can be left out ({', '.join(sorted(allowed))}), found "
            f"{', '.join(sorted(unknown))}"
        )


def run_passes(
    step: StepGraph,
    plan: Plan,
    layout: BucketLayout,
    programs: Mapping[int, UpdateProgram],
    settings: Settings,
    *,
    on_cpu: bool,
    talk: bool,
) -> tuple[Stage, ...]:
    """Run all passes on ``step`` in place; returns the captured graph and the graph after each pass.

    ``talk``: whether this rank writes what ``ZEROFX_DEBUG`` asks for.
    """
    stages = [Stage("capture", step.text(), None)]
    peak, before = liveness(step, on_cpu).peak_bytes, op_counts(step)
    listed = [p for p in passes(layout, programs, plan, guarded=step.guarded) if p.name not in settings.disable]
    for number, one in enumerate(listed):
        began = time.perf_counter()
        _run(one, step, plan)
        seconds = time.perf_counter() - began
        last = number == len(listed) - 1
        if settings.verify == 2 or (settings.verify == 1 and last):
            verify(step, one.name, plan if last else None)
        counts, text = op_counts(step), step.text()
        # Most passes have nothing to do in most plans: what holds for a graph holds for its equal.
        after = peak if text == stages[-1].text else liveness(step, on_cpu).peak_bytes
        report = PassReport(one.name, dict(counts - before), dict(before - counts), peak, after, seconds)
        stages.append(Stage(one.name, text, report))
        peak, before = after, counts
        if talk and settings.debug:
            _say(report, settings.debug)
    if talk and settings.debug >= 5:
        sys.stderr.write("\n\n".join(map(str, stages)) + "\n")
    return tuple(stages)


def run_quietly(
    step: StepGraph,
    plan: Plan,
    layout: BucketLayout,
    programs: Mapping[int, UpdateProgram],
    settings: Settings,
    done: Collection[str] = (),
) -> None:
    """Run all passes but those ``done`` on ``step`` in place, and nothing else: for a plan that is only tried."""
    for one in passes(layout, programs, plan, guarded=step.guarded):
        if one.name not in settings.disable and one.name not in done:
            _run(one, step, plan)


def _run(one: Pass, step: StepGraph, plan: Plan) -> None:
    """Run a pass.

    Raises:
        InternalError: it raised what it did not mean to; says how to leave it out, if that can be.
    """
    remedy = f"Set ZEROFX_DISABLE={one.name}, which leaves it out" if one.name in _OPTIONAL else ""
    with working(f"run the pass {one.name}", remedy, only_own=False):
        one.run(step, plan)


def _say(report: PassReport, debug: int) -> None:
    sys.stderr.write(
        f"{report.name:10} peak {format_bytes(report.peak_bytes_before):>10} -> "
        f"{format_bytes(report.peak_bytes_after):>10}  in {format_seconds(report.seconds)}\n"
    )
    if debug >= 2:
        for sign, ops in (("+", report.added), ("-", report.removed)):
            sys.stderr.writelines(f"  {sign}{count} {op}\n" for op, count in sorted(ops.items()))
