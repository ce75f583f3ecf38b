"""Facts about a step's distinct regions, enough to compile and run them without the graph; a region's own graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from zerofx.codegen.regions import Region
from zerofx.ir.aliasing import storage_source
from zerofx.ir.edit import consumers
from zerofx.ir.facts import value
from zerofx.ir.streams import runs_on_host


@dataclass(frozen=True)
class RegionFacts:
    """Facts common to all regions of one key.

    ``inputs`` are fake tensors, or scalars. ``on_host``: whether one of them runs on the host. ``dying`` are, of
    updates, the numbers of the inputs whose memory is not read again after any of them, where that was asked for.
    """

    key: str
    inputs: tuple[Any, ...]
    num_nodes: int
    num_outputs: int
    is_update: bool
    on_host: bool
    dying: frozenset[int] = frozenset()


def region_facts(regions: Sequence[Region], *, with_updates: bool) -> tuple[RegionFacts, ...]:
    """The facts of each key among ``regions``, all of a step's, in the order in which keys come first.

    ``with_updates``: whether updates run on kernels of ours, which ask for ``dying``.
    """
    equal: dict[str, list[Region]] = {}
    for region in regions:
        equal.setdefault(region.key, []).append(region)
    return tuple(_facts(key, alike, with_dying=with_updates) for key, alike in equal.items())


def _facts(key: str, equal: Sequence[Region], *, with_dying: bool) -> RegionFacts:
    first = equal[0]
    on_host = any(runs_on_host(region.nodes[-1]) for region in equal)
    dying = frozenset[int]()
    if with_dying and first.is_update and not on_host:
        # Equal regions share a kernel: what it leaves out must be needed after none of them.
        dying = frozenset.intersection(*(_dead_inputs(region) for region in equal))
    return RegionFacts(
        key, tuple(value(node) for node in first.inputs), len(first.nodes), len(first.outputs), first.is_update,
        on_host, dying,
    )  # fmt: skip


def _dead_inputs(region: Region) -> frozenset[int]:
    """The numbers of the inputs whose memory is given back after the region, or written before it is read again."""
    last = region.own[-1]
    return frozenset(
        number
        for number, node in enumerate(region.inputs)
        if storage_source(node)[0].op != "placeholder" and all(not last < reader for reader in _readers(node))
    )


def _readers(node: fx.Node) -> list[fx.Node]:
    """All nodes that read the memory of ``node``, under any name."""
    source = storage_source(node)
    readers = consumers(source[0])
    for reader in readers:
        if storage_source(reader) == source:  # it writes there, and hands on the same memory
            readers.extend(further for further in consumers(reader) if further not in readers)
    return readers


RegionFunction = Callable[[list[Any]], Any]


def trace_region(function: RegionFunction, num_inputs: int) -> tuple[fx.Graph, object]:
    """The operators that ``function`` calls, and what it returns; a placeholder's ``meta["number"]`` is its input's."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    nodes = [graph.placeholder(f"x{number}") for number in range(num_inputs)]
    for number, node in enumerate(nodes):
        node.meta["number"] = number
    result = function([fx.Proxy(node, tracer) for node in nodes])
    return graph, result
