"""An update whose states are stored in fewer bits than it computes with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Graph, Node

from zerofx.optimizers.program import UpdateProgram

_aten = torch.ops.aten


def cast_states(program: UpdateProgram, dtype: torch.dtype) -> UpdateProgram:
    """``program`` with the states that have the parameter's dtype in ``dtype`` between updates; others stay.

        lerp_(exp_avg, grad, s0)                up = _to_copy(exp_avg, dtype=float32)
        addcdiv_(param, exp_avg, ...)           lerp_(up, grad, s0)
                                                addcdiv_(param, up, ...)
                                                copy_(exp_avg, up)

    A step computes with what it has itself just computed: values are rounded once, as they are stored.
    """
    low = {spec.name for spec in program.states if spec.dtype == program.dtype != dtype}
    if not low:
        return program
    graph = Graph()
    values: dict[Node, Node] = {}
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node in inputs:
        values[node] = graph.node_copy(node)
    stored = {node: values[node] for node in inputs if node.target in low}
    for node, state in stored.items():
        values[node] = graph.call_function(_aten._to_copy.default, (state,), {"dtype": program.dtype})
    for node in program.graph.nodes:
        if node.op == "call_function":
            values[node] = graph.node_copy(node, values.__getitem__)
    for node, state in stored.items():
        graph.call_function(_aten.copy_.default, (state, values[node]))
    graph.output(())
    graph.lint()
    states = tuple(replace(spec, dtype=dtype) if spec.name in low else spec for spec in program.states)
    return replace(program, graph=graph, states=states)
