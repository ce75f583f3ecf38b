"""Parameters that a rank owns whole, and the optimizer's states of them: one buffer of bytes a bucket, and the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofx.errors import OptimizerError
from zerofx.ir.buckets import Bucket, BucketLayout, Slot
from zerofx.ir.owners import OwnedSlot, Owners, assign_owners
from zerofx.optimizers.program import StateTensor, UpdateProgram, WholeParameter
from zerofx.optimizers.whole.states import split_tensors

Entry = Mapping[str, Any]


@dataclass
class OwnedStates:
    """The states of the parameters that this rank owns of a bucket: by parameter, without their tensors.

    ``waiting``: entries of ``optimizer.state`` by the names of parameters, owned here or not, that have no place yet.
    """

    trees: dict[str, Any] = field(default_factory=dict)
    waiting: dict[str, Entry] = field(default_factory=dict)

    def clear(self) -> None:
        self.trees.clear()
        self.waiting.clear()

    def settle(
        self, program: UpdateProgram, owned: Sequence[OwnedSlot], buffer: torch.Tensor | None, others: Iterable[Slot]
    ) -> None:
        """Give what waits its place in ``buffer``; ``others`` are parameters of other ranks."""
        if not self.waiting:
            return
        views = state_views(program, owned, buffer)
        self.trees = {
            each.slot.name: store_entry(
                each.slot.name, entry, views[each.slot.name], whole_of(program, each.slot), is_loaded=True
            )
            for each in owned
            if (entry := self.waiting.get(each.slot.source))
        }
        for slot in others if program.joint is not None else ():  # all ranks follow what is not in tensors
            if entry := self.waiting.get(slot.source):
                self.trees[slot.name] = split_tensors(entry)[0]
        self.waiting = {}


def shape_of(slot: Slot) -> tuple[int, ...]:
    """The shape of the parameter as the optimizer sees it."""
    return slot.whole_shape[:-1] if slot.is_complex else slot.whole_shape


def dtype_of(bucket: Bucket, slot: Slot) -> torch.dtype:
    """The dtype of the parameter as the optimizer sees it."""
    return bucket.dtype.to_complex() if slot.is_complex else bucket.dtype


def whole_of(program: UpdateProgram, slot: Slot) -> WholeParameter:
    """The update of the parameter in ``slot``."""
    return program.of_shape(shape_of(slot))


def owners_of(layout: BucketLayout, programs: Mapping[int, UpdateProgram], stage: int) -> dict[int, Owners]:
    """The owners of the parameters that are updated whole, by bucket."""
    buckets = [layout.buckets[index] for index in sorted(programs) if programs[index].whole]
    return assign_owners(buckets, stage, lambda bucket, slot: whole_of(programs[bucket.index], slot).flops)


@dataclass(frozen=True)
class OwnedSizes:
    """Sizes of the part of a bucket that an owner keeps between steps: elements of its parameters, where their values
    have a dtype of their own for the optimizer (``has_master``), and bytes of their states."""

    numel: int
    state_bytes: int
    has_master: bool

    @staticmethod
    def of(bucket: Bucket, program: UpdateProgram, owners: Owners, rank: int | None = None) -> OwnedSizes:
        """Those of ``rank`` among the owners; without it as many as any of them needs."""
        ranks = range(len(owners.ranks)) if rank is None else (rank,)
        numel = max(owners.numels[each] for each in ranks)
        return OwnedSizes(numel, max(state_bytes(program, owners.ranks[each]) for each in ranks), bucket.has_master)


def planned_sizes(
    layout: BucketLayout, programs: Mapping[int, UpdateProgram], owners: Mapping[int, Owners], away: Collection[int]
) -> dict[int, OwnedSizes]:
    """Sizes of the part of each bucket that a plan has on one rank between steps: on the device those of the rank that
    keeps most of all of them; in slower tiers, where ``away`` are, as much as any rank may have of one, for which the
    buffers that it passes through are made."""
    sizes: dict[int, OwnedSizes] = {}
    totals: dict[int, list[int]] = {}  # by the number of ranks, bytes of each one
    for index, of_bucket in owners.items():
        bucket, program = layout.buckets[index], programs[index]
        if index in away:
            sizes[index] = OwnedSizes.of(bucket, program, of_bucket)
            continue
        of_rank = totals.setdefault(len(of_bucket.ranks), [0] * len(of_bucket.ranks))
        of_master = bucket.dtype.itemsize * bucket.has_master
        for rank, owned in enumerate(of_bucket.ranks):
            if owned:
                of_rank[rank] += of_bucket.numels[rank] * of_master + state_bytes(program, owned)
    fullest = {num_ranks: of_rank.index(max(of_rank)) for num_ranks, of_rank in totals.items()}
    for index, of_bucket in owners.items():
        if index not in away:
            rank = fullest[len(of_bucket.ranks)]
            sizes[index] = OwnedSizes.of(layout.buckets[index], programs[index], of_bucket, rank)
    return sizes


def names_of(owned: Iterable[OwnedSlot]) -> list[str]:
    """The names of parameters that a rank owns."""
    return [each.slot.name for each in owned]


def state_bytes(program: UpdateProgram, owned: Iterable[OwnedSlot]) -> int:
    """Bytes of the states of what a rank owns of a bucket."""
    return sum(whole_of(program, each.slot).state_bytes for each in owned)


def state_views(
    program: UpdateProgram, owned: Iterable[OwnedSlot], buffer: torch.Tensor | None
) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of the states in ``buffer``, as views, by parameter and path."""
    views: dict[str, dict[str, torch.Tensor]] = {}
    begin = 0
    for each in owned:
        mine = views[each.slot.name] = {}
        for state in whole_of(program, each.slot).states:
            assert buffer is not None or not state.num_bytes, "states of some bytes have a buffer"
            some = torch.empty(0, dtype=torch.uint8, device="cpu") if buffer is None else buffer
            flat = some[begin : begin + state.num_bytes].view(state.dtype)
            mine[state.path] = flat.as_strided(state.shape, state.stride)
            begin += state.num_bytes
    return views


