"""What ``forward=`` and ``loss_fn=`` read: globals, cells, defaults, arguments of a partial, objects, other modules."""

from __future__ import annotations

import contextvars
import functools
import itertools
import os
import random
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nets.cases.staleness import imported
from tests.nets.cases.staleness.script import (
    CLASSES,
    FEATURES,
    Batch,
    Script,
    Small,
    case,
    classification,
    flag,
    number,
)

_weight = 1.0
_is_squared = False
_reduction = "mean"
_weights: list[float] = [1.0, 1.0]
_smoothing: float | None = None
_length = FEATURES
_activation: Callable[[Tensor], Tensor] = torch.tanh
_teacher: nn.Module = nn.Identity()
_options: dict[str, Any] = {}
_context = contextvars.ContextVar("_context", default=1.0)
_local = threading.local()
_schedule: Iterator[int] = itertools.count()

ACTIVATIONS = (torch.tanh, torch.relu, torch.sigmoid)


def _set(**values: Any) -> None:
    """Assign to globals of this module, as a ``global`` statement does."""
    globals().update(values)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


@case("global that forward= reads", "number")
def global_number() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return _loss(model, x, y) * _weight

    _set(_weight=1.0)
    return Script(Small(), lambda count: _set(_weight=number(count)), forward)


@case("global that forward= reads, which logs", "number")
def global_number_next_to_a_log() -> Script:
    log: list[float] = []

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = _loss(model, x, y)
        log.append(loss.item())
        return loss * _weight

    _set(_weight=1.0)
    return Script(Small(), lambda count: _set(_weight=number(count)), forward)


def _weighed(loss: Tensor) -> Tensor:
    return loss * _weight


@case("global that a function reads which forward= calls", "number")
def global_of_a_callee() -> Script:
    _set(_weight=1.0)
    return Script(
        Small(), lambda count: _set(_weight=number(count)), lambda model, x, y: _weighed(_loss(model, x, y))
    )  # fmt: skip


@case("global that is a length in forward=", "number")
def global_length() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return _loss(model, F.pad(x[:, :_length], (0, FEATURES - _length)), y)

    _set(_length=FEATURES)
    return Script(Small(), lambda count: _set(_length=FEATURES - count % 3), forward)


@case("global by which what is read gets into the loss", "flag")
def global_that_lets_a_read_in() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = _loss(model, x, y)
        read = loss.item()
        return loss * (read if _is_squared else 1.0)

    _set(_is_squared=False)
    return Script(Small(), lambda count: _set(_is_squared=flag(count)), forward)


@case("global that forward= branches on", "flag")
def global_flag() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = _loss(model, x, y)
        return loss * loss if _is_squared else loss

    _set(_is_squared=False)
    return Script(Small(), lambda count: _set(_is_squared=flag(count)), forward)


@case("global that loss_fn= hands on", "string")
def global_string() -> Script:
    _set(_reduction="mean")
    return Script(
        Small(),
        lambda count: _set(_reduction=("mean", "sum")[count % 2]),
        loss_fn=lambda outputs, y: F.mse_loss(outputs, y, reduction=_reduction),
    )


@case("global list, replaced", "list")
def global_list() -> Script:
    def loss_fn(outputs: Tensor, y: Tensor) -> Tensor:
        return sum((outputs - y).square().mean(0)[index] * one for index, one in enumerate(_weights))  # type: ignore[return-value]  # not 0

    _set(_weights=[1.0, 1.0])
    return Script(Small(), lambda count: _set(_weights=[1.0, number(count)]), loss_fn=loss_fn)


@case("global that is None at first", "number")
def global_none() -> Script:
    def loss_fn(outputs: Tensor, y: Tensor) -> Tensor:
        if _smoothing is None:
            return F.cross_entropy(outputs, y)
        return F.cross_entropy(outputs, y, label_smoothing=_smoothing)

    _set(_smoothing=None)
    return Script(
        Small(), lambda count: _set(_smoothing=0.05 * count), loss_fn=loss_fn, draw=classification
    )  # fmt: skip


@case("global function, replaced", "function")
def global_function() -> Script:
    class Model(Small):
        def between(self, x: Tensor) -> Tensor:
            return _activation(x)

    _set(_activation=torch.tanh)
    return Script(Model(), lambda count: _set(_activation=ACTIVATIONS[count % 3]), _loss)


