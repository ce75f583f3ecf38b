"""What a model's forward reads of objects: attributes of its own, of a config, of a class, properties, counters."""

from __future__ import annotations

import dataclasses
import enum
import fractions
import types
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nets.cases.staleness.script import CLASSES, WIDTH, Losing, Script, case, classification, flag, number


class _Weighed(Losing):
    """``loss * self.weight``, whatever that is."""

    def __init__(self, weight: Any = 1.0) -> None:
        super().__init__()
        self.weight = weight

    def weigh(self, loss: Tensor) -> Tensor:
        given: Tensor = loss * self.weight
        return given


class _Configured(Losing):
    """``loss * self.config.weight``, whatever the config is."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def weigh(self, loss: Tensor) -> Tensor:
        given: Tensor = loss * self.config.weight
        return given


@case("attribute of the model", "number")
def model_number() -> Script:
    model = _Weighed()
    return Script(model, lambda count: setattr(model, "weight", number(count)))


@case("attribute of the model, an int that is not used as a length", "number")
def model_int() -> Script:
    model = _Weighed(1)
    return Script(model, lambda count: setattr(model, "weight", 1 + count))


@case("attribute of the model, a Fraction", "other")
def model_fraction() -> Script:
    class Model(_Weighed):
        def weigh(self, loss: Tensor) -> Tensor:
            return loss * float(self.weight)

    model = Model(fractions.Fraction(1))
    return Script(model, lambda count: setattr(model, "weight", fractions.Fraction(2 + count, 2)))


@case("attribute of the model, a numpy scalar", "number")
def model_numpy_scalar() -> Script:
    class Model(_Weighed):
        def weigh(self, loss: Tensor) -> Tensor:
            return loss * float(self.weight)

    model = Model(np.float32(1.0))
    return Script(model, lambda count: setattr(model, "weight", np.float32(number(count))))


@case("attribute of the model, a numpy array", "list")
def model_numpy_array() -> Script:
    class Model(_Weighed):
        def weigh(self, loss: Tensor) -> Tensor:
            return loss * float(self.weight.sum())

    model = Model(np.ones(2))

    def change(count: int) -> None:
        model.weight[count % 2] += 1.0

    return Script(model, change)


@case("attribute of the model that is None at first", "number")
def model_none() -> Script:
    class Model(_Weighed):
        def weigh(self, loss: Tensor) -> Tensor:
            return loss if self.weight is None else loss * (1 + self.weight)

    model = Model(None)
    return Script(model, lambda count: setattr(model, "weight", number(count)))


@case("attribute of the model, a number and a tensor in turns", "other")
def model_in_turns() -> Script:
    model = _Weighed(number(0))

    def change(count: int) -> None:
        model.weight = torch.tensor(number(count)) if count % 2 else number(count)

    return Script(model, change)


@case("attribute of the model that is not there at first", "number")
def model_absent() -> Script:
    class Model(Losing):
        late: float

        def weigh(self, loss: Tensor) -> Tensor:
            return loss * (1 + self.late) if hasattr(self, "late") else loss

    model = Model()
    return Script(model, lambda count: setattr(model, "late", number(count)))


@case("attribute of the model", "flag")
def model_flag() -> Script:
    class Model(Losing):
        squares = False

        def weigh(self, loss: Tensor) -> Tensor:
            return loss * loss if self.squares else loss

    model = Model()
    return Script(model, lambda count: setattr(model, "squares", flag(count)))


@case("attribute of the model", "string")
def model_string() -> Script:
    class Model(Losing):
        act = "tanh"

        def between(self, x: Tensor) -> Tensor:
            given: Tensor = getattr(torch, self.act)(x)
            return given

    model = Model()
    return Script(model, lambda count: setattr(model, "act", ("tanh", "relu", "sigmoid")[count % 3]))


@case("attribute of the model", "function")
def model_function() -> Script:
    class Model(Losing):
        def __init__(self) -> None:
            super().__init__()
            self.act: Any = F.relu

        def between(self, x: Tensor) -> Tensor:
            given: Tensor = self.act(x)
            return given

    model = Model()
    return Script(model, lambda count: setattr(model, "act", (F.relu, F.gelu, F.silu)[count % 3]))


@case("attribute of the model, an object that is called", "function")
def processor() -> Script:
    class Processor:
        """As diffusers has attention processors."""

        def __init__(self, scale: float) -> None:
            self.scale = scale

        def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
            return torch.tanh(x) * self.scale

    class Model(Losing):
        def __init__(self) -> None:
            super().__init__()
            self.processor = Processor(1.0)

        def between(self, x: Tensor) -> Tensor:
            return self.processor(self, x)

    model = Model()
    return Script(model, lambda count: setattr(model, "processor", Processor(number(count))))


@case("attribute of the model, a dtype", "other")
def model_dtype() -> Script:
    class Model(Losing):
        dtype = torch.float32

        def between(self, x: Tensor) -> Tensor:
            return torch.tanh(x) + x.detach().to(self.dtype).float()

    model = Model()
    return Script(model, lambda count: setattr(model, "dtype", (torch.float32, torch.int32)[count % 2]))


@case("attribute of the model, a slice", "other")
def model_slice() -> Script:
    class Model(Losing):
        window = slice(0, 2)

        def weigh(self, loss: Tensor) -> Tensor:
            return loss + self.first.weight[self.window].square().sum()

    model = Model()
    return Script(model, lambda count: setattr(model, "window", slice(count % 3, 2 + count % 3)))


@case("attribute of model.config", "number")
def config_number() -> Script:
    model = _Configured(types.SimpleNamespace(weight=1.0))
    return Script(model, lambda count: setattr(model.config, "weight", number(count)))


@case("attribute of model.config.loss", "number")
def config_nested() -> Script:
    class Model(_Configured):
        def weigh(self, loss: Tensor) -> Tensor:
            given: Tensor = loss * self.config.loss.weight
            return given

    model = Model(types.SimpleNamespace(loss=types.SimpleNamespace(weight=1.0)))
    return Script(model, lambda count: setattr(model.config.loss, "weight", number(count)))


@case("model.config, replaced", "number")
def config_replaced() -> Script:
    model = _Configured(types.SimpleNamespace(weight=1.0))
    return Script(model, lambda count: setattr(model, "config", types.SimpleNamespace(weight=number(count))))


@dataclasses.dataclass
class _Config:
    weight: float = 1.0


@case("field of a dataclass", "number")
def dataclass_number() -> Script:
    model = _Configured(_Config())
    return Script(model, lambda count: setattr(model.config, "weight", number(count)))


@dataclasses.dataclass(frozen=True)
class _Frozen:
    weight: float = 1.0


@case("frozen dataclass, replaced", "number")
def dataclass_replaced() -> Script:
    model = _Configured(_Frozen())

    def change(count: int) -> None:
        model.config = dataclasses.replace(model.config, weight=number(count))

    return Script(model, change)


class _Named(NamedTuple):
    weight: float


@case("named tuple, replaced", "number")
def named_tuple() -> Script:
    model = _Configured(_Named(1.0))
    return Script(model, lambda count: setattr(model, "config", _Named(number(count))))


class _Slotted:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0


@case("attribute in a slot", "number")
def slot_number() -> Script:
    model = _Configured(_Slotted())
    return Script(model, lambda count: setattr(model.config, "weight", number(count)))


class _Lookup:
    """As libraries of configurations have it: attributes are the items of a dictionary."""

    def __init__(self, **items: Any) -> None:
        vars(self)["items"] = items

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["items"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["items"][name] = value


@case("attribute that __getattr__ looks up", "number")
def looked_up() -> Script:
    model = _Configured(_Lookup(weight=1.0))
    return Script(model, lambda count: setattr(model.config, "weight", number(count)))


class _Counter:
    """A schedule with a counter, and a property of it."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def weight(self) -> float:
        return number(self.count)


