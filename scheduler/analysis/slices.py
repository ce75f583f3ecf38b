"""Find parameters that can be used a slice at a time, from their readers and the products that make their gradients.

A slice is some rows of a parameter: a part of its first dimension. A product with some rows gives some columns (or
rows) of its result, or one term of a sum; a lookup finds those of its indices that lie in it; a gradient's rows are
what the same operator gives for rows of its factors. ``passes/prepare/slice.py`` writes these down.

A parameter that anything else reads, or whose gradient is made otherwise, has to be there whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from zerofx.errors import PlanError, UsageError
from zerofx.ir.facts import Role, placeholder, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.parameters import ParameterInfo
from zerofx.ir.text import target_name
from zerofx.scheduler.analysis.loss_heads import find_heads
from zerofx.scheduler.analysis.tile_chains import find_chains
from zerofx.scheduler.plan.decisions import TileDecision
from zerofx.scheduler.plan.facts import unit_of
from zerofx.units import format_bytes

_aten = torch.ops.aten

Slices = tuple[TileDecision, ...]

_NUM_SLICES = (4, 16)  # of the largest parameter, on the rungs of the search for a plan within a budget
_MOST_SLICES = 64  # on a rung, in all: each has decisions of its own, among which plans are searched for
# What a layer's parameters can have on the device at once, times their own bytes: themselves, their gradients, two
# states (Adam's), and two values inside the update. Slices can free no more of it than all.
_HELD = 6


class Way(StrEnum):
    """Effect of a slice of a parameter on the result of an operator that reads it."""

    COLUMNS = "columns"  # mm(x, t(w)): some columns
    ROWS = "rows"  # mm(w, x): some rows
    SUM = "sum"  # mm(x, w), mm(t(w), x): a term of a sum
    LOOKUP = "lookup"  # embedding(w, indices): what the indices find there


@dataclass(frozen=True)
class Use:
    """An operator that reads a parameter; ``turned``: a transpose of it, ``on_left``: as its left factor."""

    node: fx.Node
    way: Way
    turned: bool = False
    on_left: bool = False


@dataclass(frozen=True)
class Sliceable:
    """A parameter that can be worked with in slices; ``gradient``: the operators that make its gradient, in order."""

    info: ParameterInfo
    node: fx.Node
    uses: tuple[Use, ...]
    gradient: tuple[fx.Node, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parameter in the compute dtype."""
        return self.info.numel * self.info.compute_dtype.itemsize


def sliceable(step: StepGraph, name: str) -> Sliceable | str:
    """The parameter called ``name``, or why it has to be there whole."""
    info = next(info for info in step.parameters if info.name == name)
    node = next(node for node in step.placeholders(Role.PARAMETER) if placeholder(node).name == name)
    if info.lent:
        return "is another step's"
    if len(info.shape) != 2:
        return f"has {len(info.shape)} dimensions, where slices are rows of a matrix"
    # A model that has been taken over shows parameters without memory: all strides are 0.
    if not tensor(node).is_contiguous() and any(tensor(node).stride()):
        return "does not lie in memory row by row"
    if info.part is not None:
        return "lies in parts on the model axis"
    uses: list[Use] = []
    for reader, read in _readers(node):
        use = _use(reader, read, turned=read is not node)
        if use is None:
            return f"is read by {target_name(reader)} ({reader.name})"
        uses.append(use)
    if not uses:
        return "is read by nothing"
    gradient: list[fx.Node] = []
    if name in step.gradients:
        blocker = _collect(step, step.gradients[name], gradient)
        if blocker is not None:
            return f"has a gradient that is made by {target_name(blocker)} ({blocker.name})"
    order = step.positions()
    return Sliceable(
        info, node, tuple(sorted(uses, key=lambda use: order[use.node])), tuple(sorted(gradient, key=order.__getitem__))
    )


def is_transpose(node: fx.Node) -> bool:
    """True if a node is the transpose of a matrix."""
    if node.target is _aten.t.default:
        return True
    dims: Any = node.args[1:]
    if node.target is _aten.transpose.int:
        return sorted(d % 2 for d in dims) == [0, 1]
    return node.target is _aten.permute.default and [d % 2 for d in dims[0]] == [1, 0]


