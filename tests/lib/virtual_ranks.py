"""A step graph run on several ranks in one process, in lockstep, and whole values cut into the parts of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerofx.ir import ops
from zerofx.ir.batch import Batch
from zerofx.ir.facts import Role, is_random, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.plan.placements import Partial, Placement, Sharded

Feeds = Mapping[str, Tensor]  # the value of each placeholder, by the node's name


Drawn = dict[str, list[Any]]  # what each rank has drawn, by the node's name


def run(graph: fx.Graph, feeds: Sequence[Feeds], drawn: Drawn | None = None) -> list[tuple[Tensor, ...]]:
    """What a graph gives on each rank; ``feeds`` are one for each.

    Ranks draw random numbers from generators in one state. ``drawn`` has what they are to draw in their place, and is
    given what they draw besides.
    """
    drawn = {} if drawn is None else drawn
    values: list[dict[fx.Node, Any]] = [{} for _ in feeds]
    for node in graph.nodes:
        if node.op == "output":
            return [fx.map_arg(node.args[0], known.__getitem__) for known in values]
        if node.op == "placeholder":
            results = [given[node.name] for given in feeds]
        else:
            calls = [fx.map_arg((node.args, node.kwargs), known.__getitem__) for known in values]
            if is_random(node) and node.name not in drawn:
                drawn[node.name] = _from_one_state(node.target, calls)
            results = drawn[node.name] if is_random(node) else _called(node.target, calls)
        for known, result in zip(values, results, strict=True):
            fake = node.meta["val"]
            if isinstance(fake, Tensor):
                assert result.shape == fake.shape, f"{node.format_node()}: {tuple(result.shape)}"
            known[node] = result
    raise AssertionError("a graph has an output")


def _from_one_state(target: Any, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    results, state = [], torch.get_rng_state()
    for args, kwargs in calls:
        torch.set_rng_state(state)
        results.append(target(*args, **kwargs))
    return results


def _called(target: Any, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    first = [args[0] for args, _ in calls]
    if target is ops.wait:
        return first
    if target is ops.gather_values:
        return [torch.stack(first)] * len(calls)
    if target is ops.all_reduce_values:
        return [reduced(first, Partial(calls[0][0][1]))] * len(calls)
    if target is ops.reduce_scatter_values:
        return list(torch.stack(first).sum(0))
    if target is ops.exchange_values:
        return [torch.stack([parts[rank] for parts in first]) for rank in range(len(calls))]
    if target is ops.shift_values:
        return [first[-1], *first[:-1]]
    return [target(*args, **kwargs) for args, kwargs in calls]


def reduced(parts: Sequence[Tensor], placement: Partial) -> Tensor:
    """The value that parts add up to, or whose largest or smallest elements it has."""
    stacked = torch.stack(tuple(parts))
    if placement.reduction == "sum":
        return stacked.sum(0)
    return stacked.amax(0) if placement.reduction == "max" else stacked.amin(0)


def part_of(whole: Tensor, placement: Placement, rank: int, num_ranks: int) -> Tensor:
    """One rank's part of a value that lies so."""
    if not isinstance(placement, Sharded):
        return whole
    groups = whole.chunk(placement.groups, placement.dim)
    return torch.cat([group.chunk(num_ranks, placement.dim)[rank] for group in groups], placement.dim)


def assembled(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The whole value of which the ranks have these parts."""
    if not isinstance(placement, Sharded):
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    cut = [part.chunk(placement.groups, placement.dim) for part in parts]
    return torch.cat([each[group] for group in range(placement.groups) for each in cut], placement.dim)


def feeds_of(step: StepGraph, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The placeholders of a captured graph: the model's parameters and buffers, and the batch."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    inputs = dict(zip(batch.names, batch.tensors, strict=True))
    known = {Role.PARAMETER: named, Role.BUFFER: named, Role.INPUT: inputs}
    return {
        node.name: known.get(placeholder(node).role, step.constants)[placeholder(node).name].detach()
        for node in step.placeholders()
    }