@case("property that reads a counter", "number")
def property_number() -> Script:
    model = _Configured(_Counter())
    return Script(model, lambda count: setattr(model.config, "count", count))


@case("attribute of the model's class", "number")
def class_number() -> Script:
    class Model(Losing):
        weight = 1.0

        def weigh(self, loss: Tensor) -> Tensor:
            return loss * self.weight

    return Script(Model(), lambda count: setattr(Model, "weight", number(count)))


@case("attribute of a class that is a config", "number")
def class_of_settings() -> Script:
    class Settings:
        weight = 1.0

    return Script(_Configured(Settings), lambda count: setattr(Settings, "weight", number(count)))


@case("model.__class__, replaced", "other")
def class_replaced() -> Script:
    class Squared(Losing):
        def weigh(self, loss: Tensor) -> Tensor:
            return loss * loss

    model = Losing()
    return Script(model, lambda count: setattr(model, "__class__", (Losing, Squared)[count % 2]))


class _Mode(enum.Enum):
    PLAIN = "plain"
    SQUARED = "squared"
    HALVED = "halved"


@case("member of an enum", "string")
def enum_member() -> Script:
    class Model(Losing):
        mode = _Mode.PLAIN

        def weigh(self, loss: Tensor) -> Tensor:
            match self.mode:
                case _Mode.PLAIN:
                    return loss
                case _Mode.SQUARED:
                    return loss * loss
                case _Mode.HALVED:
                    return loss / 2

    model, members = Model(), list(_Mode)
    return Script(model, lambda count: setattr(model, "mode", members[count % 3]))


