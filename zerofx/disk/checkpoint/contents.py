"""Checks of a marker and of the headers of files: of each by itself, and of one against the other.

A checkpoint may come from anybody, with valid hashes: everything that loading relies on is checked before it begins.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zerofx.disk.checkpoint.boxes import Box
from zerofx.disk.checkpoint.marker import (
    BUFFER,
    MODEL,
    NO_PARAMETER,
    RANDOM,
    STATE,
    USER,
    Marker,
    OptimizerInfo,
    file_name,
    read_content,
    state_name,
)
from zerofx.disk.checkpoint.plain import from_plain
from zerofx.disk.checkpoint.shard_file import Entry, ShardFile
from zerofx.errors import CheckpointError
from zerofx.json_format import from_data
from zerofx.precision import dtype_named

_TOO_LARGE = 1 << 63
_PRIME = (1 << 61) - 1  # random numbers below it tell two covers apart but once in about 2^58 times
_HASH = re.compile(r"[0-9a-f]{32}")


def parse_marker(text: str, path: Path) -> Marker:
    """The marker that ``Marker.to_json`` has made ``text`` of, checked; ``path`` is for the error.

    Raises:
        CheckpointError: it is none, damaged, of another version, or says what cannot be.
    """
    content = read_content(text, path)
    try:
        marker = from_data(Marker, content, "checkpoint")
        _check_marker(marker)
    except (CheckpointError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"expected {path} to be the marker of a checkpoint, found that it is not like one: {error}"
        ) from error
    return marker


def _check_marker(marker: Marker) -> None:
    """Check all that a marker says by itself, beyond the types of its fields.

    Raises:
        ValueError: says what is impossible.
        CheckpointError: a value cannot have been saved.
    """
    _need(len(marker.files) == 2 * marker.num_ranks > 0, f"{len(marker.files)} files of {marker.num_ranks} ranks")
    names = {file_name(kind, rank, marker.num_ranks) for kind in (MODEL, STATE) for rank in range(marker.num_ranks)}
    _need(marker.files.keys() == names, f"a file that is called {min(marker.files.keys() ^ names, default='')!r:.80}")
    for name, (size, digest) in marker.files.items():
        _need(8 <= size < _TOO_LARGE and bool(_HASH.fullmatch(digest)), f"{name} of {size} bytes, hash {digest!r:.40}")
    for sharing in (marker.num_model, marker.num_pipe):
        _need(sharing > 0 and marker.num_ranks % sharing == 0, f"{sharing} ranks that share a computation")
    for count in (marker.num_steps, marker.num_skipped):
        _need(0 <= count < _TOO_LARGE, f"{count} steps")
    for name, about in marker.tensors.items():
        size = math.prod(about.shape) * about.torch_dtype.itemsize
        _need(all(0 <= length < _TOO_LARGE for length in about.shape) and size < _TOO_LARGE, f"{name} as {about}")
    _need_names(marker.buffers, marker.tensors, "buffers")
    for alias, name in marker.aliases.items():
        _need(name in marker.tensors and alias not in marker.tensors, f"{alias!r:.80} as another name of {name!r:.80}")
    _check_optimizer(marker.optimizer, marker.tensors.keys() - set(marker.buffers))
    _need(isinstance(marker.extra.get("numbers", {}), dict), "numbers that have no names")
    modules = marker.extra.get("modules", {})
    _need(isinstance(modules, dict), "extra state of modules that have no names")
    from_plain(modules)
    for about_model, kinds in (("config", dict | None), ("generation_config", dict | None), ("model", str | None)):
        _need(isinstance(marker.about.get(about_model), kinds), f"a {about_model} of another kind")


def _check_optimizer(optimizer: OptimizerInfo, parameters: Iterable[str]) -> None:
    known, listed = set(parameters), []
    for group in optimizer.groups:
        own = group.get("params")
        _need(isinstance(own, list) and all(isinstance(name, str) for name in own), "a param group without names")
        listed += group["params"]
        from_plain({key: value for key, value in group.items() if key != "params"})
    _need_names(listed, known, "parameters of param groups")
    _need_names(optimizer.states, known, "parameters with states")
    for name, states in optimizer.states.items():
        _need(len(set(states)) == len(states), f"states of {name!r:.80} twice")
    of_none = {name for name in optimizer.owned if name.startswith(NO_PARAMETER)}
    _need_names(
        optimizer.owned, (known | of_none) - optimizer.states.keys(), "parameters with states of their own shapes"
    )
    for name, paths in optimizer.owned_paths().items():
        _need(len(set(paths)) == len(paths), f"states of {name!r:.80} twice")
    seen = {(name, state) for name, states in optimizer.states.items() for state in states}
    for scalar in optimizer.scalars:
        _need_names(scalar.parameters, known, f"parameters with {scalar.state!r:.80}")
        mine = {(name, scalar.state) for name in scalar.parameters}
        _need(not mine & seen, f"state {scalar.state!r:.80} of one parameter twice")
        seen |= mine
        value = from_plain(scalar.value)
        if scalar.dtype is not None:
            while isinstance(value, list) and len(value) == 1:  # of a tensor of shape [1]
                (value,) = value
            _need(isinstance(value, bool | int | float | complex), f"{scalar.state!r:.80} of a tensor without a number")
            try:
                torch.tensor(value, dtype=dtype_named(scalar.dtype), device="cpu")
            except (OverflowError, RuntimeError, TypeError) as error:
                raise ValueError(f"{scalar.state!r:.80} cannot be: {error}") from error
    # Optimizers make all states of a parameter at once: those of a group that have the same ones have the same numbers.
    numbers = {name: {scalar.state for scalar in of_one} for name, of_one in optimizer.scalars_of().items()}
    for group in optimizer.groups:
        first: dict[tuple[str, ...], set[str]] = {}
        for name in group["params"]:
            if of_elements := optimizer.states.get(name):
                own_numbers = numbers.get(name, set())
                _need(
                    first.setdefault(of_elements, own_numbers) == own_numbers,
                    f"other numbers of {name!r:.80} than of its group",
                )


def _need_names(names: Iterable[str], known: Iterable[str] | Mapping[str, Any], what: str) -> None:
    listed, among = list(names), set(known)
    _need(len(set(listed)) == len(listed), f"{what} that are named twice")
    if unknown := [name for name in listed if name not in among]:
        raise ValueError(f"{what} that are not there: {unknown[0]!r:.80}")


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def check_contents(marker: Marker, kind: str, shards: Sequence[ShardFile], place: Path) -> None:
    """Check the headers of all ranks' files of a kind: each tensor that the marker names is there once, with its shape
    and kind of dtype, and no other.

    Raises:
        CheckpointError: names the tensor.
    """
    try:
        expected: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {}
        if kind == MODEL:
            expected = {name: (about.shape_in_files, about.torch_dtype) for name, about in marker.tensors.items()}
        else:
            for name, states in marker.optimizer.states.items():
                shape = marker.tensors[name].shape_in_files
                expected |= {state_name(name, state): (shape, None) for state in states}
        owned = set[str]()
        if kind == STATE:
            of_parameters = marker.optimizer.owned_paths().items()
            owned = {state_name(name, path) for name, paths in of_parameters for path in paths}
        entries: dict[str, list[Entry]] = {}
        for shard in shards:
            for name, listed in shard.placed.items():
                if name in expected or name in owned:
                    entries.setdefault(name, []).extend(placed.entry for placed in listed)
                else:
                    _check_own(marker, kind, name, [placed.entry for placed in listed])
        for name, (shape, dtype) in expected.items():
            _check_whole(name, shape, dtype, entries.get(name, []))
        for name in sorted(owned):
            boxes = [entry.box for entry in entries.get(name, [])]
            _need(
                boxes == [Box.whole(entry.shape) for entry in entries.get(name, [])[:1]] != [], f"{name!r:.80} in parts"
            )
    except ValueError as error:
        raise CheckpointError(
            f"expected the {kind} files of {place} to have what its marker says, found {error}: they are not of this "
            f"checkpoint; load another one. Nothing has been loaded"
        ) from error


def _check_whole(name: str, shape: tuple[int, ...], dtype: torch.dtype | None, entries: Sequence[Entry]) -> None:
    for entry in entries:
        if entry.shape != shape or entry.dtype != entries[0].dtype:
            raise ValueError(f"{name!r:.80} as {entry.dtype} {list(entry.shape)} where it is {list(shape)}")
        if dtype is not None and not _are_alike(entry.dtype, dtype):
            raise ValueError(f"{name!r:.80} as {entry.dtype} where it is {dtype}")
    if math.prod(shape) and not _covers([entry.box for entry in entries], Box.whole(shape)):
        raise ValueError(f"that boxes of {name!r:.80} are missing, or overlap")


def _are_alike(stored: torch.dtype, of_model: torch.dtype) -> bool:
    real = of_model.to_real() if of_model.is_complex else of_model
    return stored == real or (stored.is_floating_point and real.is_floating_point)


def _covers(boxes: Sequence[Box], whole: Box) -> bool:
    """True if boxes inside ``whole`` cover each of its elements exactly once.

    Each element gets a product of random numbers, one for its place along each dimension: the sums over all boxes and
    over the whole are equal if each element is there once, and only by chance otherwise.
    """
    sums: list[dict[int, int]] = []
    for dim, size in enumerate(whole.sizes):
        ends = {0, size} | {box.offsets[dim] for box in boxes} | {box.offsets[dim] + box.sizes[dim] for box in boxes}
        sums.append({end: secrets.randbelow(_PRIME) for end in ends})

    def measure(box: Box) -> int:
        product = 1
        for dim, (begin, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            product = product * (sums[dim][begin + size] - sums[dim][begin]) % _PRIME
        return product

    return sum(map(measure, boxes)) % _PRIME == measure(whole)


def _check_own(marker: Marker, kind: str, name: str, entries: Sequence[Entry]) -> None:
    """Check an entry of a rank's own: a generator's state, a buffer, or a tensor of the user's."""
    (entry, *more) = entries
    what = f"{entry.dtype} {list(entry.shape)} for {name!r:.80}"
    if kind == MODEL or more or entry.box != Box.whole(entry.shape):
        raise ValueError(f"{name!r:.80}, which the marker does not know, or in parts")
    if name.startswith(RANDOM):
        _need(entry.dtype == torch.uint8 and len(entry.shape) == 1, what)
    elif name.startswith(BUFFER):
        buffer = name.removeprefix(BUFFER)
        _need(buffer in marker.buffers, f"{name!r:.80}, which is no buffer")
        about = marker.tensors[buffer]
        _need(entry.shape == about.shape_in_files and _are_alike(entry.dtype, about.torch_dtype), what)
    else:
        _need(name.startswith(USER), f"{name!r:.80}, which the marker does not know")
