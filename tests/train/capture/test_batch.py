"""Batches of all kinds are taken apart, named, and put together again."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import BatchEncoding, DynamicCache
from transformers.integrations.executorch import register_dynamic_cache_export_support
from transformers.modeling_outputs import BaseModelOutput

import zerofx
from zerofx.ir.batch import Batch, micro_batch


class Named(NamedTuple):
    x: Tensor
    scale: float


@dataclass(frozen=True)
class Data:
    x: Tensor
    scale: float = 2.0


class Own(dict[str, Any]):
    """A dict of the user's own class."""


class Flagged:
    """A tensor, and beside it something that pytree has as context."""

    def __init__(self, x: Tensor, flag: Any) -> None:
        self.x, self.flag = x, flag


class Unnamed:
    """Two tensors, registered with pytree without names."""

    def __init__(self, pair: list[Tensor]) -> None:
        self.pair = pair


@pytest.fixture(autouse=True, scope="module")
def registered_with_pytree() -> Iterator[None]:
    register_dynamic_cache_export_support()
    pytree.register_pytree_node(
        Flagged,
        lambda one: ([one.x], one.flag),
        lambda children, flag: Flagged(next(iter(children)), flag),
        flatten_with_keys_fn=lambda one: ([(pytree.GetAttrKey("x"), one.x)], one.flag),
    )
    pytree.register_pytree_node(
        Unnamed,
        lambda one: (one.pair, None),
        lambda children, _: Unnamed(list(children)),
        serialized_type_name="tests.Unnamed",  # under which it is taken out again
    )
    yield
    for kind in (Flagged, Unnamed, DynamicCache):
        pytree._deregister_pytree_node(kind)