def _fits(state: StateTensor, dtype: torch.dtype, *, is_loaded: bool) -> bool:
    """True if a state may have values of ``dtype``, as a step leaves them or as they have been loaded."""
    if is_loaded and state.dtype.is_floating_point and not state.in_subclass:
        return dtype.is_floating_point
    return dtype == (state.step_dtype or state.dtype)


def cast_views(whole: WholeParameter, views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """States in the dtypes that a step has them in: ``views``, or copies of those that are stored in others."""
    dtypes = {state.path: state.step_dtype or state.dtype for state in whole.states}
    return {path: view.to(dtypes[path]) for path, view in views.items()}


def store_entry(
    name: str,
    entry: Any,
    views: Mapping[str, torch.Tensor],
    whole: WholeParameter,
    *,
    is_here: bool = True,
    is_loaded: bool = False,
) -> Any:
    """Keep the tensors of a parameter's ``entry`` in ``views``; returns the rest of it. Where the parameter is not
    ``is_here``, they have no values. ``is_loaded``: they may have been stored in another floating-point dtype.

    Raises:
        OptimizerError: they are not those that were tried.
    """
    tree, tensors = split_tensors(entry)
    specs = {state.path: state for state in whole.states}
    for path, tensor in tensors.items():
        view = views.get(path)
        if view is None or view.shape != tensor.shape or not _fits(specs[path], tensor.dtype, is_loaded=is_loaded):
            known = {state.path: list(state.shape) for state in whole.states}
            raise OptimizerError(
                f"expected states of {name} as a step on its shape has them ({known}), found {path} of shape "
                f"{list(tensor.shape)} and {tensor.dtype}: states whose shapes change have no planned place"
            )
        has_values = is_here and not tensor.is_meta  # those of a checkpoint come when the step has been prepared
        if has_values and (tensor.data_ptr() != view.data_ptr() or tensor.stride() != view.stride()):
            view.copy_(tensor)
    return tree
