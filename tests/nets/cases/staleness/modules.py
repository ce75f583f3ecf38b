"""What is changed of modules: methods, hooks, parts, numbers of torch's own layers, modes, what is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nets.cases.staleness.script import FEATURES, WIDTH, Losing, Script, Small, case, flag, number


@case("model.forward, replaced", "function")
def instance_forward() -> Script:
    model = Losing()

    def squared(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model.outputs(x), y).square()

    own = model.forward
    return Script(model, lambda count: setattr(model, "forward", squared if flag(count) else own))


@case("forward of a part, replaced", "function")
def part_forward() -> Script:
    model = Losing()
    own = model.first.forward
    return Script(
        model, lambda count: setattr(model.first, "forward", (lambda x: own(x) * 2) if flag(count) else own)
    )  # fmt: skip


@case("type(model).forward, replaced", "function")
def class_forward() -> Script:
    class Model(Losing):
        pass

    def squared(self: Model, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.outputs(x), y).square()

    own = Model.forward
    return Script(Model(), lambda count: setattr(Model, "forward", squared if flag(count) else own))


@case("method of the model's class, replaced", "function")
def class_method() -> Script:
    class Model(Losing):
        pass

    def squared(self: Model, loss: Tensor) -> Tensor:
        return loss * loss

    own = Model.weigh
    return Script(Model(), lambda count: setattr(Model, "weigh", squared if flag(count) else own))


def _toggled(register: Callable[[], Any]) -> tuple[Callable[[int], None], Callable[[], None]]:
    """A change that adds a hook and removes it in turn, and what removes it at last."""
    handles: list[Any] = []

    def remove() -> None:
        while handles:
            handles.pop().remove()

    def change(count: int) -> None:
        if flag(count):
            handles.append(register())
        else:
            remove()

    return change, remove


@case("forward hook, added and removed", "function")
def forward_hook() -> Script:
    model = Losing()
    change, _ = _toggled(lambda: model.first.register_forward_hook(lambda module, args, out: out * 2))
    return Script(model, change)


@case("forward hook that reads a number of its own", "number")
def number_of_a_hook() -> Script:
    model = Losing()
    scale = [1.0]
    model.first.register_forward_hook(lambda module, args, out: out * scale[0])
    return Script(model, lambda count: scale.__setitem__(0, number(count)))


@case("forward pre-hook, added and removed", "function")
def forward_pre_hook() -> Script:
    model = Losing()
    change, _ = _toggled(lambda: model.second.register_forward_pre_hook(lambda module, args: (args[0] * 2,)))
    return Script(model, change)


@case("full backward hook, added and removed", "function")
def backward_hook() -> Script:
    class Model(Losing):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Tanh()

        def between(self, x: Tensor) -> Tensor:
            given: Tensor = self.act(x)
            return given

    model = Model()
    change, _ = _toggled(
        lambda: model.act.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 2,))  # type: ignore[index]  # a tuple
    )
    return Script(model, change)


@case("forward hook of all modules, added and removed", "function")
def global_hook() -> Script:
    def doubled(module: nn.Module, args: Any, out: Any) -> Any:
        return out * 2 if isinstance(module, nn.Linear) else None

    change, undo = _toggled(lambda: nn.modules.module.register_module_forward_hook(doubled))
    return Script(Losing(), change, undo=undo)


@case("hook of a parameter, added and removed", "function")
def parameter_hook() -> Script:
    model = Losing()
    change, _ = _toggled(lambda: model.first.weight.register_hook(lambda grad: grad * 2))
    return Script(model, change)


class _Parted(Losing):
    """``Losing`` with a part between its layers."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def between(self, x: Tensor) -> Tensor:
        given: Tensor = self.part(x)
        return given


@case("part without parameters, replaced", "module")
def part_replaced() -> Script:
    model = _Parted(nn.Tanh())
    kinds = (nn.Tanh, nn.ReLU, nn.Sigmoid)
    return Script(model, lambda count: setattr(model, "part", kinds[count % 3]()))


