"""Grouped matrix products (mixture of experts): rows sorted by group, each group multiplied by its own matrix.

``sk,ekn->sn``: rows ``s``, each in one of the groups ``e``, are multiplied by the group's matrix. Ranks can share the
columns of all matrices, their rows, or the groups: then each rank has the matrices of its groups and computes the rows
of these (``zerofx/ir/op_kernels/own_rows.py``). Later calls that are row-wise keep this distribution of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from zerofx.ir.facts import tensor
from zerofx.ir.op_kernels.own_rows import own_ends
from zerofx.ir.sharding.pattern import Lies, Pattern
from zerofx.ir.sharding.rule import Local, argument, read_tensors, results_of, shape_of
from zerofx.ir.sharding.shapes import PatternsOf
from zerofx.scheduler.plan.placements import Ragged
from zerofx.torch_private.operators import GROUPED_BOUNDARY, OpOverload, base_name

_ENDS = 2  # the argument that says where groups end


def _patterns(node: fx.Node) -> list[Pattern]:
    """The ways to share a call: by each dimension that is not in groups, by groups, and by terms."""
    inputs, outputs = letters_of(node)
    if len(inputs) != len(read_tensors(node)) or len(outputs) != len(results_of(node)):
        return []
    ends = argument(node, _ENDS, "offs")
    in_groups = {"s", "e"} if isinstance(ends, fx.Node) else set()

    def share_letter(letter: str) -> Pattern:
        """Shard the dimension of this letter; results without it are partial sums."""
        return Pattern(
            tuple(names.index(letter) if letter in names else "sum" for names in outputs),
            tuple(names.index(letter) if letter in names else None for names in inputs),
            is_tried=True,
        )

    patterns = [share_letter(letter) for letter in sorted(set("".join(inputs)) - in_groups)]
    if isinstance(ends, fx.Node):
        num_groups = shape_of(ends)[0]
        given, read = group_placements(node, ends.name)
        patterns.append(
            Pattern(given, read, _own_groups, in_groups=False, allowed=lambda ranks: num_groups % ranks == 0)
        )
    return [*patterns, *_linear(inputs, outputs)]


def ends_of(node: fx.Node) -> fx.Node | None:
    """The value that says where the groups of a grouped product's rows end; None for any other call."""
    if not isinstance(node.target, OpOverload) or base_name(node.target) not in GROUPED:
        return None
    ends = argument(node, _ENDS, "offs")
    return ends if isinstance(ends, fx.Node) else None


def group_placements(node: fx.Node, ends: str) -> tuple[tuple[Lies, ...], tuple[Lies, ...]]:
    """Placements of results and of tensor arguments if each rank has some of the groups, whose rows end at ``ends``."""

    def lies(names: str) -> Lies:
        if "s" in names:
            return Ragged(names.index("s"), ends)
        return names.index("e") if names else None

    inputs, outputs = letters_of(node)
    return tuple(map(lies, outputs)), tuple(map(lies, inputs))


def letters_of(node: fx.Node) -> tuple[list[str], list[str]]:
    """The dimensions of a call's tensor arguments and results as letters; the ends of the groups have no letters."""
    name = base_name(node.target)  # type: ignore[arg-type]  # an operator
    tensors = read_tensors(node)
    dims = tuple(len(shape_of(source)) for source in tensors[:2])
    read, _, given = (GROUPED[name] or _BY_DIMS[dims]).partition("->")
    inputs = read.split(",")
    if isinstance(argument(node, _ENDS, "offs"), fx.Node):
        inputs.insert(_ENDS, "")
    return inputs, given.split(",")


def _linear(inputs: list[str], outputs: list[str]) -> list[Pattern]:
    """Patterns in which one operand is a partial sum and the others are whole, where the call is linear in it."""
    everywhere = [number for number, names in enumerate(inputs) if names and len(outputs) == 1]
    if len(outputs) > 1:
        everywhere = [len(inputs) - 1]  # a gradient: those of both operands are its products
    return [
        Pattern(tuple("sum" for _ in outputs), tuple("sum" if at == number else None for at in range(len(inputs))))
        for number in everywhere
    ]


def _own_groups(rank: Local) -> Any:
    args = align_operands(rank)
    num_rows = next(
        shape_of(own)[lies.dim]
        for own, lies in zip(rank.args[:_ENDS], rank.rule.inputs, strict=False)
        if isinstance(lies, Ragged)
    )
    args[_ENDS] = rank.call(own_ends, args[_ENDS], rank.rank(), rank.num_ranks, num_rows)
    return rank.call(rank.node.target, *args, **rank.kwargs)


def align_operands(rank: Local) -> list[Any]:
    """The arguments of any call; those of a grouped product with operands by columns where the captured call has them.

    Its kernels ask for rows, or columns, that begin at multiples of 16 bytes. What has moved between ranks is dense by
    rows, of any length.
    """
    args = list(rank.args)
    target = rank.node.target
    is_grouped = isinstance(target, OpOverload) and base_name(target) in GROUPED
    operands = read_tensors(rank.node)[:2] if is_grouped else []
    for position, whole in enumerate(operands):
        own, at = tensor(args[position]), tensor(whole).stride()
        if at[-2] == 1 < at[-1] and own.stride()[-2] * own.element_size() % GROUPED_BOUNDARY:
            columns = rank.call(_aten.transpose.int, args[position], -2, -1)
            dense = rank.call(_aten.clone.default, columns, memory_format=torch.contiguous_format)
            args[position] = rank.call(_aten.transpose.int, dense, -2, -1)
    return args


_aten = torch.ops.aten


_BY_DIMS: Mapping[tuple[int, ...], str] = MappingProxyType(
    {(2, 3): "sk,ekn->sn", (2, 2): "ms,sn->emn", (3, 2): "emk,ks->ms", (3, 3): "emk,ekn->emn"}
)
GROUPED: Mapping[str, str] = MappingProxyType(
    {
        "_grouped_mm": "",  # by the dimensions of its operands
        "transformers::grouped_mm_fallback": "sk,ekn->sn",
        "transformers::grouped_mm_fallback_backward": "sk,ekn,sn->sk,ekn",
    }
)
"""Grouped products by operator name, with the dimensions of their operands and results."""

PATTERNS: Mapping[str, PatternsOf] = MappingProxyType(dict.fromkeys(GROUPED, _patterns))