class _Constant:
    weight = 1.0


class _Linear(_Constant):
    def __init__(self, weight: float) -> None:
        self.given = weight


@case("object of another class, isinstance of it", "other")
def instance_of() -> Script:
    class Model(Losing):
        def __init__(self) -> None:
            super().__init__()
            self.schedule = _Constant()

        def weigh(self, loss: Tensor) -> Tensor:
            return loss * self.schedule.given if isinstance(self.schedule, _Linear) else loss

    model = Model()
    return Script(model, lambda count: setattr(model, "schedule", _Linear(3.0) if flag(count) else _Constant()))


@case("counter that forward itself advances", "number")
def own_counter() -> Script:
    class Model(Losing):
        calls = 0

        def weigh(self, loss: Tensor) -> Tensor:
            self.calls += 1
            return loss * self.calls

    model = Model()
    return Script(model, lambda count: setattr(model, "calls", 0))


@case("flag that forward itself turns", "flag")
def own_flag() -> Script:
    class Model(Losing):
        turned = False

        def weigh(self, loss: Tensor) -> Tensor:
            self.turned = not self.turned
            return loss * loss if self.turned else loss

    model = Model()
    return Script(model, lambda count: setattr(model, "turned", not model.turned))


@case("plain tensor of a part, replaced", "other")
def tensor_replaced() -> Script:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x) * self.scale

    class Model(Losing):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def between(self, x: Tensor) -> Tensor:
            given: Tensor = self.part(x)
            return given

    model = Model()
    return Script(model, lambda count: setattr(model.part, "scale", torch.full((WIDTH,), number(count))))


@case("plain tensor of the model, written in place", "other")
def tensor_written() -> Script:
    model = _Weighed(torch.ones(()))
    return Script(model, lambda count: model.weight.fill_(number(count)))


@case("list of tensors, an item replaced", "list")
def tensors_replaced() -> Script:
    class Model(_Weighed):
        def weigh(self, loss: Tensor) -> Tensor:
            given: Tensor = loss * self.weight[0] + self.weight[1]
            return given

    model = Model([torch.ones(()), torch.ones(())])

    def change(count: int) -> None:
        model.weight[0] = torch.tensor(number(count))

    return Script(model, change)


@case("temperature of a curriculum", "number")
def temperature() -> Script:
    class Model(Losing):
        temperature = 2.0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]  # it takes the targets, too
            return F.cross_entropy(self.outputs(x) / self.temperature, y)

    model = Model()
    return Script(model, lambda count: setattr(model, "temperature", 2.0 / number(count)), draw=classification)


@case("decay of a moving average in a buffer", "number")
def decay() -> Script:
    class Model(Losing):
        mean: Tensor
        decay = 0.9

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(CLASSES))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]  # it takes the targets, too
            outputs = self.outputs(x)
            with torch.no_grad():
                self.mean.mul_(self.decay).add_(y.mean(0), alpha=1 - self.decay)
            return F.mse_loss(outputs - self.mean, y)

    model = Model()
    return Script(model, lambda count: setattr(model, "decay", 0.9 - 0.05 * count))
