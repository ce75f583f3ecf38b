"""Remove nodes that only autograd needed, before a plan names any.

    a = detach(x); b = t(w); c = t(b); d = mm(a, c)      ->      d = mm(x, w)
    y = where(m, v, x); z = copy(x, y)                   ->      z = where(m, v, x)
    z = copy(slice(x), y); a = slice_scatter(x, z)       ->      a = slice_scatter(x, y)
    z = new_zeros(x, size)                               ->      z = zeros(size)

The second is what tracing makes of ``x.copy_(...)``, where nothing else reads ``y``; the third of ``x[a:b] = y``, where
the copy would have memory for all of ``x``. The last has no need of ``x``, which ranks would make whole for it.

Does not handle: anything that computes. Arithmetic is left exactly as it was captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zerofx.ir.aliasing import aliased_input
from zerofx.ir.facts import tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.operators.operator import OperatorKind
from zerofx.ir.operators.table import facts_of

_aten = torch.ops.aten


@dataclass(frozen=True)
class Simplify:
    """Remove nodes that only autograd needed."""

    name: str = "simplify"

    def run(self, step: StepGraph) -> None:
        simplify(step)


def simplify(step: StepGraph) -> None:
    """Drop ``detach`` and ``alias``, pairs of transposes, chains of reshapes, and copies of what is new; in place."""
    for node in list(step.calls()):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        if facts_of(node.target).kind is OperatorKind.IDENTITY:
            node.replace_all_uses_with(source)
        elif node.target is _aten.t.default and source.target is _aten.t.default:
            inner = source.args[0]
            assert isinstance(inner, fx.Node)
            node.replace_all_uses_with(inner)
        elif node.target is _aten.view.default and source.target is _aten.view.default:
            node.update_arg(0, source.args[0])
        elif node.target is _aten.copy.default and isinstance(copied := node.args[1], fx.Node):
            is_needless = _is_like(copied, node) or _is_scattered(copied, node)
            if is_needless:
                node.replace_all_uses_with(copied)
        elif node.target is _aten.new_zeros.default:
            given = tensor(node)
            node.target, node.args = _aten.zeros.default, (node.args[1],)
            node.kwargs = {"dtype": given.dtype, "device": given.device}
    step.graph.eliminate_dead_code()


def _is_scattered(source: fx.Node, copy: fx.Node) -> bool:
    """True if a copy, in the source's dtype and shape, is only written into other tensors."""
    original, other = tensor(source), tensor(copy)
    is_put = all(facts_of(user.target).kind is OperatorKind.SCATTER and user.args[0] is not copy for user in copy.users)
    return is_put and (original.dtype, original.shape) == (other.dtype, other.shape)


def _is_like(source: fx.Node, copy: fx.Node) -> bool:
    """True if a copy is of a result that only it reads, and has its dtype and strides."""
    if source.op != "call_function" or aliased_input(source) is not None or len(source.users) > 1:
        return False
    original, other = tensor(source), tensor(copy)
    return (original.dtype, original.shape, original.stride()) == (other.dtype, other.shape, other.stride())
