"""The text of a program, as people read it in the generated step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zerofx.optimizers import trace_update


def text(graph: torch.fx.Graph) -> str:
    lines = [", ".join(str(node.target) for node in graph.nodes if node.op == "placeholder")]
    for node in graph.nodes:
        if node.op == "call_function":
            arguments = [str(arg) for arg in node.args] + [f"{key}={value}" for key, value in node.kwargs.items()]
            lines.append(f"{node.name} = {node.target}({', '.join(arguments)})")
    return "\n".join(lines) + "\n"


def param() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(2, 2))


def test_adamw(golden: Callable[..., None]) -> None:
    optimizer = torch.optim.AdamW([param()])
    program = trace_update(optimizer, optimizer.param_groups[0])
    golden(f"{program.host_source}\n{text(program.graph)}")


def test_first_step_of_sgd_writes_the_momentum_buffer(golden: Callable[..., None]) -> None:
    optimizer = torch.optim.SGD([param()], lr=0.1, momentum=0.9)
    program = trace_update(optimizer, optimizer.param_groups[0])
    golden(text(program.graph))
    assert program.first_step_only and program.state_after == {"momentum_buffer"}


def test_fused_adamw(golden: Callable[..., None]) -> None:
    optimizer = torch.optim.AdamW([param()])
    golden(text(trace_update(optimizer, optimizer.param_groups[0], fused=True).graph))