@case("global module without training, replaced", "module")
def global_module() -> Script:
    def teacher(bias: float) -> nn.Module:
        linear = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        linear.weight.fill_(0.5), linear.bias.fill_(bias)
        return linear

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), _teacher(x) + y)

    _set(_teacher=teacher(0.0))
    return Script(Small(), lambda count: _set(_teacher=teacher(number(count))), forward)


@case("global dictionary's function, replaced", "function")
def global_table() -> Script:
    class Model(Small):
        def between(self, x: Tensor) -> Tensor:
            given: Tensor = _options["activation"](x)
            return given

    _set(_options={"activation": torch.tanh})
    return Script(Model(), lambda count: _options.update(activation=ACTIVATIONS[count % 3]), _loss)


@case("cell of a closure", "number")
def closure_number() -> Script:
    weight = 1.0

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return _loss(model, x, y) * weight

    def change(count: int) -> None:
        nonlocal weight
        weight = number(count)

    return Script(Small(), change, forward)


@case("cell of a closure", "function")
def closure_function() -> Script:
    criterion: Callable[..., Tensor] = F.mse_loss

    def change(count: int) -> None:
        nonlocal criterion
        criterion = (F.mse_loss, F.l1_loss, F.smooth_l1_loss)[count % 3]

    return Script(Small(), change, loss_fn=lambda outputs, y: criterion(outputs, y))


@case("list of a closure, appended to", "list")
def closure_list() -> Script:
    weights = [1.0]

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = _loss(model, x, y)
        return torch.stack([loss * weight for weight in weights]).sum()

    return Script(Small(), lambda count: weights.append(1.0), forward)


@case("cell of a decorator", "number")
def decorated() -> Script:
    weight = 1.0

    def scaled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def wrapped(*args: Any, **named: Any) -> Tensor:
            return function(*args, **named) * weight

        return wrapped

    def change(count: int) -> None:
        nonlocal weight
        weight = number(count)

    return Script(Small(), change, scaled(_loss))


@case("default of an argument", "number")
def default_argument() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return weigh(_loss(model, x, y))

    def weigh(loss: Tensor, weight: float = 1.0) -> Tensor:
        return loss * weight

    return Script(Small(), lambda count: setattr(weigh, "__defaults__", (number(count),)), forward)


@case("default of a keyword of loss_fn=", "number")
def default_keyword() -> Script:
    def loss_fn(outputs: Tensor, y: Tensor, *, weight: float = 1.0) -> Tensor:
        return F.mse_loss(outputs, y) * weight

    return Script(
        Small(), lambda count: setattr(loss_fn, "__kwdefaults__", {"weight": number(count)}), loss_fn=loss_fn
    )  # fmt: skip


@case("keyword of a partial", "number")
def partial_keyword() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor, weight: float) -> Tensor:
        return _loss(model, x, y) * weight

    given = functools.partial(forward, weight=1.0)
    return Script(Small(), lambda count: given.keywords.update(weight=number(count)), given)


@case("object that a partial is given", "number")
def partial_object() -> Script:
    def forward(settings: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weighed: Tensor = _loss(model, x, y) * settings.weight
        return weighed

    settings = types.SimpleNamespace(weight=1.0)
    return Script(
        Small(), lambda count: setattr(settings, "weight", number(count)), functools.partial(forward, settings)
    )  # fmt: skip


class _Annealed:
    """A loss with a weight that a schedule sets: the KL term of a VAE, say."""

    def __init__(self) -> None:
        self.beta = 0.0

    def step(self, count: int) -> None:
        self.beta = 0.1 * count

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(outputs, y) + self.beta * outputs.square().mean()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self(outputs, y)


@case("attribute of an object that is loss_fn=", "number")
def callable_object() -> Script:
    annealed = _Annealed()
    return Script(Small(), annealed.step, loss_fn=annealed)


@case("self of a bound method", "number")
def bound_method() -> Script:
    annealed = _Annealed()
    return Script(Small(), annealed.step, loss_fn=annealed.loss)


@case("attribute of a module that is loss_fn=", "number")
def loss_module_number() -> Script:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.0)
    return Script(
        Small(),
        lambda count: setattr(criterion, "label_smoothing", 0.05 * count),
        loss_fn=criterion,
        draw=classification,
    )


@case("attribute of a module that is loss_fn=", "string")
def loss_module_string() -> Script:
    criterion = nn.MSELoss()
    return Script(
        Small(), lambda count: setattr(criterion, "reduction", ("mean", "sum")[count % 2]), loss_fn=criterion
    )  # fmt: skip


@case("attribute of an imported module", "number")
def imported_number() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return _loss(model, x, y) * imported.weight

    imported.weight = 1.0
    return Script(Small(), lambda count: setattr(imported, "weight", number(count)), forward)


