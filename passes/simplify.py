"""Remove nodes that only autograd needed, before a plan names any.

    a = detach(x); b = t(w); c = t(b); d = mm(a, c)      ->      d = mm(x, w)

Does not handle: anything that computes. Arithmetic is left exactly as it was captured.
"""

from __future__ import annotations

import torch
from torch import fx

from zerofx.graph import StepGraph

_aten = torch.ops.aten
_IDENTITIES = frozenset({_aten.detach.default, _aten.alias.default})


def simplify(step: StepGraph) -> None:
    """Drop ``detach`` and ``alias``, pairs of transposes, and chains of reshapes; in place."""
    for node in list(step.calls()):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        if node.target in _IDENTITIES:
            node.replace_all_uses_with(source)
        elif node.target is _aten.t.default and source.target is _aten.t.default:
            inner = source.args[0]
            assert isinstance(inner, fx.Node)
            node.replace_all_uses_with(inner)
        elif node.target is _aten.view.default and source.target is _aten.view.default:
            node.update_arg(0, source.args[0])
    step.graph.eliminate_dead_code()