def doubled(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return batch.rebuild(tuple(2 * tensor for tensor in batch.tensors))


X = torch.arange(3.0)


def test_the_first_tensor_with_a_dimension_says_how_many_samples_there_are() -> None:
    batch = Batch.from_call(
        (torch.tensor(0.5), {"ids": torch.zeros(4, 2)}), {"mask": torch.zeros(2, 4), "labels": torch.zeros(4)}
    )
    assert batch.size() == 4
    assert batch.divided_names() == {"batch[1]['ids']", "labels"}


def test_parts_are_views_in_order() -> None:
    x = torch.arange(12).view(6, 2)
    parts = [micro_batch(x, part, 3) for part in range(3)]
    assert torch.equal(torch.cat(parts), x)
    assert all(part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts)


CONTAINERS: dict[str, tuple[Any, str]] = {
    "tensor": (X, "batch[0]"),
    "tuple": ((X, 2.0), "batch[0][0]"),
    "list": ([3, X], "batch[0][1]"),
    "dict": ({"x": X, "scale": 2.0}, "batch[0]['x']"),
    "ordered": (OrderedDict(x=X), "batch[0]['x']"),
    "named tuple": (Named(X, 2.0), "batch[0].x"),
    "dataclass": (Data(X), "batch[0].x"),
    "user dict": (UserDict(x=X), "batch[0]['x']"),
    "own dict": (Own(x=X), "batch[0]['x']"),
    "encoding": (BatchEncoding({"x": X}), "batch[0]['x']"),
    "nested": ({"a": [Data(X)]}, "batch[0]['a'][0].x"),
}


def found(value: Any) -> list[Tensor]:
    """All tensors inside, by the ways that the containers themselves offer."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for key in value for t in found(value[key])]
    if isinstance(value, tuple | list):
        return [t for item in value for t in found(item)]
    return found(value.x) if isinstance(value, Data) else []


def test_children_without_names_have_numbers() -> None:
    batch = Batch.from_call((Unnamed([X, 2 * X]),), {})
    assert batch.names == ("batch[0][0]", "batch[0][1]")
    ((again,), _) = doubled(batch)
    assert torch.equal(again.pair[1], 4 * X)


@pytest.mark.parametrize(("given", "name"), CONTAINERS.values(), ids=CONTAINERS.keys())
def test_containers_are_rebuilt_around_other_tensors(given: Any, name: str) -> None:
    batch = Batch.from_call((given,), {"labels": X})
    assert batch.names == (name, "labels")
    (again,), keywords = doubled(batch)
    assert type(again) is type(given)
    assert torch.equal(found(again)[0], 2 * X)
    assert torch.equal(keywords["labels"], 2 * X)
    assert torch.equal(found(given)[0], X), "what was given is left alone"


def test_batches_that_the_model_would_treat_alike_are_described_alike() -> None:
    def described(*args: Any, **kwargs: Any) -> str:
        return Batch.from_call(args, kwargs).signature()

    assert described(X, a=1, b=X) == described(X + 1, b=X, a=1)
    different = [
        described(X),
        described(X, None),
        described((X,)),
        described([X]),
        described(x=X),
        described({"x": X}),
        described(X.double()),
        described(torch.zeros(3, 2).t()[0]),
        described(torch.zeros(2, 3)),
        described(X, 1, None),
        described(X, None, 1),
        described(X, True),
        described(X, 1.0),
        described(None, X),
        described(X, structure=1),
        described(X, structure=2),
        described(X, batch=[None]),
        described((None,), batch=X),
        described(a=[], b=()),
        described(b=[], a=()),
        described({"a": X, "b": X}),
        described({"b": X, "a": X}),
        described(UserDict(a=X, b=X)),
        described(UserDict(b=X, a=X)),
    ]
    assert len(set(different)) == len(different)


def test_no_two_leaves_have_one_name() -> None:
    batch = Batch.from_call(([X],), {"batch": [X], "batch[0][0]": X, "x": X, "two words": X})
    assert batch.names == ("batch[0][0]", "**['batch'][0]", "**['batch[0][0]']", "x", "**['two words']")
    assert Batch.from_call((), {"batch": [X]}).names == ("batch[0]",)


@pytest.mark.parametrize("keyword", ["mode", "structure", "training mode", "batch structure"])
def test_a_keyword_is_part_of_what_a_step_is_for_whatever_it_is_called(keyword: str) -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor, **chosen: str) -> Tensor:
            y: Tensor = self.linear(x)
            return y.sum() if chosen[keyword] == "sum" else y.square().sum()

    model = Chooses()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.0), backend="eager")
    expected = {word: model(X, **{keyword: word}).detach() for word in ("sum", "squares")}
    assert torch.equal(step(X, **{keyword: "sum"}), expected["sum"])
    with pytest.warns(zerofx.ZeroFXWarning, match="'squares' \\(was 'sum'\\)"):
        assert torch.equal(step(X, **{keyword: "squares"}), expected["squares"])


def test_a_keyword_called_batch_is_not_taken_for_what_is_passed_by_position() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor, batch: list[Tensor]) -> Tensor:
            loss: Tensor = self.linear(x - 2 * batch[0]).sum()
            return loss

    model = Adds()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.0), backend="eager")
    assert torch.equal(step(X, batch=[X + 1]), model(X, [X + 1]).detach())


class Plain:
    """Prints with its address."""


class Printed:
    """Prints with what is in it."""

    def __init__(self, what: int) -> None:
        self.what = what

    def __repr__(self) -> str:
        return f"Printed({self.what})"


def test_what_is_static_in_a_container_is_part_of_what_a_step_is_for() -> None:
    class Signed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, given: Flagged) -> Tensor:
            y: Tensor = self.linear(given.x).sum()
            return y if given.flag else -y

    model = Signed()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.0), backend="eager")
    expected = [model(Flagged(X, flag)).detach() for flag in (True, False)]
    assert torch.equal(step(Flagged(X, True)), expected[0])
    with pytest.warns(zerofx.ZeroFXWarning, match=r"Flagged of 1, False \(was .*Flagged of 1, True\)"):
        assert torch.equal(step(Flagged(X, False)), expected[1])


def test_static_parts_are_described_by_what_is_in_them() -> None:
    def described(static: Any) -> str:
        return Batch.from_call((Flagged(X, static),), {}).signature()

    for kind in (
        lambda n: n,
        lambda n: f"{n} at 0x7f",
        lambda n: [n, None, {"scale": float(n)}],
        lambda n: {f"{n}", "b", "c"},
        lambda n: (torch.float32, torch.add, Data)[:n],
        lambda n: Printed(n),
        lambda n: Data(None, n),  # type: ignore[arg-type]
        lambda n: (found, doubled)[n - 1],
    ):
        assert described(kind(1)) == described(kind(1)) != described(kind(2))
    assert described(None) != described(["None"]) != described([None])
    assert described({"a", "b", "c"}) == described({"c", "b", "a"})


@pytest.mark.parametrize(
    ("static", "match"),
    [
        (Plain(), r"found <.*Plain object at 0x.* in the pytree context of batch\[0\]: .*__repr__"),
        ([1, {"scale": X}], "found a Tensor, of which a part is printed, .*make it a child"),
        (lambda x: x, "found <function"),
    ],
    ids=["no text", "tensor", "lambda"],
)
def test_what_is_static_and_has_no_text_is_refused(static: Any, match: str) -> None:
    with pytest.raises(zerofx.UsageError, match=match):
        Batch.from_call((Flagged(X, static),), {})


def test_containers_of_libraries_are_described_alike_where_they_are_alike() -> None:
    def cache(num_layers: int) -> DynamicCache:
        made = DynamicCache()
        for layer in range(num_layers):
            made.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), layer)
        return made

    for kind in (
        lambda n: cache(n),
        lambda n: BaseModelOutput(last_hidden_state=torch.zeros(n)),
        lambda n: BatchEncoding({"x": torch.zeros(n)}),
        lambda n: defaultdict(lambda: n, x=torch.zeros(n)),
        lambda n: OrderedDict({Plain: torch.zeros(n)}),
        lambda n: torch.zeros(1, n).max(0),
    ):
        one, again, other = (Batch.from_call((kind(n),), {}) for n in (1, 1, 2))
        assert one.tensors and " at 0x" not in one.signature()
        assert one.signature() == again.signature() != other.signature()
        (rebuilt,), _ = doubled(one)
        assert type(rebuilt) is type(kind(1))


class Reads(nn.Module):
    """Reads its input out of whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, batch: Any, scale: float = 1.0) -> Tensor:
        loss: Tensor = self.linear(found(batch)[0]).sum() * scale
        return loss


@pytest.mark.parametrize("kind", ["encoding", "user dict", "dataclass", "named tuple"])
def test_a_model_is_given_the_container_it_expects(kind: str) -> None:
    model = Reads()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.0), backend="eager")
    given, _ = CONTAINERS[kind]
    expected = model(given, scale=3.0).detach()
    assert torch.equal(step(given, scale=3.0), expected)


def test_an_in_place_change_of_the_batch_is_named() -> None:
    class Changes(Reads):
        def forward(self, batch: Any, scale: float = 1.0) -> Tensor:
            batch["x"].mul_(2)
            return super().forward(batch, scale)

    model = Changes()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    match = r"in-place change of batch\[0\]\['x'\]\. (?s:.)*test_batch.py:\d+: .*mul_"
    with pytest.raises(zerofx.CaptureError, match=match):
        step({"x": X.clone()})
