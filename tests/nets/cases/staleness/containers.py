"""What a model's forward reads of dictionaries, lists and sets: items, lengths, order, keys, membership."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nets.cases.staleness.script import WIDTH, Losing, Script, case, classification, flag, number


def _script(of_model: Any, weigh: Callable[[Any, Tensor], Tensor], change: Callable[[Any, int], object]) -> Script:
    """A script whose model has ``of_model`` as ``held``, of which ``weigh`` reads something."""

    class Model(Losing):
        def __init__(self) -> None:
            super().__init__()
            self.held = of_model

        def weigh(self, loss: Tensor) -> Tensor:
            return weigh(self.held, loss)

    return Script(Model(), lambda count: change(of_model, count))


@case("item of a dictionary of the model", "number")
def dict_number() -> Script:
    return _script({"kl": 1.0}, lambda held, loss: loss * held["kl"], lambda held, count: held.update(kl=number(count)))


@case("item of a dictionary in a dictionary", "number")
def nested_dict() -> Script:
    return _script(
        {"loss": {"kl": 1.0}},
        lambda held, loss: loss * held["loss"]["kl"],
        lambda held, count: held["loss"].update(kl=number(count)),
    )


@case("item of a list in a dictionary, which get() reads", "number")
def list_in_dict() -> Script:
    return _script(
        {"loss": [1.0]},
        lambda held, loss: loss * held.get("loss")[0],
        lambda held, count: held["loss"].__setitem__(0, number(count)),
    )


@case("item of a dictionary that is not there at first", "number")
def dict_absent() -> Script:
    return _script(
        {}, lambda held, loss: loss * (1 + held.get("kl", 0.0)), lambda held, count: held.update(kl=number(count))
    )


@case("keys of a dictionary, iterated over", "list")
def dict_keys() -> Script:
    def weigh(held: Any, loss: Tensor) -> Tensor:
        return torch.stack([loss * len(name) for name in held]).sum()

    return _script({"kl": None}, weigh, lambda held, count: held.update({f"term{count % 3}": None}))


@case("items of a dictionary, given as keywords", "number")
def dict_keywords() -> Script:
    class Model(Losing):
        def __init__(self) -> None:
            super().__init__()
            self.options: dict[str, Any] = {"label_smoothing": 0.0}

        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]  # it takes the targets, too
            return F.cross_entropy(self.outputs(x), y, **self.options)

    model = Model()
    return Script(model, lambda count: model.options.update(label_smoothing=0.05 * count), draw=classification)


@case("function in a dictionary of the model", "function")
def dict_function() -> Script:
    def squared(loss: Tensor) -> Tensor:
        return loss * loss

    def halved(loss: Tensor) -> Tensor:
        return loss / 2

    return _script(
        {"reward": torch.neg},
        lambda held, loss: held["reward"](loss),
        lambda held, count: held.update(reward=(torch.neg, squared, halved)[count % 3]),
    )


@case("item of a list of the model", "number")
def list_number() -> Script:
    def change(held: Any, count: int) -> None:
        held[1] = number(count)

    return _script([1.0, 1.0], lambda held, loss: loss * held[0] + held[1] * loss, change)


@case("items of a list of the model, reordered", "list")
def list_reordered() -> Script:
    def weigh(held: Any, loss: Tensor) -> Tensor:
        for one in held:
            loss = loss * one if one > 1 else loss + one
        return loss

    return _script([3.0, 0.5, 0.25], weigh, lambda held, count: held.insert(0, held.pop()))


@case("length of a list that grows", "list")
def list_length() -> Script:
    return _script([], lambda held, loss: loss * (1 + len(held)), lambda held, count: held.append(count))


@case("tuple of the model, replaced", "list")
def tuple_replaced() -> Script:
    class Model(Losing):
        weights: tuple[float, ...] = (1.0,)

        def weigh(self, loss: Tensor) -> Tensor:
            return loss * sum(self.weights)

    model = Model()
    return Script(model, lambda count: setattr(model, "weights", (1.0,) * (1 + count % 3)))


@case("membership of a set", "flag")
def set_membership() -> Script:
    def change(held: Any, count: int) -> None:
        if flag(count):
            held.add("square")
        else:
            held.discard("square")

    return _script(set[str](), lambda held, loss: loss * loss if "square" in held else loss, change)


@case("last item of a deque", "list")
def deque_list() -> Script:
    return _script(
        collections.deque([1.0] * 3, maxlen=3), lambda held, loss: loss * held[-1],
        lambda held, count: held.append(number(count)),
    )  # fmt: skip


@case("item of a defaultdict", "number")
def counter_number() -> Script:
    return _script(
        collections.defaultdict[str, int](int), lambda held, loss: loss * (1 + held["seen"]),
        lambda held, count: held.update(seen=count),
    )  # fmt: skip


class _Deep(Losing):
    """Layers of one width, run as ``run`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.depth, self.order = 3, [0, 1, 2]
        self.plain = list(self.layers)

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def between(self, x: Tensor) -> Tensor:
        return self.run(x)


@case("number of layers that run", "number")
def depth() -> Script:
    class Model(_Deep):
        def run(self, x: Tensor) -> Tensor:
            for layer in self.layers[: self.depth]:
                x = torch.tanh(layer(x))
            return x

    model = Model()
    return Script(model, lambda count: setattr(model, "depth", 1 + count % 3))


@case("layer that is skipped, by its number", "number")
def skipped_layer() -> Script:
    class Model(_Deep):
        def run(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                x = x if index == self.depth else torch.tanh(layer(x))
            return x

    model = Model()
    model.depth = 0
    return Script(model, lambda count: setattr(model, "depth", count % 3))


@case("order of layers, as a list of numbers", "list")
def layer_order() -> Script:
    class Model(_Deep):
        def run(self, x: Tensor) -> Tensor:
            for index in self.order:
                x = torch.tanh(self.layers[index](x))
            return x

    model = Model()
    return Script(model, lambda count: model.order.insert(0, model.order.pop()))


@case("plain list of modules, reordered", "module")
def module_order() -> Script:
    class Model(_Deep):
        def run(self, x: Tensor) -> Tensor:
            for layer in self.plain:
                x = torch.tanh(layer(x))
            return x

    model = Model()
    return Script(model, lambda count: model.plain.insert(0, model.plain.pop()))


@case("how often a layer runs", "number")
def iterations() -> Script:
    class Model(_Deep):
        def run(self, x: Tensor) -> Tensor:
            for _ in range(self.depth):
                x = torch.tanh(self.layers[0](x))
            return x

    model = Model()
    return Script(model, lambda count: setattr(model, "depth", 1 + count % 3))
