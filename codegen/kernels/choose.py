"""Which updates of a step run on one kernel of ours, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerofx.codegen.emit import region_source
from zerofx.codegen.kernels.update import UpdateKernel, make_update_kernel
from zerofx.codegen.kernels.update_writer import NoKernelError
from zerofx.codegen.regions import Region
from zerofx.node_facts import value
from zerofx.passes.base import consumers
from zerofx.scheduler.storage import storage_source
from zerofx.scheduler.streams import runs_on_host


@dataclass(frozen=True)
class UpdateKernels:
    """By region key: the kernels of the updates that have one, and the reasons why the others have none."""

    made: Mapping[str, UpdateKernel]
    reasons: Mapping[str, str]


def update_kernels(
    regions: Sequence[Region],
    functions: Mapping[str, Callable[[list[Any]], object]] | None = None,
    *,
    all_is_read: bool = False,
) -> UpdateKernels:
    """The kernels of the updates among ``regions``.

    Args:
        regions: all of a step's, in order.
        functions: the regions' functions by key, as the step's file has them; those that it will have if None.
        all_is_read: whether what nothing in the graph reads later has to be stored all the same.
    """
    updates: dict[str, list[Region]] = {}
    for region in regions:
        if region.is_update:
            updates.setdefault(region.key, []).append(region)
    made: dict[str, UpdateKernel] = {}
    reasons: dict[str, str] = {}
    for key, equal in updates.items():
        first = equal[0]
        if any(runs_on_host(region.nodes[-1]) for region in equal):
            reasons[key] = "it runs on the host"
            continue
        # Equal regions share a kernel: what it leaves out must be needed behind none of them.
        dying = frozenset.intersection(*(_dying(region) for region in equal))
        function = functions[key] if functions is not None else _function_of(first)
        try:
            given = [value(node) for node in first.inputs]
            made[key] = make_update_kernel(function, given, frozenset() if all_is_read else dying)
        except NoKernelError as error:
            reasons[key] = str(error)
    return UpdateKernels(made, reasons)


def _function_of(region: Region) -> Callable[[list[Any]], object]:
    namespace: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten}
    exec(region_source("update", region), namespace)
    function: Callable[[list[Any]], object] = namespace["update"]
    return function


def _dying(region: Region) -> frozenset[int]:
    """The numbers of the inputs whose memory is given back behind the region, or written before it is read again."""
    last = region.own[-1]
    return frozenset(
        number
        for number, node in enumerate(region.inputs)
        if storage_source(node)[0].op != "placeholder" and all(not last < reader for reader in _readers(node))
    )


def _readers(node: fx.Node) -> list[fx.Node]:
    """All nodes that read the memory of ``node``, under any name."""
    source = storage_source(node)
    found = consumers(source[0])
    for reader in found:
        if storage_source(reader) == source:  # it writes there, and hands on the same memory
            found.extend(further for further in consumers(reader) if further not in found)
    return found
