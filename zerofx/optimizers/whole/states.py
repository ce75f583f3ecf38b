"""The optimizer's states of one parameter as a tree: its tensors by path, and whatever else there is between them."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch

from zerofx.errors import OptimizerError

_PLAIN: Final = (type(None), bool, int, float, complex, str)
_SEQUENCES: Final[Mapping[str, Callable[[list[Any]], Any]]] = {"list": list, "tuple": tuple}


@dataclass(frozen=True)
class TensorAt:
    """A tensor of many elements, which is kept under ``path``: ``exp_avg``, ``GG.0``, ``exp_avg.codes``; ``stride``
    where it was saved and does not lie row by row, by which products round otherwise."""

    path: str
    stride: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wrapped:
    """A tensor subclass: its class, what its ``__tensor_flatten__`` says, and the plain tensors that it consists of."""

    kind: type[Any]
    context: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    inner: dict[str, Any]


@dataclass(frozen=True)
class Fields:
    """An object of a library's own, such as a projector, by its class and attributes."""

    kind: type[Any]
    values: dict[str, Any]


def split_tensors(entry: Any, *, all_tensors: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
    """An entry of ``optimizer.state`` with ``TensorAt`` in the place of tensors, and these by path.

    Tensors without dimensions, which are counters and factors, stay where they are unless ``all_tensors`` are asked
    for.

    Raises:
        OptimizerError: it holds something besides tensors, numbers, texts and containers of these.
    """
    splitter = _Splitter(all_tensors)
    return splitter.split(entry, ""), splitter.tensors


class _Splitter:
    """Collects ``tensors`` by path; a recursive closure is a cycle, and would hold them until a collector comes."""

    def __init__(self, all_tensors: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._all_tensors = all_tensors

    def split(self, value: Any, at: str) -> Any:
        """The tree of ``value``, which is found under ``at``."""
        if isinstance(value, torch.Tensor):
            if hasattr(value, "__tensor_flatten__"):
                names, context = value.__tensor_flatten__()
                inner = {name: self.split(getattr(value, name), _join(at, name)) for name in names}
                return Wrapped(type(value), context, tuple(value.shape), value.stride(), inner)
            if value.dim() == 0 and not self._all_tensors:
                return value.detach()
            self.tensors[at] = value if self._all_tensors else value.detach()
            return TensorAt(at)
        if isinstance(value, dict):
            copied = copy.copy(value)
            for key, item in value.items():
                copied[key] = self.split(item, _join(at, str(key)))
            return copied
        if type(value) is deque:
            return deque(self._split_each(value, at), value.maxlen)
        if type(value) in (list, tuple):
            return type(value)(self._split_each(value, at))
        if isinstance(value, (*_PLAIN, type, enum.Enum, torch.dtype, torch.device, torch.Size)):
            return value
        if type(value).__module__ != "builtins" and hasattr(value, "__dict__") and not callable(value):
            return Fields(type(value), {name: self.split(item, _join(at, name)) for name, item in vars(value).items()})
        raise OptimizerError(
            f"expected an optimizer that keeps tensors, numbers and texts of each parameter, found a "
            f"{type(value).__name__} in state[p]{at and f' at {at}'}: it can be neither saved nor moved"
        )

    def _split_each(self, values: Iterable[Any], at: str) -> list[Any]:
        return [self.split(item, _join(at, str(index))) for index, item in enumerate(values)]


def join_tensors(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The entry that ``split_tensors`` has taken apart; what a step may change in it is its own."""
    if isinstance(tree, TensorAt):
        given = tensors[tree.path]
        if tree.stride in ((), given.stride()):
            return given
        return torch.empty_strided(given.shape, tree.stride, dtype=given.dtype, device=given.device).copy_(given)
    if isinstance(tree, Wrapped):
        inner = {name: join_tensors(value, tensors) for name, value in tree.inner.items()}
        return tree.kind.__tensor_unflatten__(inner, tree.context, torch.Size(tree.size), tree.stride)
    if isinstance(tree, Fields):
        copied = object.__new__(tree.kind)
        vars(copied).update({name: join_tensors(value, tensors) for name, value in tree.values.items()})
        return copied
    if isinstance(tree, torch.Tensor):
        return _copy_number(tree)
    if isinstance(tree, dict):
        copied = copy.copy(tree)
        for key, item in tree.items():
            copied[key] = join_tensors(item, tensors)
        return copied
    if type(tree) is deque:
        return deque([join_tensors(item, tensors) for item in tree], tree.maxlen)
    if type(tree) in (list, tuple):
        return type(tree)([join_tensors(item, tensors) for item in tree])
    return tree


def _copy_number(number: torch.Tensor) -> torch.Tensor:
    """A copy of a 0-dim tensor; one on the host is in Python's memory, as its other counts are, which no plan counts:
    those of a step are there next to those of the step before, to which a failed one goes back."""
    if type(number) is not torch.Tensor or number.device.type != "cpu":
        return number.clone()
    in_bytes = bytearray(number.reshape(1).view(torch.uint8).tolist())
    return torch.frombuffer(in_bytes, dtype=number.dtype).view(())


def copy_entry(entry: Any) -> Any:
    """A copy of an entry of ``optimizer.state``; tensor subclasses need not know how to copy themselves."""
    tree, tensors = split_tensors(entry)
    return join_tensors(tree, {path: tensor.clone() for path, tensor in tensors.items()})


def tree_to_plain(tree: Any, tensors: Mapping[str, torch.Tensor] = MappingProxyType({})) -> Any:
    """A tree without its ``tensors`` as JSON, with the strides of those that do not lie row by row."""
    if isinstance(tree, TensorAt):
        given = tensors.get(tree.path)
        stride = [] if given is None or given.is_contiguous() else list(given.stride())
        return {"tensor": tree.path} | ({"stride": stride} if stride else {})
    if isinstance(tree, Wrapped):
        inner = {name: tree_to_plain(value, tensors) for name, value in tree.inner.items()}
        context = tree_to_plain(_plain_context(tree.context))
        return {"wrapped": tree.kind.__qualname__, "context": context, "size": list(tree.size),
                "stride": list(tree.stride), "inner": inner}  # fmt: skip
    if isinstance(tree, Fields):
        return {"object": tree.kind.__qualname__, "values": tree_to_plain(tree.values, tensors)}
    if isinstance(tree, enum.Enum):
        return {"enum": type(tree).__qualname__, "value": tree_to_plain(tree.value)}
    if isinstance(tree, torch.Size):
        return {"size": list(tree)}
    if isinstance(tree, (torch.dtype, torch.device)):
        return {type(tree).__name__: str(tree).removeprefix("torch.")}
    if isinstance(tree, torch.Tensor):
        return {"number": tree_to_plain(tree.item()), "dtype": str(tree.dtype).removeprefix("torch.")}
    if isinstance(tree, dict):
        return {"items": [[tree_to_plain(key, tensors), tree_to_plain(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, deque):
        return {"deque": [tree_to_plain(item, tensors) for item in tree], "maxlen": tree.maxlen}
    if isinstance(tree, (list, tuple)):
        return {type(tree).__name__: [tree_to_plain(item, tensors) for item in tree]}
    if isinstance(tree, float) and not (-float("inf") < tree < float("inf")):
        return {"float": repr(tree)}
    return tree


def tree_from_plain(plain: Any, kinds: Mapping[str, type[Any]]) -> Any:
    """The tree of ``tree_to_plain``; ``kinds`` are the tensor subclasses that the optimizer's own step makes, by name.

    Raises:
        OptimizerError: it was saved by an optimizer with states of another class.
    """
    if not isinstance(plain, dict):
        return plain
    if "tensor" in plain:
        return TensorAt(plain["tensor"], tuple(plain.get("stride", ())))
    if "enum" in plain:
        return _kind_named(plain["enum"], kinds)(tree_from_plain(plain["value"], kinds))
    if "wrapped" in plain:
        kind = _kind_named(plain["wrapped"], kinds)
        inner = {name: tree_from_plain(value, kinds) for name, value in plain["inner"].items()}
        context = tree_from_plain(plain["context"], kinds)
        return Wrapped(kind, context, tuple(plain["size"]), tuple(plain["stride"]), inner)
    if "object" in plain:
        return Fields(_kind_named(plain["object"], kinds), tree_from_plain(plain["values"], kinds))
    if "dtype" in plain and len(plain) == 1:
        return getattr(torch, plain["dtype"])
    if "size" in plain and len(plain) == 1:
        return torch.Size(plain["size"])
    if "device" in plain:
        return torch.device(plain["device"])
    if "number" in plain:
        return torch.tensor(tree_from_plain(plain["number"], kinds), dtype=getattr(torch, plain["dtype"]), device="cpu")
    if "items" in plain:
        return {tree_from_plain(key, kinds): tree_from_plain(value, kinds) for key, value in plain["items"]}
    if "deque" in plain:
        return deque([tree_from_plain(item, kinds) for item in plain["deque"]], plain["maxlen"])
    if "float" in plain:
        return float(plain["float"])
    ((kind, items),) = plain.items()
    return _SEQUENCES[kind]([tree_from_plain(item, kinds) for item in items])


def _kind_named(name: str, kinds: Mapping[str, type[Any]]) -> type[Any]:
    if name not in kinds:
        raise OptimizerError(
            f"expected states of a class that this optimizer makes ({', '.join(kinds) or 'plain tensors'}), found "
            f"{name}: load them into the optimizer that they are of"
        )
    return kinds[name]


def _parts(tree: Any) -> list[Any]:
    """The parts of a tree, one level down."""
    if isinstance(tree, (Wrapped, Fields)):
        return list((tree.inner if isinstance(tree, Wrapped) else tree.values).values())
    if isinstance(tree, dict):
        return list(tree.values())
    return list(tree) if isinstance(tree, (list, tuple, deque)) else []


def places_in(tree: Any) -> list[TensorAt]:
    """The places of a tree's tensors."""
    return [tree] if isinstance(tree, TensorAt) else [place for part in _parts(tree) for place in places_in(part)]


def paths_in(tree: Any) -> list[str]:
    """The paths of a tree's tensors."""
    return [place.path for place in places_in(tree)]


def paths_in_subclasses(tree: Any) -> set[str]:
    """The paths of the tensors that tensor subclasses in a tree consist of."""
    inner = set(paths_in(tree)) if isinstance(tree, Wrapped) else set()
    return inner.union(*map(paths_in_subclasses, _parts(tree)))


def kinds_in(tree: Any) -> dict[str, type[Any]]:
    """The classes of tensor subclasses, objects and enumerations in a tree, by name."""
    if isinstance(tree, enum.Enum):
        return {type(tree).__qualname__: type(tree)}
    own = {tree.kind.__qualname__: tree.kind} if isinstance(tree, (Wrapped, Fields)) else {}
    return own | {name: kind for part in _parts(tree) for name, kind in kinds_in(part).items()}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _plain_context(context: Any) -> Any:
    """The context of a tensor subclass, with sizes as lists."""
    if isinstance(context, torch.Size):
        return list(context)
    if isinstance(context, OrderedDict):
        return dict(context)
    if isinstance(context, (list, tuple)):
        return type(context)([_plain_context(item) for item in context])
    return context
