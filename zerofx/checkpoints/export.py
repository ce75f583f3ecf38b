"""Checkpoints in other formats: safetensors files as ``from_pretrained`` opens them, and DCP's own.

Tensors are assembled from all ranks' files one at a time, so that no more than the largest one is held.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zerofx.checkpoints.names import number_from, options_from
from zerofx.disk.checkpoint.boxes import Box
from zerofx.disk.checkpoint.marker import STATE, state_name
from zerofx.disk.checkpoint.reader import CheckpointReader, open_checkpoint
from zerofx.disk.checkpoint.shard_file import Entry, ShardWriter, sort_by_alignment
from zerofx.errors import CheckpointError, UsageError
from zerofx.precision import dtype_named

_INDEX = "model.safetensors.index.json"


def export_model(path: Path, out: Path, *, dtype: str | None = None, most_bytes: int = 5_000_000_000) -> None:
    """Write the model of the checkpoint at ``path`` into the folder ``out``.

    Tied tensors are written once, under the first of their names, as ``save_pretrained`` does. ``dtype``: the dtype of
    floating-point tensors; None for that of the checkpoint. ``most_bytes``: the limit for one file, unless a tensor is
    larger.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        UsageError: ``out`` is there already, or the model has complex tensors, which safetensors files have not.
        OSError: it cannot be written.
    """
    reader = _open_verified(path)
    marker = reader.marker
    tensors = marker.tensors
    if listed := [name for name, about in tensors.items() if about.torch_dtype.is_complex]:
        raise UsageError(
            f"expected tensors of real numbers, which safetensors files can hold, found complex ones ({listed[0]}): "
            f"give --format dcp"
        )
    files: list[list[Entry]] = [[]]
    for name, about in tensors.items():
        kind = dtype_named(dtype) if dtype is not None and about.torch_dtype.is_floating_point else about.torch_dtype
        entry = Entry(name, kind, about.shape, Box.whole(about.shape))
        if files[-1] and sum(other.num_bytes for other in files[-1]) + entry.num_bytes > most_bytes:
            files.append([])
        files[-1].append(entry)
    with _aside(out) as folder:
        places: dict[str, str] = {}
        for number, entries in enumerate(files, start=1):
            name = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
            ordered = sort_by_alignment(entries)
            with ShardWriter(folder / name, ordered, {}) as writer:
                for entry in ordered:
                    writer.write(entry, reader.read(entry.name, entry.box).to(entry.dtype))
                    places[entry.name] = name
                writer.finish()
        if len(files) > 1:
            total = sum(entry.num_bytes for entries in files for entry in entries)
            _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": places})
        _write_configurations(folder, marker.about, dtype)
    reader.close()


def export_distributed(path: Path, out: Path) -> None:
    """Write all of the checkpoint at ``path`` into ``out`` as ``torch.distributed.checkpoint`` does, with pickles.

    ``{"model": ..., "optimizer": ...}`` are there in the form of ``get_state_dict``, which ``set_state_dict`` takes.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or its optimizer's states have shapes of their own.
        UsageError: ``out`` is there already.
        OSError: it cannot be written.
    """
    # What DCP is made of takes long to import: only who uses it pays.
    from torch.distributed.checkpoint.state_dict_saver import save

    from zerofx.checkpoints.distributed import BoxedTensor
    from zerofx.checkpoints.pieces import Piece

    reader = _open_verified(path)
    marker = reader.marker
    if marker.optimizer.owned:
        reader.close()
        raise CheckpointError(
            f"expected an optimizer whose states have a value for each element, found {marker.optimizer.name}, whose "
            f"states have shapes of their own: export the weights, or load it and use optimizer.state_dict()"
        )

    def make_lazy(name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str, like: torch.dtype) -> BoxedTensor:
        stored = (*shape, 2) if like.is_complex else shape
        piece = Piece(name, 0, Box.whole(stored), torch.empty(stored, device="meta").stride())
        whole = torch.empty((), device="meta").expand(shape)
        of_model = dtype.to_complex() if like.is_complex else dtype
        return BoxedTensor(whole, of_model, [piece], [piece], lambda piece: reader.read(piece.source, piece.box, kind))

    model: dict[str, Any] = {}
    for name, about in marker.tensors.items():
        model[name] = make_lazy(name, about.shape, about.torch_dtype.to_real(), "model", about.torch_dtype)
    model |= {alias: model[name] for alias, name in marker.aliases.items()}
    scalars = marker.optimizer.scalars_of()
    states: dict[str, dict[str, Any]] = {}
    for name, listed in marker.optimizer.states.items():
        about = marker.tensors[name]
        numbers = scalars.get(name, ())
        states[name] = {n.state: number_from(n.value, n.dtype, torch.device("cpu")) for n in numbers}
        for state in listed:
            key = state_name(name, state)
            states[name][state] = make_lazy(key, about.shape, reader.dtype_of(key, STATE), STATE, about.torch_dtype)
    groups = [options_from(group) for group in marker.optimizer.groups]
    with _aside(out) as folder:
        whole = {"model": model, "optimizer": {"state": states, "param_groups": groups}}
        with warnings.catch_warnings():
            # torch says of any process by itself that it takes it for one.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(whole, checkpoint_id=folder, no_dist=True)
    reader.close()


def _open_verified(path: Path) -> CheckpointReader:
    reader = open_checkpoint(path)
    reader.verify(0, 1)
    return reader


@contextlib.contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """A folder that replaces ``out`` once all is written."""
    if out.exists():
        raise UsageError(
            f"expected to export to a folder that is not there yet, found {out}: remove it, or give another"
        )
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _write_configurations(folder: Path, about: dict[str, Any], dtype: str | None) -> None:
    config = about.get("config")
    if config is not None:
        named = {"architectures": [about["model"]]}
        _write_json(folder / "config.json", {**config, **named, **({"dtype": dtype} if dtype is not None else {})})
    if about.get("generation_config") is not None:
        _write_json(folder / "generation_config.json", about["generation_config"])


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
