"""The marker of a checkpoint: it certifies that the checkpoint is whole, and describes its contents.

It is written last: JSON with the size and hash of every other file, the names and shapes of the model's tensors, the
optimizer's hyperparameters, and its own hash. Hashes are XXH3 with 128 bits, which run at the speed of memory (SHA-256
takes 5 to 20 times as long) and detect errors of drives and networks; like a SHA-256 stored next to its data, they are
no protection against somebody who can write both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from zerofx.errors import CheckpointError
from zerofx.precision import dtype_name, dtype_named

MARKER = "checkpoint.json"
MODEL, STATE = "model", "state"
RANDOM, BUFFER, USER = "random.", "buffer.", "state."
"""How names begin of what each rank has of its own: generators, buffers that differ, and tensors of ``state=``."""


def file_name(kind: str, rank: int, num_ranks: int) -> str:
    """The name of a rank's file: ``kind`` is ``"model"`` for the model's tensors, ``"state"`` for everything else."""
    return f"{kind}-{rank:05}-of-{num_ranks:05}.safetensors"


def state_name(parameter: str, state: str) -> str:
    """The name in a file of an optimizer's state of a parameter, as in ``torch.distributed.checkpoint``."""
    return f"optimizer.state.{parameter}.{state}"


NO_PARAMETER = "*"  # in the place of a parameter's name: states of the optimizer itself
_FORMAT = "zerofx checkpoint 1"
MOST_MARKER_BYTES = 256 << 20


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the model; for a complex one, files hold real numbers with a last dimension of 2."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorInfo:
        return cls(dtype_name(tensor.dtype), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        try:
            return dtype_named(self.dtype)
        except ValueError as error:
            raise CheckpointError(str(error)) from error

    @property
    def shape_in_files(self) -> tuple[int, ...]:
        return (*self.shape, 2) if self.torch_dtype.is_complex else self.shape

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Scalar:
    """A number that the optimizer keeps for each of some parameters; ``dtype`` if it is a tensor, and a list of one if
    that is of shape [1]."""

    state: str
    value: Any
    dtype: str | None
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class OptimizerInfo:
    """The optimizer's part of a checkpoint.

    ``groups`` are its param groups as JSON, with names of parameters; ``states`` are the names of the states that have
    one value for each element, by parameter, and ``scalars`` the others. ``owned``: of parameters that are updated
    whole, by name, their states as JSON, with ``{"tensor": path}`` for tensors, which are in files, and the strides of
    those that do not lie row by row.
    """

    name: str
    groups: tuple[dict[str, Any], ...]
    states: dict[str, tuple[str, ...]]
    scalars: tuple[Scalar, ...]
    owned: dict[str, Any] = field(default_factory=dict)

    def owned_paths(self) -> dict[str, list[str]]:
        """The paths of the tensors of ``owned``, by parameter."""
        return {name: list(_paths_in(tree)) for name, tree in self.owned.items()}

    def scalars_of(self) -> dict[str, tuple[Scalar, ...]]:
        """The numbers kept for each parameter, by its name, in the order of their own names."""
        by_parameter: dict[str, tuple[Scalar, ...]] = {}
        for scalar in sorted(self.scalars, key=lambda scalar: scalar.state):
            for name in scalar.parameters:
                by_parameter[name] = (*by_parameter.get(name, ()), scalar)
        return by_parameter


def _paths_in(plain: Any) -> Iterator[str]:
    if isinstance(plain, dict) and "tensor" in plain and plain.keys() <= {"tensor", "stride"}:
        yield str(plain["tensor"])
    elif isinstance(plain, (dict, list)):
        for item in plain.values() if isinstance(plain, dict) else plain:
            yield from _paths_in(item)


@dataclass(frozen=True)
class Marker:
    """The contents of a checkpoint. ``files`` are by name: bytes, and hash. ``aliases``: names of tied tensors by their
    other names. ``about``: information that loading does not need, such as versions and the model's configuration.
    ``num_model`` consecutive ranks of the ``num_ranks`` shared one computation, in ``num_pipe`` stages, the first of
    which the first ranks had; a marker without them has 1."""

    num_ranks: int
    num_steps: int
    num_skipped: int
    saved_at: str
    tensors: dict[str, TensorInfo]
    buffers: tuple[str, ...]
    aliases: dict[str, str]
    optimizer: OptimizerInfo
    extra: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    num_model: int = 1
    num_pipe: int = 1

    def to_json(self) -> str:
        content = _canonical(asdict(self))
        return f'{{"format":"{_FORMAT}","xxh3_128":"{_hash(content)}","checkpoint":{content}}}\n'


def read_content(text: str, path: Path) -> Any:
    """The plain data that ``Marker.to_json`` has made ``text`` of; ``path`` is for the error.

    Raises:
        CheckpointError: it is no marker, damaged, or of another version.
    """
    damaged = f"expected {path} to be the marker of a checkpoint, found"
    try:
        read = json.loads(text)
        form, content, digest = read["format"], read["checkpoint"], read["xxh3_128"]
        digest_now = _hash(_canonical(content))
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{damaged} that it cannot be read ({type(error).__name__}: {error})") from error
    if form != _FORMAT:
        raise CheckpointError(f"{damaged} {form!r:.80} where this version reads {_FORMAT!r}")
    if digest_now != digest:
        raise CheckpointError(f"{damaged} that it was changed since: its hash is not {digest!r:.40}; load another one")
    return content


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _hash(content: str) -> str:
    return xxhash.xxh3_128_hexdigest(content.encode())
