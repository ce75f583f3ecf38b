"""Files with a model's weights, read a few rows at a time: safetensors, and torch's distributed checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zerofx.disk.checkpoint.boxes import Box
from zerofx.disk.checkpoint.folder import LATEST
from zerofx.disk.checkpoint.marker import MARKER
from zerofx.disk.checkpoint.reader import open_checkpoint
from zerofx.disk.checkpoint.shard_file import DTYPES
from zerofx.errors import CheckpointError, UsageError
from zerofx.units import first_few

if TYPE_CHECKING:
    from safetensors import safe_open

_KINDS = (
    "a .safetensors file, a folder with such files, a model.safetensors.index.json, or a folder that "
    "step.save_checkpoint or torch.distributed.checkpoint has saved to"
)


@dataclass(frozen=True)
class FileTensor:
    """A tensor's entry in a file; ``dtype`` is None for 8-bit floats, whose scales are tensors of their own."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None


class WeightFiles(Protocol):
    """Tensors by name, of which any rows can be read."""

    path: Path
    tensors: Mapping[str, FileTensor]

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` along the first dimension, on the CPU; all of a tensor without dimensions.

        Raises:
            Exception: what the library raises for a file that cannot be read.
        """
        ...

    def release(self) -> None:
        """Close what is open; it is opened again as needed."""
        ...


def open_weights(path: Path) -> WeightFiles:
    """The files at ``path``, by what is there; only their headers are read.

    Raises:
        UsageError: there are none, or they cannot be read.
    """
    if not path.exists():
        raise UsageError(f"expected weights={str(path)!r} to be {_KINDS}, found nothing there")
    try:
        if path.is_file():
            files = _index(path) if path.suffix == ".json" else [path] if path.suffix == ".safetensors" else []
        elif (path / MARKER).is_file() or (path / LATEST).is_file():
            return CheckpointFiles(path)
        elif (path / ".metadata").is_file():
            return DistributedFiles(path)
        else:
            indices = sorted(path.glob("*.safetensors.index.json"))
            files = _index(indices[0]) if len(indices) == 1 else sorted(path.glob("*.safetensors"))
        if files:
            return SafetensorsFiles(path, files)
    except (CheckpointError, UsageError):
        raise
    except ModuleNotFoundError as error:
        raise UsageError(
            f"expected the library that reads weights={str(path)!r} to be installed, found no module {error.name}: "
            f"pip install 'zerofx[safetensors]'"
        ) from error
    except Exception as error:
        raise UsageError(
            f"expected weights={str(path)!r} to be {_KINDS}, found that it cannot be read: {type(error).__name__}: "
            f"{error}"
        ) from error
    raise UsageError(
        f"expected weights={str(path)!r} to be {_KINDS}, found none of them: convert the file with "
        f"safetensors.torch.save_file"
    )


def _index(path: Path) -> list[Path]:
    """The files that an index of Hugging Face's names."""
    names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise UsageError(
            f"expected the {len(names)} files that {path} names next to it, found that {len(missing)} are missing: "
            f"{first_few(missing)}"
        )
    return [path.parent / name for name in names]


class SafetensorsFiles:
    """Tensors of one or more safetensors files, read through the library's ``get_slice``."""

    def __init__(self, path: Path, files: list[Path]) -> None:
        self.path = path
        self._places: dict[str, Path] = {}
        self._open: tuple[Path, safe_open] | None = None
        tensors: dict[str, FileTensor] = {}
        for file in files:
            opened: Any = self._open_file(file)
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if name in self._places:
                    raise UsageError(
                        f"expected each tensor in one of the {len(files)} files at {path}, found {name} in "
                        f"{self._places[name].name} and {file.name}: give one of the files, or their index"
                    )
                header = opened.get_slice(name)
                tensors[name] = FileTensor(tuple(header.get_shape()), _dtype_of(str(header.get_dtype())))
                self._places[name] = file
        self.tensors: Mapping[str, FileTensor] = tensors
        self.release()

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        opened: Any = self._open_file(self._places[name])
        if not self.tensors[name].shape:
            whole: torch.Tensor = opened.get_tensor(name)
            return whole
        part: torch.Tensor = opened.get_slice(name)[start:stop]
        return part

    def release(self) -> None:
        self._open = None

    def _open_file(self, file: Path) -> safe_open:
        # Only who loads weights needs the library.
        from safetensors import safe_open

        if self._open is None or self._open[0] != file:
            self._open = (file, safe_open(file, framework="pt", device="cpu"))
        return self._open[1]


def _dtype_of(name: str) -> torch.dtype | None:
    dtype = DTYPES.get(name)
    return None if dtype is None or (dtype.is_floating_point and dtype.itemsize == 1) else dtype


class CheckpointFiles:
    """The model's tensors in a checkpoint of zerofx's, by any number of ranks; of several in a folder the latest."""

    def __init__(self, path: Path) -> None:
        self._reader = open_checkpoint(path)
        self._reader.check_contents()
        self.path = self._reader.place
        tensors = self._reader.marker.tensors
        self.tensors: Mapping[str, FileTensor] = {
            name: FileTensor(about.shape, about.torch_dtype) for name, about in tensors.items()
        }

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        about = self._reader.marker.tensors[name]
        whole = Box.whole(about.shape_in_files)
        box = Box((start, *whole.offsets[1:]), (stop - start, *whole.sizes[1:])) if about.shape else whole
        values = self._reader.read(name, box)
        return torch.view_as_complex(values) if about.torch_dtype.is_complex else values

    def release(self) -> None:
        """Its files stay open: another process may remove them."""


class DistributedFiles:
    """Tensors of a checkpoint that ``torch.distributed.checkpoint.save`` has written, by any number of ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = FileSystemReader(path)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        stored = metadata.state_dict_metadata
        self._stored = {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
        self.tensors: Mapping[str, FileTensor] = {
            name: FileTensor(tuple(entry.size), entry.properties.dtype) for name, entry in self._stored.items()
        }

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        stored = self._stored[name]
        shape = tuple(stored.size)
        offsets = (start,) + (0,) * (len(shape) - 1) if shape else ()
        sizes = (stop - start, *shape[1:]) if shape else ()
        read = torch.empty(sizes, dtype=stored.properties.dtype, device="cpu")
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(name, stored, [chunk])
        self._reader.read_data(LoadPlan(items), _Into(read)).wait()
        return read

    def release(self) -> None:
        """Nothing stays open between reads."""


class _Into(DefaultLoadPlanner):
    """Has torch's reader read into the places of one tensor, whose plan is given."""

    def __init__(self, into: torch.Tensor) -> None:
        super().__init__()
        self._into = into

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._into

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("only tensors are read")
