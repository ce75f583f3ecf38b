"""Division of a model's parameters into buckets, and the place of each in its bucket's buffer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypedDict, Unpack

import torch

from zerofx.ir.buckets import ALIGNMENT_BYTES, Bucket, BucketLayout, Slot
from zerofx.ir.facts import Role, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.ir.parameters import ParameterInfo
from zerofx.scheduler.plan.facts import unit_of
from zerofx.scheduler.plan.mesh import MODEL, SHARD, Mesh


class LayoutOptions(TypedDict, total=False):
    """Options of ``make_layout``."""

    block: int
    in_parts: bool
    reduce_dtype: torch.dtype | None
    state_dtype: torch.dtype | None
    histories: Mapping[str, str]


def layout_of(
    step: StepGraph, groups: Mapping[str, int], mesh: Mesh, *, casts_apart: bool = False,
    **options: Unpack[LayoutOptions],
) -> BucketLayout:  # fmt: skip
    """The buckets of a captured graph's own parameters; other arguments as for ``make_layout``.

    ``casts_apart``: weights with the same of their products in fp8 have buckets of their own.
    """
    if casts_apart:
        histories = defaultdict[str, str](str, options.get("histories", {}))
        for product in step.products:
            histories[product.weight] += f", {product.gives} in fp8" if product.in_fp8 else ""
        options = {**options, "histories": histories}
    order = step.positions()
    first_use = {
        placeholder(node).name: min(order[user] for user in node.users)
        for node in step.placeholders(Role.PARAMETER)
        if node.users
    }
    return make_layout(
        [info for info in step.parameters if not info.lent], groups, step.units, first_use, mesh, **options
    )


def make_layout(
    parameters: Sequence[ParameterInfo],
    groups: Mapping[str, int],
    units: Iterable[str],
    first_use: Mapping[str, int],
    mesh: Mesh,
    *,
    block: int = 1,
    in_parts: bool = True,
    reduce_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    histories: Mapping[str, str] = MappingProxyType({}),
) -> BucketLayout:
    """Divide parameters into buckets.

    Args:
        parameters: the model's distinct parameters in registration order.
        groups: param-group index of each trained parameter, by name.
        units: repeated layers (see ``zerofx.capture.layers``).
        first_use: position in the graph of each parameter's first use; parameters that are never used are absent.
        mesh: the ranks that slices are for.
        block: slices are a multiple of this many elements: what is quantised together must not cross a slice.
        in_parts: whether replicas update parts of slices each, or all of them the whole.
        reduce_dtype: what floating-point gradients are reduced in; None for what they are computed in.
        state_dtype: what optimizer states are stored in where that is smaller than the parameters'; None for what the
            optimizer has them in.
        histories: what tells parameters whose states began at other steps from each other, by name.

    A parameter outside all units goes with its neighbours in time: those that are first used between the same two
    units share a bucket, so that an embedding and a head are not held together. A slice has a bucket of its own.
    """
    units = frozenset(units)
    unit_starts = sorted(_first_use_of_units(parameters, units, first_use).values())
    members: dict[tuple[str, int, int | None, torch.dtype, torch.dtype, str, bool, str], list[ParameterInfo]] = {}
    for info in parameters:
        unit = unit_of(info.name, units)
        gap = -1
        if not unit:
            position = first_use.get(info.name)
            gap = len(unit_starts) + 1 if position is None else sum(start <= position for start in unit_starts)
        of_slice = info.name if info.whole is not None else ""
        on_model = info.part is not None
        history = histories.get(info.source, "")
        key = (unit, gap, groups.get(info.source), info.dtype, info.compute_dtype, of_slice, on_model, history)
        members.setdefault(key, []).append(info)
    order = sorted(members, key=lambda key: min(first_use.get(p.name, math.inf) for p in members[key]))
    buckets, crossed = [], mesh.axes_in_use(("replicate",))
    for index, key in enumerate(order):
        unit, gap, group, dtype, compute_dtype, of_slice, on_model, _ = key
        # Ranks of the model axis share what they all have of parameters as those of the shard axis do.
        gathered = mesh.collective_axes(SHARD if on_model else (*SHARD, *MODEL))
        slots, shard_numel = _place(members[key], compute_dtype, mesh.size(gathered), mesh.size(crossed), block)
        name = of_slice or unit or _common_name([p.name for p in members[key]])
        unit = of_slice or unit or f"loose.{gap}"
        reduced = compute_dtype if reduce_dtype is None or not compute_dtype.is_floating_point else reduce_dtype
        stored = dtype if state_dtype is None else _smaller(state_dtype, dtype, slots)
        buckets.append(
            Bucket(
                index, name, unit, group, dtype, compute_dtype, reduced, stored, slots, shard_numel, mesh,
                gathered, (*gathered, *crossed) if in_parts else gathered, crossed,
            )
        )  # fmt: skip
    return BucketLayout(tuple(buckets), mesh)


def _smaller(state_dtype: torch.dtype, dtype: torch.dtype, slots: Sequence[Slot]) -> torch.dtype:
    """The dtype in which states of parameters of ``dtype`` are stored. Complex numbers have no dtype of so few bits."""
    is_smaller = dtype.is_floating_point and state_dtype.itemsize < dtype.itemsize
    return state_dtype if is_smaller and not any(slot.is_complex for slot in slots) else dtype


def _first_use_of_units(
    parameters: Sequence[ParameterInfo], units: frozenset[str], first_use: Mapping[str, int]
) -> dict[str, int]:
    starts: dict[str, int] = {}
    for info in parameters:
        unit = unit_of(info.name, units)
        if unit and info.name in first_use:
            starts[unit] = min(starts.get(unit, first_use[info.name]), first_use[info.name])
    return starts


def _place(
    parameters: Sequence[ParameterInfo], compute_dtype: torch.dtype, num_slices: int, num_parts: int, block: int
) -> tuple[tuple[Slot, ...], int]:
    """Slots in order, and the elements of a slice of ``num_parts`` parts."""
    align = ALIGNMENT_BYTES // compute_dtype.itemsize
    slots, offset = [], 0
    for info in parameters:
        slots.append(
            Slot(
                info.name, info.shape, _dense_stride(info), offset, info.numel, info.whole, info.first_row,
                info.is_complex, info.part, info.num_parts,
            )
        )  # fmt: skip
        offset += _round_up(info.numel, align)
    # Parameters without elements have a bucket with some: a tensor of none is an exception wherever it goes.
    part = _round_up(max(1, -(-offset // (num_slices * num_parts))), math.lcm(align, block))
    return tuple(slots), part * num_parts


def _dense_stride(info: ParameterInfo) -> tuple[int, ...]:
    """The parameter's own stride where it fills its memory without gaps (channels-last), else the contiguous one."""
    expected, dims = 1, sorted(range(len(info.shape)), key=lambda d: (info.stride[d], info.shape[d]))
    for dim in dims:
        if info.shape[dim] != 1 and info.stride[dim] != expected:
            return tuple(torch.empty(info.shape, device="meta").stride())
        expected *= info.shape[dim]
    return info.stride


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _common_name(names: Sequence[str]) -> str:
    """A short name for loose parameters: the modules that own them."""
    owners = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    return "+".join(owners[:2]) + (f"+{len(owners) - 2} more" if len(owners) > 2 else "")
