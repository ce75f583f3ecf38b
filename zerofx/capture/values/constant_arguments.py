"""The arguments that ``constant=`` names: they are equal in every step, so that a forward may read their values.

Such a tensor is an input of the graph like any other, and results that a forward computes from its values while it is
traced (``capture/values/known.py``) are constants: a graph without its self-loops has as many edges as these have. A
batch carries a hash of the values next to shapes and dtypes, so that other values are captured again, as another shape
is, and ranks with different values refuse.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from zerofx.errors import UsageError
from zerofx.ir.batch import Batch, hash_of
from zerofx.torch_private.tensors import version_of

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class ConstantArguments:
    """The constant arguments of a step.

    Args:
        names: arguments of the model's forward, or of ``forward``, which are given by position or by name; or parts of
            a batch as errors name them: ``batch[1]["edges"]``.
        model: the model.
        forward: called with the model and the batch; None if the model is called with the batch.
    """

    def __init__(self, names: tuple[str, ...], model: nn.Module, forward: Callable[..., Any] | None) -> None:
        self._places = {name: name for name in names}
        positional = _positional(model.forward) if forward is None else _positional(forward)[1:]
        for index, name in enumerate(positional):
            if name in self._places:
                self._places[name] = f"batch[{index}]"
        self._hashes: Any = WeakIdKeyDictionary()  # of tensors, with the version that each is of

    def add_hashes(self, batch: Batch) -> Batch:
        """``batch`` with the hashes of its constant tensors.

        Raises:
            UsageError: a name is that of no tensor in the batch, or of one without values.
        """
        hashes: dict[str, str] = {}
        for name, place in self._places.items():
            parts = dict(_parts(batch, name)) or dict(_parts(batch, place))
            if not parts:
                raise UsageError(
                    f"expected constant= to name arguments of the batch, found no tensor in {name!r} among "
                    f"{', '.join(batch.names) or 'none'}: give names of those, or of parameters of the forward"
                )
            hashes |= {part: self._hash(part, tensor) for part, tensor in parts.items()}
        return replace(batch, hashes=hashes) if hashes else batch

    def _hash(self, name: str, tensor: torch.Tensor) -> str:
        if tensor.is_meta:
            raise UsageError(f"expected values in what constant= names, found {name} on meta: make it on a real device")
        version = None if tensor.is_inference() else version_of(tensor)
        known = self._hashes.get(tensor)
        if version is None or known is None or known[0] != version:
            known = self._hashes[tensor] = version, hash_of(tensor)
        digest: str = known[1]
        return digest


def _positional(called: Callable[..., Any]) -> list[str]:
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # Python does not know
        return []
    return [parameter.name for parameter in signature.parameters.values() if parameter.kind in _POSITIONAL]


def _parts(batch: Batch, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an argument, by their names."""
    for part, tensor in zip(batch.names, batch.tensors, strict=True):
        if part == name or part.startswith((f"{name}[", f"{name}.")):
            yield part, tensor