@case("attribute of an imported module", "function")
def imported_function() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return imported.penalty(_loss(model, x, y))

    imported.penalty = imported.plain
    return Script(
        Small(),
        lambda count: setattr(imported, "penalty", imported.squared if flag(count) else imported.plain),
        forward,
    )


@case("attribute of the function itself", "number")
def attribute_of_a_function() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weight: float = forward.weight  # type: ignore[attr-defined]  # the line below sets it
        return _loss(model, x, y) * weight

    forward.weight = 1.0  # type: ignore[attr-defined]
    return Script(Small(), lambda count: setattr(forward, "weight", number(count)), forward)


@case("code of the function itself", "function")
def code_of_a_function() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y)

    def other(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.l1_loss(model(x), y)

    codes = forward.__code__, other.__code__
    return Script(Small(), lambda count: setattr(forward, "__code__", codes[count % 2]), forward)


@case("context variable", "number")
def context_variable() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return _loss(model, x, y) * _context.get()

    _context.set(1.0)
    return Script(Small(), lambda count: _context.set(number(count)), forward)


@case("attribute of a threading.local", "number")
def thread_local() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weight: float = _local.weight
        return _loss(model, x, y) * weight

    _local.weight = 1.0
    return Script(Small(), lambda count: setattr(_local, "weight", number(count)), forward)


@case("iterator that forward= takes the next of", "number")
def iterator() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return _loss(model, x, y) * (1 + 0.1 * next(_schedule))

    _set(_schedule=itertools.count())
    return Script(Small(), lambda count: _set(_schedule=itertools.count(10 * count)), forward)


@case("environment variable", "string")
def environment_string() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return _loss(model, x, y) * float(os.environ["STALENESS_WEIGHT"])

    os.environ["STALENESS_WEIGHT"] = "1.0"
    return Script(
        Small(),
        lambda count: os.environ.update(STALENESS_WEIGHT=str(number(count % 3))),
        forward,
        undo=lambda: os.environ.pop("STALENESS_WEIGHT"),
    )


@case("environment variable that is there or not", "flag")
def environment_flag() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = _loss(model, x, y)
        return loss * loss if os.getenv("STALENESS_SQUARED") else loss

    def change(count: int) -> None:
        if flag(count):
            os.environ["STALENESS_SQUARED"] = "1"
        else:
            del os.environ["STALENESS_SQUARED"]

    return Script(Small(), change, forward, undo=lambda: os.environ.pop("STALENESS_SQUARED", None))


@case("Python's random numbers", "number")
def random_number() -> Script:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return _loss(model, x, y) * (1 + random.random())

    return Script(Small(), lambda count: random.seed(count), forward)


@case("guidance of a pipeline whose method is forward=", "number")
def pipeline_number() -> Script:
    class Pipeline:
        """As diffusers has it: what a network predicts with and without its condition, weighed."""

        def __init__(self) -> None:
            self.guidance_scale = 1.0

        @property
        def guided(self) -> bool:
            return self.guidance_scale > 1.0

        def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            outputs: Tensor = model(x)
            if self.guided:
                without: Tensor = model(torch.zeros_like(x))
                outputs = without + self.guidance_scale * (outputs - without)
            return F.mse_loss(outputs, y)

    pipeline = Pipeline()
    return Script(Small(), lambda count: setattr(pipeline, "guidance_scale", number(count)), pipeline.loss)


@case("prediction type of a noise scheduler's config", "string")
def prediction_type() -> Script:
    class Scheduler:
        def __init__(self) -> None:
            self.config = {"prediction_type": "epsilon"}

        def target(self, noise: Tensor, sample: Tensor) -> Tensor:
            kind = self.config["prediction_type"]
            if kind == "epsilon":
                return noise
            if kind == "sample":
                return sample
            return 0.8 * noise - 0.6 * sample

    scheduler = Scheduler()

    def draw(generator: torch.Generator, step: int) -> Batch:
        return tuple(torch.randn(4, size, generator=generator) for size in (FEATURES, CLASSES, CLASSES))

    def forward(model: nn.Module, x: Tensor, noise: Tensor, sample: Tensor) -> Tensor:
        return F.mse_loss(model(x), scheduler.target(noise, sample))

    kinds = ("epsilon", "v_prediction", "sample")
    return Script(
        Small(), lambda count: scheduler.config.update(prediction_type=kinds[count % 3]), forward, draw=draw
    )  # fmt: skip
