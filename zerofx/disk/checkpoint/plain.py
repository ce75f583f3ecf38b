"""Nested Python values as JSON, without pickles: numbers, words, lists, dictionaries, and references to tensors.

Values that JSON lacks are written as a dictionary with one key that begins with ``$``: a tuple as ``{"$tuple":
[...]}``, bytes in base 64. Tensors are taken out, and written as ``{"$tensor": "name"}``.
"""

from __future__ import annotations

import base64
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from zerofx.errors import CheckpointError
from zerofx.precision import dtype_named

_NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_plain(value: Any, what: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Convert ``value`` to JSON; its tensors are added to ``tensors`` by name. ``what`` names it in errors.

    Raises:
        CheckpointError: a part of it is neither JSON nor a tensor; names the part and its type.
    """
    match value:
        case None | bool() | str():
            return value
        case np.generic():
            return to_plain(value.item(), what, tensors)
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        case complex():
            return {"$complex": [to_plain(part, what, tensors) for part in (value.real, value.imag)]}
        case torch.Tensor():
            name = f"{what}#{len(tensors)}"
            tensors[name] = value.detach()
            return {"$tensor": name}
        case np.ndarray():
            try:
                numbers = torch.from_numpy(np.asarray(value, order="C"))
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"expected arrays of numbers that torch has as well in what is saved, found one of {value.dtype} "
                    f"at {what}: save its tolist(), or leave it out of the state"
                ) from error
            return {"$array": to_plain(numbers, what, tensors)}
        case bytes() | bytearray():
            return {"$bytes": base64.b64encode(value).decode()}
        case torch.dtype() | torch.device():
            return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
        case list() | tuple() | set() | frozenset() | deque():
            items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            listed = [to_plain(item, f"{what}[{number}]", tensors) for number, item in enumerate(items)]
            return listed if isinstance(value, list) else {f"${_collection(value)}": listed}
        case dict():
            return _dictionary(value, what, tensors)
    raise CheckpointError(
        f"expected numbers, words, tensors, lists and dictionaries of them in what is saved, found a "
        f"{type(value).__module__}.{type(value).__qualname__} at {what}: leave it out of the state, or save what it is "
        f"made of; nothing is pickled"
    )


def is_plain(value: object) -> bool:
    """True if ``to_plain`` accepts values of this kind, whatever they contain."""
    numbers = (bool, int, float, complex, np.generic, np.ndarray, torch.Tensor)
    return value is None or isinstance(
        value, (*numbers, str, bytes, bytearray, torch.dtype, torch.device, list, tuple, set, frozenset, deque, dict)
    )


def _no_tensor(name: str) -> torch.Tensor:
    raise CheckpointError(f"expected values without tensors, found one called {name}: zerofx has written it wrongly")


def from_plain(plain: Any, tensor_of: Callable[[str], torch.Tensor] = _no_tensor) -> Any:
    """The value that ``to_plain`` was given; ``tensor_of`` returns a tensor by its name.

    Dictionaries, lists and tuples are plain ones, whatever subclass they had.

    Raises:
        CheckpointError: ``to_plain`` cannot have written it.
    """
    try:
        return _value(plain, tensor_of)
    except (AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"expected values as they were saved, found {plain!r:.80}, which is none ({type(error).__name__}: {error})"
        ) from error


def _value(plain: Any, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(plain, list):
        return [_value(item, tensor_of) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1 or not next(iter(plain)).startswith("$"):
        return {key: _value(item, tensor_of) for key, item in plain.items()}
    ((kind, inner),) = plain.items()
    match kind:
        case "$float":
            return _NUMBERS[inner]
        case "$complex":
            return complex(*(_value(part, tensor_of) for part in inner))
        case "$tensor":
            return tensor_of(inner)
        case "$number":
            number, dtype, shape = inner
            return torch.full(shape, _value(number, tensor_of), dtype=dtype_named(dtype), device="cpu")
        case "$array":
            return _value(inner, tensor_of).numpy()
        case "$bytes":
            return base64.b64decode(inner, validate=True)
        case "$dtype":
            return dtype_named(inner)
        case "$device":
            return torch.device(inner)
        case "$tuple" | "$set" | "$frozenset" | "$deque":
            kinds: dict[str, Callable[..., Any]] = {
                "$tuple": tuple, "$set": set, "$frozenset": frozenset, "$deque": deque
            }  # fmt: skip
            return kinds[kind](_value(item, tensor_of) for item in inner)
        case "$dict":
            return {_value(key, tensor_of): _value(item, tensor_of) for key, item in inner}
    raise ValueError(f"{kind} is no kind of value")


def _collection(value: Any) -> str:
    return next(kind.__name__ for kind in (tuple, set, frozenset, deque) if isinstance(value, kind))


def _dictionary(value: Mapping[Any, Any], what: str, tensors: dict[str, torch.Tensor]) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: to_plain(item, f"{what}.{key}", tensors) for key, item in value.items()}
    pairs = [
        [to_plain(key, f"{what}.{key}", tensors), to_plain(item, f"{what}.{key}", tensors)]
        for key, item in value.items()
    ]
    return {"$dict": pairs}