@case("layers of a ModuleList, reordered", "module")
def parts_reordered() -> Script:
    class Model(Losing):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def between(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    model = Model()

    def change(count: int) -> None:
        model.layers[0], model.layers[1] = model.layers[1], model.layers[0]

    return Script(model, change)


@case("negative_slope of LeakyReLU", "number")
def negative_slope() -> Script:
    part = nn.LeakyReLU(0.1)
    return Script(_Parted(part), lambda count: setattr(part, "negative_slope", 0.1 + 0.1 * count))


@case("p of Dropout", "number")
def dropout() -> Script:
    part = nn.Dropout(0.1)
    return Script(_Parted(part), lambda count: setattr(part, "p", 0.1 + 0.05 * count))


@case("p of Dropout, from 0 on", "number")
def dropout_from_zero() -> Script:
    part = nn.Dropout(0.0)
    return Script(_Parted(part), lambda count: setattr(part, "p", 0.05 * count))


@case("momentum of BatchNorm", "number")
def batch_norm_momentum() -> Script:
    part = nn.BatchNorm1d(WIDTH)
    return Script(_Parted(part), lambda count: setattr(part, "momentum", 0.1 + 0.05 * count))


@case("eps of BatchNorm", "number")
def batch_norm_eps() -> Script:
    part = nn.BatchNorm1d(WIDTH)
    return Script(_Parted(part), lambda count: setattr(part, "eps", 0.5 * count))


@case("track_running_stats of BatchNorm", "flag")
def batch_norm_tracking() -> Script:
    part = nn.BatchNorm1d(WIDTH)
    return Script(_Parted(part), lambda count: setattr(part, "track_running_stats", not flag(count)))


@case("eps of LayerNorm", "number")
def layer_norm_eps() -> Script:
    part = nn.LayerNorm(WIDTH)
    return Script(_Parted(part), lambda count: setattr(part, "eps", 0.5 * count))


@case("stride of Conv1d", "number")
def stride() -> Script:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(1, 1, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            given: Tensor = self.conv(x[:, None]).mean(-1)
            return x + given

    part = Convolved()
    return Script(_Parted(part), lambda count: setattr(part.conv, "stride", (1 + count % 3,)))


@case("training of a part", "flag")
def training_of_a_part() -> Script:
    part = nn.BatchNorm1d(WIDTH)
    return Script(_Parted(part), lambda count: part.train(not flag(count)))


@case("requires_grad of a part", "flag")
def frozen_part() -> Script:
    model = Losing()

    def change(count: int) -> None:
        for p in model.first.parameters():
            p.requires_grad_(not flag(count))
            p.grad = None

    return Script(model, change)


@case("requires_grad that forward reads", "flag")
def reading_requires_grad() -> Script:
    class Model(Losing):
        def weigh(self, loss: Tensor) -> Tensor:
            return loss * 2 if self.first.bias.requires_grad else loss

    model = Model()

    def change(count: int) -> None:
        model.first.bias.requires_grad_(not flag(count))
        model.first.bias.grad = None

    return Script(model, change)


@case("module that forward= is given by a list", "module")
def listed_module() -> Script:
    heads = [nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 3)]
    for head in heads:
        head.requires_grad_(False)
    chosen = [heads[0]]

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x) + chosen[0](x), y)

    return Script(Small(), lambda count: chosen.__setitem__(0, heads[count % 2]), forward)


@case("parameter that is registered under a name that no code reads", "list")
def added_parameter() -> Script:
    class Model(Losing):
        def weigh(self, loss: Tensor) -> Tensor:
            return loss + sum(p.square().sum() for p in self.parameters())

    model = Model()

    def change(count: int) -> None:
        values = torch.full((2,), float(1 + count % 2))
        model.second.register_parameter("scale", nn.Parameter(values, requires_grad=False))

    return Script(model, change)


@case("buffer that is registered under a name that no code reads", "list")
def added_buffer() -> Script:
    class Model(Losing):
        def weigh(self, loss: Tensor) -> Tensor:
            return loss + sum(b.square().sum() for b in self.buffers())

    model = Model()
    model.first.register_buffer("shift", torch.ones(2))
    return Script(model, lambda count: model.second.register_buffer("shift", torch.full((2,), float(1 + count % 2))))
