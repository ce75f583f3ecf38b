"""Let what reads a result of linear algebra read it after the check that raises an error where there is none.

    inverse, info = linalg_inv_ex(a)                             inverse, info = linalg_inv_ex(a)
    token = with_effects(token, _linalg_check_errors, info)  ->  checked = zerofx.checked(inverse, info)
    y = inverse @ x                                              y = checked @ x

Torch orders checks by tokens, since nothing reads what they give.

Does not handle: other operators with tokens, which stay as they are and are refused (``name_inputs.py``).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.capture.normalise.joint import Joint
from zerofx.ir import ops


@dataclass(frozen=True)
class CheckResults:
    """Put results of linear algebra after their checks, in the place of tokens."""

    name: str = "check_results"

    def run(self, joint: Joint) -> None:
        graph = joint.graph
        output = graph.output_node()
        for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
            token, target, *about = node.args
            assert isinstance(token, fx.Node)
            is_check = target is torch.ops.aten._linalg_check_errors.default
            if not is_check or not _check_result(graph, *about, **node.kwargs):
                continue
            for following in list(node.users):
                following.replace_all_uses_with(token)
                graph.erase_node(following)
            graph.erase_node(node)
            if token.op == "placeholder" and set(token.users) == {output}:
                output.args = ([None if argument is token else argument for argument in output.args[0]],)  # type: ignore[union-attr]
                graph.erase_node(token)


def _check_result(graph: fx.Graph, info: fx.Node, name: str, *, is_matrix: bool = True) -> bool:
    """Put a result of the operator that gave ``info`` after a check; False if none is read."""
    call = info.args[0] if info.target is operator.getitem else None
    results = [entry for entry in call.users if entry is not info and entry.users] if isinstance(call, fx.Node) else []
    if not results:
        return False
    result = min(results, key=lambda output: output.args[1])  # type: ignore[arg-type,return-value]  # its place
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = max(result, info, key=order.__getitem__)
    with graph.inserting_after(last):
        checked = graph.call_function(ops.checked, (result, info, name, is_matrix))
    checked.meta = dict(result.meta)
    result.replace_all_uses_with(checked, lambda reader: reader is not checked and order[reader] > order[last])
    return True
