"""Files in safetensors' format, written a tensor at a time and read by parts.

The format: the length of a header (8 bytes, little-endian), the header (JSON: dtype, shape and place of each tensor,
and words under ``__metadata__``), and the tensors' bytes without gaps. (https://github.com/huggingface/safetensors)
The safetensors library writes from a dictionary that holds all tensors of a file at once, and torch's writer
(``HuggingFaceStorageWriter``) makes another copy of all of them; here no more than one is held. What is written is read
by the library, and read here without mapping files into memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from zerofx.disk.checkpoint.boxes import Box
from zerofx.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK_BYTES = 16 << 20  # what is hashed and written, or read, at a time
_MOST_HEADER_BYTES = 100 << 20  # of what the library reads, too


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: ``box`` of the tensor ``name``, which has the shape ``shape``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box

    @property
    def key(self) -> str:
        """What it is called in its file: a whole tensor by its name, a box with its first element, too."""
        if self.box.sizes == self.shape:
            return self.name
        return f"{self.name}@{','.join(map(str, self.box.offsets))}"

    @property
    def num_bytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """A file that is whole on disk: its size, and its XXH3 hash of 128 bits in hex digits."""

    num_bytes: int
    digest: str


class ShardWriter:
    """Writes ``entries``, in the order of their items' sizes (``in_order``), one after the other to ``path``.

    It is to be left as a context, which closes the file.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], words: Mapping[str, str]) -> None:
        self._entries = iter(entries)
        self._hash, self._num_bytes = xxhash.xxh3_128(), 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._write(_header(entries, words))
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def write(self, entry: Entry, values: torch.Tensor) -> None:
        """Write the next entry: ``values`` are on the CPU, with its shape, and dtype."""
        assert next(self._entries) == entry and values.dtype == entry.dtype and tuple(values.shape) == entry.box.sizes
        self._write(bytes_of(values.contiguous()))

    def finish(self) -> Written:
        """Wait until all of it is on disk."""
        assert next(self._entries, None) is None, "all that is in the header has been written"
        os.fsync(self._file)
        return Written(self._num_bytes, self._hash.hexdigest())

    def _write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _BLOCK_BYTES):
            block = view[start : start + _BLOCK_BYTES]
            self._hash.update(block)
            while block:
                block = block[os.write(self._file, block) :]
        self._num_bytes += len(view)


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """Entries in an order in which each lies at a multiple of its items' size."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    flat: Any = values.reshape(-1).view(torch.uint8).numpy() if values.numel() else b""
    return memoryview(flat)


def _header(entries: Sequence[Entry], words: Mapping[str, str]) -> bytes:
    boxes = {
        entry.key: [entry.name, entry.shape, entry.box.offsets] for entry in entries if entry.box.sizes != entry.shape
    }
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", **words, **({"boxes": json.dumps(boxes)} if boxes else {})}
    }
    offset = 0
    for entry in entries:
        header[entry.key] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.box.sizes),
            "data_offsets": [offset, offset + entry.num_bytes],
        }
        offset += entry.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Placed:
    """An entry and the place of its first byte in its file."""

    entry: Entry
    offset: int


@dataclass
class ShardFile:
    """A file whose header has been read: its words, and its entries by the tensor that they are boxes of."""

    path: Path
    words: dict[str, str]
    placed: dict[str, list[Placed]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> ShardFile:
        """Read a file's header.

        Raises:
            CheckpointError: it is none of this format.
            OSError: it cannot be read.
        """
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
                raise CheckpointError(f"expected {path} to be a safetensors file, found no header of one")
            text = file.read(length)
        try:
            header = json.loads(text)
            words = header.pop("__metadata__", {})
            boxes = json.loads(words.get("boxes", "{}"))
            shard = cls(path, words)
            for key, about in header.items():
                shard._add(key, about, boxes.get(key), 8 + length, size)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"expected {path} to be a safetensors file, found a header that cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error
        return shard

    def _add(self, key: str, about: Mapping[str, Any], box: Sequence[Any] | None, data: int, size: int) -> None:
        sizes = tuple(map(int, about["shape"]))
        name, shape, offsets = box if box is not None else (key, sizes, (0,) * len(sizes))
        entry = Entry(str(name), DTYPES[about["dtype"]], tuple(map(int, shape)), Box(tuple(map(int, offsets)), sizes))
        first, last = about["data_offsets"]
        inside = all(b >= 0 and n >= 0 and b + n <= w for b, n, w in zip(entry.box.offsets, sizes, shape, strict=True))
        if not inside or last - first != entry.num_bytes or first < 0 or data + last > size:
            raise ValueError(f"{key} does not lie where it says")
        self.placed.setdefault(entry.name, []).append(Placed(entry, data + first))


class OpenFiles:
    """Reads parts of files; at most so many stay open as a process may well have."""

    _MOST = 64

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def read(self, path: Path, placed: Placed, box: Box, into: torch.Tensor) -> None:
        """Read ``box`` of a tensor, which lies in the entry's, into ``into``, a view of its shape on the CPU.

        Raises:
            OSError: it cannot be read, or the file is shorter.
        """
        entry = placed.entry
        first, last = box.span(entry.box)
        offset = placed.offset + first * entry.dtype.itemsize
        if last - first == box.numel and into.is_contiguous() and into.dtype == entry.dtype:
            self._fill(path, bytes_of(into), offset)
            return
        if (last - first) * entry.dtype.itemsize > _BLOCK_BYTES and (halves := box.halves()):
            # What lies between its rows is read with them: a part of a large tensor's columns, some rows at a time.
            for half in halves:
                self.read(path, placed, half, half.of(into, box))
            return
        span = torch.empty(last - first, dtype=entry.dtype, device="cpu")
        self._fill(path, bytes_of(span), offset)
        into.copy_(span.as_strided(box.sizes, torch.empty(entry.box.sizes, device="meta").stride()))

    def _fill(self, path: Path, view: memoryview, offset: int) -> None:
        file = self._file(path)
        done = 0
        while done < len(view):
            moved = os.preadv(file, [view[done : done + _BLOCK_BYTES]], offset + done)
            if not moved:
                raise OSError(f"{path} ends {len(view) - done} bytes early")
            done += moved

    def _file(self, path: Path) -> int:
        if path not in self._open:
            if len(self._open) >= self._MOST:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()


def hash_of(path: Path) -> str:
    """The XXH3 hash of 128 bits of a whole file, in hex digits."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
