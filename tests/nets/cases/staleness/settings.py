"""What torch itself holds for all of a process, and contexts in which a step is called."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.nets.cases.staleness.script import CLASSES, Losing, Script, Small, case, flag, nothing_changes


@case("torch.set_default_dtype", "other")
def default_dtype() -> Script:
    class Model(Losing):
        def weigh(self, loss: Tensor) -> Tensor:
            thirds = torch.ones(2) / 3  # with other bits in each dtype
            return loss * thirds.sum().float()

    def change(count: int) -> None:
        torch.set_default_dtype((torch.float32, torch.bfloat16)[count % 2])

    return Script(Model(), change, undo=lambda: torch.set_default_dtype(torch.float32))


@case("autocast around the step", "flag", bound=1e-6, halves=True)
def autocast() -> Script:
    state = {"on": False}
    return Script(
        Losing(),
        lambda count: state.update(on=flag(count)),
        around=lambda: torch.autocast("cpu", torch.bfloat16, enabled=state["on"]),
    )


@case("autocast in forward=, by a flag", "flag", halves=True)
def autocast_inside() -> Script:
    state: dict[str, Any] = {"on": False}

    def forward(model: Small, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=state["on"]):
            outputs = model(x)
        return F.mse_loss(outputs.float(), y)

    return Script(Small(), lambda count: state.update(on=flag(count)), forward)


@case("torch.backends flag that forward reads", "flag")
def backends_flag() -> Script:
    class Model(Losing):
        def weigh(self, loss: Tensor) -> Tensor:
            return loss * loss if torch.backends.cudnn.benchmark else loss

    before = torch.backends.cudnn.benchmark

    def put(value: bool) -> None:
        torch.backends.cudnn.set_flags(_benchmark=value)  # also where torch's own tests have frozen the attributes

    put(False)
    return Script(Model(), lambda count: put(flag(count)), undo=lambda: put(before))


@case("torch.use_deterministic_algorithms, which forward asks for", "flag")
def deterministic() -> Script:
    class Model(Losing):
        def weigh(self, loss: Tensor) -> Tensor:
            return loss * loss if torch.are_deterministic_algorithms_enabled() else loss

    return Script(
        Model(),
        lambda count: torch.use_deterministic_algorithms(flag(count)),
        undo=lambda: torch.use_deterministic_algorithms(False),
    )


@case("torch.set_float32_matmul_precision, which forward asks for", "string")
def matmul_precision() -> Script:
    class Model(Losing):
        def weigh(self, loss: Tensor) -> Tensor:
            return loss * {"highest": 1.0, "high": 2.0, "medium": 3.0}[torch.get_float32_matmul_precision()]

    before = torch.get_float32_matmul_precision()
    names = ("highest", "high", "medium")
    return Script(
        Model(),
        lambda count: torch.set_float32_matmul_precision(names[count % 3]),
        undo=lambda: torch.set_float32_matmul_precision(before),
    )


@case("longest batch so far, which forward keeps", "other", tells=False)
def longest() -> Script:
    sizes = (4, 4, 6, 4, 4, 8, 4, 6, 4, 8, 6, 4)

    def draw(generator: torch.Generator, step: int) -> tuple[Any, ...]:
        shape = sizes[step - 1]
        return torch.randn(shape, 4, generator=generator), torch.randn(shape, CLASSES, generator=generator)

    class Model(Losing):
        longest = 0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]  # it takes the targets, too
            self.longest = max(self.longest, len(x))
            return super().forward(x, y) * self.longest

    return Script(Model(), nothing_changes, draw=draw)
