"""The text of a program, as people read it in the generated step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.lib.graphs import number_values
from tests.lib.optimizers import program_of
from zerofx.optimizers import ShadowOptimizer, StandIn, has_fused


def text(graph: torch.fx.Graph) -> str:
    lines = [", ".join(str(node.target) for node in graph.nodes if node.op == "placeholder")]
    for node in graph.nodes:
        if node.op == "call_function":
            arguments = [str(arg) for arg in node.args] + [f"{key}={value}" for key, value in node.kwargs.items()]
            lines.append(f"{node.name} = {node.target}({', '.join(arguments)})")
    return number_values("\n".join(lines) + "\n")


def param() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(2, 2))


def test_adamw(golden: Callable[..., None]) -> None:
    optimizer = torch.optim.AdamW([param()])
    program = program_of(optimizer)
    golden(f"{', '.join(program.scalars)}\n{text(program.graph)}")


def test_first_step_of_sgd_writes_the_momentum_buffer(golden: Callable[..., None]) -> None:
    optimizer = torch.optim.SGD([param()], lr=0.1, momentum=0.9)
    program = program_of(optimizer)
    golden(text(program.graph))
    assert [(spec.name, spec.written_first) for spec in program.states] == [("momentum_buffer", True)]


def test_fused_adamw(golden: Callable[..., None]) -> None:
    optimizer = torch.optim.AdamW([param()])
    golden(text(program_of(optimizer, fused=True).graph))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options", "num_updates"),
    [
        (torch.optim.SGD, {"lr": 0.1}, 1),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 2),
        (torch.optim.AdamW, {}, 1),
        (torch.optim.RAdam, {}, 2),
    ],
)
def test_updates_of_later_steps_are_known_before_the_first(
    kind: Any, options: dict[str, Any], num_updates: int, dtype: torch.dtype, fused: bool
) -> None:
    optimizer = kind([param()], **options)
    if fused and not has_fused(optimizer, "cuda", dtype):
        pytest.skip("torch has no kernel")
    shadow, stand_in = ShadowOptimizer(optimizer), StandIn(0, dtype, fused=fused)
    first = shadow.programs([stand_in])[stand_in.key]
    ahead = shadow.forms(stand_in, first)
    assert len(ahead) == num_updates
    assert ahead[0] is first and all(program.dtype == dtype for program in ahead)
    assert not optimizer.state