def _readers(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The readers of a parameter, each with its operand: the parameter itself, or a transpose of it."""
    readers = []
    for user in node.users:
        if is_transpose(user) and not any(is_transpose(source) for source in user.all_input_nodes):
            readers += [(reader, user) for reader in user.users]
        else:
            readers.append((user, node))
    return readers


def _use(reader: fx.Node, read: fx.Node, *, turned: bool) -> Use | None:
    target, args = reader.target, reader.args
    if args.count(read) != 1:
        return None
    if target is _aten.embedding.default:
        return Use(reader, Way.LOOKUP) if args[0] is read and not turned else None
    factors = args[1:] if target is _aten.addmm.default else args
    if (
        target not in (_aten.mm.default, _aten.addmm.default)
        or reader.kwargs
        or len(factors) != 2
        or read not in factors
    ):
        return None
    on_left = factors[0] is read
    ways = {(False, True): Way.COLUMNS, (False, False): Way.SUM, (True, False): Way.ROWS, (True, True): Way.SUM}
    return Use(reader, ways[on_left, turned], turned, on_left)


def product_of(node: fx.Node) -> fx.Node | None:
    """The matrix product that a gradient is, or that it is the transpose of and nothing else reads."""
    if node.target is _aten.mm.default:
        return node
    source = node.args[0] if is_transpose(node) else None
    is_own = isinstance(source, fx.Node) and source.target is _aten.mm.default and len(source.users) == 1
    return source if is_own and isinstance(source, fx.Node) else None


def _collect(step: StepGraph, node: fx.Node, nodes: list[fx.Node]) -> fx.Node | None:
    """Add what makes a gradient to ``nodes``; returns what cannot give some rows of it, if anything."""
    allowed = {step.output, *nodes}
    if node in nodes or any(user not in allowed for user in node.users):
        return node
    nodes.append(node)
    if node.target is _aten.embedding_dense_backward.default or product_of(node) is not None:
        return None
    if node.target is _aten.add.Tensor and not node.kwargs:
        parts = [source for source in node.args if isinstance(source, fx.Node)]
        if len(parts) == 2 and all(tensor(part).shape == tensor(node).shape for part in parts):
            blockers = (_collect(step, part, nodes) for part in parts)
            return next((blocker for blocker in blockers if blocker is not None), None)
    return node


def slices_of_names(step: StepGraph, counts_by_name: Mapping[str, int]) -> Slices:
    """The parameters among what ``counts_by_name`` names, in so many slices; other names are those of modules.

    Raises:
        UsageError: a parameter cannot be worked with in slices, or has not so many rows.
    """
    names = {alias: info for info in step.parameters for alias in info.aliases}
    slices: dict[str, TileDecision] = {}
    for name, num_slices in counts_by_name.items():
        if name not in names:
            continue
        info = names[name]
        candidate = sliceable(step, info.name)
        if isinstance(candidate, str):
            raise UsageError(
                f"expected tile to name a parameter that can be worked with in slices, found that {name} {candidate}: "
                f"leave it out"
            )
        if num_slices > info.shape[0]:
            raise UsageError(f"expected up to {info.shape[0]} slices of {name}, one for each row, found {num_slices}")
        if info.name in slices and slices[info.name].num_tiles != num_slices:
            raise UsageError(
                f"expected one number of slices of {info.name}, which is the same parameter as {name}, found "
                f"{slices[info.name].num_tiles} and {num_slices}"
            )
        slices[info.name] = TileDecision(info.name, num_slices, candidate.num_bytes, f"as asked for {name}")
    return tuple(slices[info.name] for info in step.parameters if info.name in slices)


def slice_rungs(step: StepGraph, missing_bytes: Callable[[], int]) -> list[Slices]:
    """The ways to slice huge parameters, in the order in which they are turned to where no plan with whole ones fits.

    On each rung no slice is larger than a part of the largest parameter. Rungs that have too many slices to search
    among are left out, and those that cannot free what is missing, but for the last one where none can: a refusal then
    says the least that is possible. What is in a product whose values are larger than its weight is left alone: tiles
    of rows serve it better.

    Args:
        step: the captured graph with whole parameters.
        missing_bytes: by how much the least peak with them is over the budget; asked for where rungs differ in it.
    """
    values = {head.product: head.num_bytes for head in find_heads(step)}
    values |= {node: chain.num_bytes for chain in find_chains(step) for node in chain.members}
    whole_parameters, layers = [], Counter[str]()
    for info in step.parameters:
        candidate = sliceable(step, info.name)
        if isinstance(candidate, Sliceable) and all(
            values.get(use.node, 0) <= candidate.num_bytes for use in candidate.uses
        ):
            whole_parameters.append(candidate)
            layers[unit_of(info.name, step.units)] += candidate.num_bytes
    largest = max((candidate.num_bytes for candidate in whole_parameters), default=0)
    most = _HELD * max(layers.values(), default=0)
    rungs: dict[Slices, float] = {}  # the bytes that each frees at most
    for number in _NUM_SLICES:
        whole, each = format_bytes(largest), format_bytes(largest // number)
        reason = f"no plan with whole parameters (up to {whole}) fits; a slice takes up to {each}"
        counts = {
            candidate: min(-(-candidate.num_bytes * number // largest), candidate.info.shape[0])
            for candidate in whole_parameters
        }
        rung = tuple(TileDecision(w.info.name, n, w.num_bytes, reason) for w, n in counts.items() if n > 1)
        if rung and sum(decision.num_tiles for decision in rung) <= _MOST_SLICES:
            rungs[rung] = most * (1 - 1 / number)
    if len(rungs) < 2:
        return list(rungs)
    missing = missing_bytes()
    return [rung for rung, freed_bytes in rungs.items() if missing <= freed_bytes] or list(rungs)[-1:]


def find_sliceable(step: StepGraph, decision: TileDecision) -> Sliceable:
    """The parameter of a decision, with its uses.

    Raises:
        PlanError: the graph has no such parameter, or not so many rows of it, or needs it whole.
    """
    known = any(info.name == decision.value for info in step.parameters)
    candidate = sliceable(step, decision.value) if known else "is no parameter of this model"
    if isinstance(candidate, Sliceable) and not 2 <= decision.num_tiles <= candidate.info.shape[0]:
        candidate = f"has {candidate.info.shape[0]} rows for {decision.num_tiles} slices"
    if isinstance(candidate, str):
        raise PlanError(
            f"expected a plan whose slices are of parameters of this graph, found that {decision.value} "
            f"{candidate}: make the plan anew for this model"
        )
    return candidate
