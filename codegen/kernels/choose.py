"""Choose the updates of a step that run as one kernel of zerofx's own, and say why the others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerofx.codegen.emit import update_source
from zerofx.codegen.kernels.update import UpdateKernel, make_update_kernel
from zerofx.codegen.kernels.update_writer import NoKernelError
from zerofx.codegen.region_facts import RegionFacts, region_facts
from zerofx.codegen.regions import Region


@dataclass(frozen=True)
class UpdateKernels:
    """By region key: the kernels of the updates that have one, and the reasons why the others have none."""

    kernels: Mapping[str, UpdateKernel]
    reasons: Mapping[str, str]


def update_kernels(regions: Sequence[Region]) -> UpdateKernels:
    """The kernels of the updates among ``regions``, which are all of a step's, in order."""
    updates = [region for region in regions if region.is_update]
    functions = {
        key: function_of(region) for key, region in {region.key: region for region in reversed(updates)}.items()
    }
    return kernels_of_facts(region_facts(updates, with_updates=True), functions, all_is_read=False)


def kernels_of_facts(
    facts: Iterable[RegionFacts], functions: Mapping[str, Callable[[list[Any]], object]], *, all_is_read: bool
) -> UpdateKernels:
    """Do as ``update_kernels`` for the regions that ``facts`` are of, whose text is that of ``functions``.

    ``all_is_read``: whether what nothing in the graph reads later has to be stored all the same.
    """
    kernels: dict[str, UpdateKernel] = {}
    reasons: dict[str, str] = {}
    for region in facts:
        if not region.is_update:
            continue
        if region.on_host:
            reasons[region.key] = "it runs on the host"
            continue
        try:
            dying = frozenset[int]() if all_is_read else region.dying
            kernels[region.key] = make_update_kernel(functions[region.key], region.inputs, dying)
        except NoKernelError as error:
            reasons[region.key] = str(error)
    return UpdateKernels(kernels, reasons)


def function_of(region: Region) -> Callable[[list[Any]], object]:
    """The function that runs an update on torch's kernels."""
    namespace: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten}
    exec(update_source(region), namespace)
    function: Callable[[list[Any]], object] = namespace["update"]
    return function
