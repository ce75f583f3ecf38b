"""Gather weights as what their products read: casts to fp8, of one byte for each element.

    gather_0 = all_gather(shard_0)          |   of_part = fp8_slice_largest(shard_0, 0, "rows")
    full_0 = wait(gather_0)                 |   scales = fp8_scale(wait(all_reduce_values(of_part, "max")), ..)
    w = as_strided(full_0, [4, 8], ...)     |   low_0 = fp8_slice_cast(shard_0, scales, 0, "rows")
    s = fp8_scale(t(w), .., 0, True)        |   gather_0 = all_gather(low_0)                    # bytes
    w_8 = fp8_cast(t(w), s, ..)             |   full_0 = wait(gather_0, low_0)
                                            |   w_8 = t(as_strided(full_0, [4, 8], ...))
                                            |   s = view(slice(scales, 0, ..), [1, 4])

A weight is cast once a step into this rank's slice, for forward and, with scales along its other dimension, again for
backward: whatever gathers ask for a cast, and for all micro-batches. Scales are of whole weights: ranks compare their
largest magnitudes, of all buckets in one collective, where the step begins. So every bit is that of a cast of what is
gathered. A factor that is to lie by columns, and does not as it is gathered, is copied in fp8.

Runs after all other passes but those about where parts lie: everything stays where those have put it.

Does not handle: buckets of which anything else is read than casts of one kind, slices in a slower tier, or whose
update runs on into the next step, gathers that start together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.aliasing import is_view, storage_source
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.edit import consumers, insert_call
from zerofx.ir.facts import DEVICE, Job, Origin, Phase, origin, set_value, task_of, tensor, tier_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.fp8_slices import Scaled, first_scale, num_scales
from zerofx.ir.streams import axes_text, slice_gathered
from zerofx.scheduler.plan.mesh import Axes
from zerofx.scheduler.plan.plan import Plan

_aten = torch.ops.aten
_AT_START = Origin("", Phase.FORWARD)


@dataclass(frozen=True)
class CastGathers:
    """Gather weights as what their products read: casts to fp8, of one byte for each element."""

    layout: BucketLayout
    name: str = "cast_gathers"

    def run(self, step: StepGraph, plan: Plan) -> None:
        kinds = gathers_of_casts(step, self.layout)
        asked = [number for number, decision in enumerate(plan.gathers) if decision.in_fp8]
        if not kinds.keys() >= set(asked):
            raise PlanError(
                f"expected buckets of which casts to fp8 alone are read where they are gathered so, found others in "
                f"gathers {sorted(set(asked) - kinds.keys())}; make the plan anew"
            )
        scales = _add_scales(step, self.layout, list(dict.fromkeys(_key(*kinds[number]) for number in asked)), kinds)
        low: dict[tuple[int, Scaled], fx.Node] = {}
        for number in sorted(asked, key=lambda number: kinds[number][0]):
            gather, scaled, _ = kinds[number]
            bucket, key = self.layout.buckets[_bucket_of(gather)], _key(*kinds[number])
            if key not in low:
                shard = slice_gathered(gather)
                with step.graph.inserting_before(gather):
                    args = (shard, scales[key][0], bucket.index, scaled, scales[key][1])
                    over = {"over": axes_text(bucket.gathered_over)}
                    low[key] = insert_call(step.graph, ops.fp8_slice_cast, args, origin(gather), over)
            _gather_casts(step, bucket, gather, low[key], scales[key], scaled)


GatherOfCasts = tuple[fx.Node, Scaled, bool]
"""A gather, what has one scale of its weights, and whether scales are powers of two."""
Scales = tuple[fx.Node, int]
"""Scales of several buckets, and the first of one of these among them."""


def gathers_of_casts(step: StepGraph, layout: BucketLayout) -> dict[int, GatherOfCasts]:
    """Those gathers of the plan, by number, that casts of one kind are read of, and nothing else."""
    gathers = {}
    late = {node.args[0] for node in step.calls() if node.target in (ops.settle, ops.run_on)}
    for node in step.calls():
        task = task_of(node) if node.target is ops.all_gather else None
        if task is None or task.job is not Job.GATHER or len(node.args) > 3:
            continue
        shard, bucket = node.args[0], layout.buckets[_bucket_of(node)]
        is_here = isinstance(shard, fx.Node) and shard.op == "placeholder" and tier_of(shard) == DEVICE
        is_here &= bucket.index not in late
        are_matrices = all(slot.whole is None and slot.stride == (slot.shape[-1], 1) for slot in bucket.slots)
        kinds = _kinds_of_casts(next(iter(node.users))) if is_here and are_matrices else set()
        if len(kinds) == 1 and None not in kinds:
            ((scaled, power_of_two),) = (kind for kind in kinds if kind is not None)
            gathers[task.index] = (node, scaled, power_of_two)
    return gathers


def _key(gather: fx.Node, scaled: Scaled, _power_of_two: bool) -> tuple[int, Scaled]:
    return _bucket_of(gather), scaled


def _bucket_of(gather: fx.Node) -> int:
    index = gather.args[1]
    assert isinstance(index, int)
    return index


def _kinds_of_casts(source: fx.Node) -> set[tuple[Scaled, bool] | None]:
    """The kinds of casts that are read of a gathered bucket, by what has one scale; None among them for all else."""
    kinds: set[tuple[Scaled, bool] | None] = set()
    for reader in source.users:
        if is_view(reader):
            kinds |= _kinds_of_casts(reader)
        elif reader.target is ops.fp8_cast and reader.args[0] is source:
            kinds.add(_kind_of_cast(reader))
        elif reader.target not in (ops.release, ops.fp8_scale):
            kinds.add(None)
    return kinds


def _kind_of_cast(cast: fx.Node) -> tuple[Scaled, bool] | None:
    factor, scale, dtype, _ = cast.args
    assert isinstance(factor, fx.Node) and isinstance(scale, fx.Node)
    if scale.target is not ops.fp8_scale or dtype is not torch.float8_e4m3fn:
        return None
    of, _, dim, power_of_two = scale.args
    assert isinstance(of, fx.Node)
    if storage_source(of)[0].target is not ops.all_gather:  # of what ranks of the model axis have
        return None
    if dim is None:
        return "whole", bool(power_of_two)
    assert isinstance(dim, int)
    return "rows" if tensor(factor).stride(dim) == 1 else "columns", bool(power_of_two)


def _add_scales(
    step: StepGraph, layout: BucketLayout, keys: Sequence[tuple[int, Scaled]], kinds: dict[int, GatherOfCasts]
) -> dict[tuple[int, Scaled], Scales]:
    """The scales of buckets, of all ranks, where the step begins."""
    power_of_two = {_key(*kind): kind[2] for kind in kinds.values()}
    shards = {_bucket_of(gather): slice_gathered(gather) for gather, _, _ in kinds.values()}
    along: dict[tuple[Axes, bool], list[tuple[int, Scaled]]] = {}
    for key in keys:
        along.setdefault((layout.buckets[key[0]].gathered_over, power_of_two[key]), []).append(key)
    scales: dict[tuple[int, Scaled], Scales] = {}
    with step.graph.inserting_before(step.last_placeholder().next):

        def call(target: object, *args: object, **kwargs: object) -> fx.Node:
            return insert_call(step.graph, target, args, _AT_START, kwargs)

        for (axes, is_power), of_axes in along.items():
            sizes = [sum(num_scales(s, scaled) for s in layout.buckets[index].slots) for index, scaled in of_axes]
            largest = [
                call(ops.fp8_slice_largest, shards[index], index, scaled, size, over=axes_text(axes))
                for (index, scaled), size in zip(of_axes, sizes, strict=True)
            ]
            every = call(_aten.cat.default, largest) if len(largest) > 1 else largest[0]
            pending = call(ops.all_reduce_values, every, "max", layout.mesh.size(axes), over=axes_text(axes))
            known = call(ops.wait, pending, every)
            each = call(ops.fp8_scale, known, torch.float8_e4m3fn, 1, is_power)
            begin = 0
            for key, size in zip(of_axes, sizes, strict=True):
                scales[key] = each, begin
                begin += size
    return scales


def _gather_casts(
    step: StepGraph, bucket: Bucket, gather: fx.Node, low: fx.Node, scales: Scales, scaled: Scaled
) -> None:
    """Let a gather send a cast, and its readers read it."""
    (full,) = (user for user in gather.users if user.target is ops.wait)
    gather.args = (low, *gather.args[1:])
    full.args = (gather, low)
    fake = step.fake((bucket.numel,), torch.float8_e4m3fn)
    set_value(gather, fake)
    set_value(full, fake)
    for view in [user for user in full.users if user.target is _aten.as_strided.default]:
        slot = next(slot for slot in bucket.slots if slot.offset == view.args[3])
        set_value(view, step.fake_view(full, slot.shape, slot.stride, slot.offset))
        first = scales[1] + first_scale(bucket.slots, slot.name, scaled)
        _read_casts(step.graph, view, (scales[0], first, first + num_scales(slot, scaled)))
    release = next(user for user in full.users if user.target is ops.release)
    last = max(consumers(full))
    if last is not release:
        last.append(release)


def _read_casts(graph: fx.Graph, view: fx.Node, scales: tuple[fx.Node, int, int]) -> None:
    for reader in list(view.users):
        if is_view(reader):
            args, kwargs = fx.map_arg((reader.args, reader.kwargs), tensor)
            set_value(reader, reader.target(*args, **kwargs))  # type: ignore[operator]  # a view is a call
            _read_casts(graph, reader, scales)
            continue
        if reader.target not in (ops.fp8_scale, ops.fp8_cast):
            continue
        where, shape = origin(reader), list(tensor(reader).shape)
        with graph.inserting_before(reader):
            if reader.target is ops.fp8_scale:
                own = insert_call(graph, _aten.slice.Tensor, (scales[0], 0, *scales[1:]), where)
                known = insert_call(graph, _aten.view.default, (own, shape), where)
            elif tensor(view).stride() == tensor(reader).stride():
                known = view
            else:
                turned = insert_call(graph, _aten.t.default, (view,), where)
                kinds = {"memory_format": torch.contiguous_format}
                turned = insert_call(graph, _aten.clone.default, (turned,), where, kinds)
                known = insert_call(graph, _aten.t.default, (turned,), where)
        reader.replace_all_uses_with(known)
        graph.erase_node(reader)
