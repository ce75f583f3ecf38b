"""Files in safetensors' format, written a tensor at a time and read by parts.

The format: the length of a header (8 bytes, little-endian), the header (JSON: dtype, shape and position of each tensor,
and words under ``__metadata__``), and the tensors' bytes without gaps. (https://github.com/huggingface/safetensors) The
safetensors library writes from a dictionary that holds all tensors of a file at once, and torch's writer
(``HuggingFaceStorageWriter``) makes another copy of all of them; here no more than one is held. The library can read
these files, and reading here does not map files into memory.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from zerofx.disk.checkpoint.boxes import Box
from zerofx.disk.own_files import open_plain
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
_TOO_LARGE = 1 << 63  # for an offset in a file


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: ``box`` of the tensor ``name``, which has the shape ``shape``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box

    @property
    def key(self) -> str:
        """Its name in its file: the name of a whole tensor, with the first element for a box."""
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
    """Writes ``entries``, in the order of ``sort_by_alignment``, one after the other to ``path``.

    Use it as a context, which closes the file. ``on_block`` is called before each block, and may raise.
    """

    def __init__(
        self,
        path: Path,
        entries: Sequence[Entry],
        words: Mapping[str, str],
        on_block: Callable[[], None] = lambda: None,
    ) -> None:
        self._entries, self._on_block = iter(entries), on_block
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
        """Write the next entry: ``values`` are on the CPU, with its shape and dtype."""
        assert next(self._entries) == entry and values.dtype == entry.dtype and tuple(values.shape) == entry.box.sizes
        self._write(bytes_of(values.contiguous()))

    def finish(self) -> Written:
        """Wait until the whole file is on disk."""
        assert next(self._entries, None) is None, "all that is in the header has been written"
        self._on_block()
        os.fsync(self._file)
        self._on_block()
        return Written(self._num_bytes, self._hash.hexdigest())

    def _write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _BLOCK_BYTES):
            self._on_block()
            block = view[start : start + _BLOCK_BYTES]
            self._hash.update(block)
            while block:
                block = block[os.write(self._file, block) :]
        self._num_bytes += len(view)


def sort_by_alignment(entries: Sequence[Entry]) -> list[Entry]:
    """Sort entries so that each starts at a multiple of its items' size."""
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
    """An entry and the offset of its first byte in its file."""

    entry: Entry
    offset: int


@dataclass
class ShardFile:
    """A file whose header has been read: its words, and its entries by tensor."""

    path: Path
    words: dict[str, str]
    placed: dict[str, list[Placed]] = field(default_factory=dict)

    @classmethod
    def read(cls, descriptor: int, path: Path) -> ShardFile:
        """Read the header of an open file; ``path`` is for the error.

        Raises:
            CheckpointError: it does not have this format, or entries are not one after the other.
            OSError: it cannot be read.
        """
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
            raise CheckpointError(f"expected {path} to be a safetensors file, found no header of one")
        try:
            header = json.loads(os.pread(descriptor, length, 8))
            words = header.pop("__metadata__", {})
            if not all(isinstance(word, str) for word in words.values()):
                raise TypeError("__metadata__ has other values than words")
            boxes = json.loads(words.get("boxes", "{}"))
            shard = cls(path, words)
            if unknown := boxes.keys() - header.keys():
                raise ValueError(f"there is a box of {min(unknown)}, and no such tensor")
            spans = [shard._add(key, about, boxes.get(key), 8 + length) for key, about in header.items()]
            end = 8 + length
            for first, last, key in sorted(spans):
                if first != end:
                    raise ValueError(f"{key} does not lie where it says")
                end = last
            if end != size:
                raise ValueError(f"tensors end at byte {end:,} of {size:,}")
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"expected {path} to be a safetensors file, found a header that cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error
        return shard

    def _add(self, key: str, about: Mapping[str, Any], box: Sequence[Any] | None, data: int) -> tuple[int, int, str]:
        """Add an entry; returns its first byte in the file, the one after its last, and its key."""
        sizes = _counts(about["shape"])
        name, shape, offsets = (key, list(sizes), [0] * len(sizes)) if box is None else box
        if not isinstance(name, str):
            raise TypeError(f"{key} is a box of {name!r:.80}")
        entry = Entry(name, DTYPES[about["dtype"]], _counts(shape), Box(_counts(offsets), sizes))
        first, last = _counts(about["data_offsets"])
        inside = all(b + n <= w for b, n, w in zip(entry.box.offsets, sizes, entry.shape, strict=True))
        if not inside or last - first != entry.num_bytes:
            raise ValueError(f"{key} does not lie where it says")
        self.placed.setdefault(entry.name, []).append(Placed(entry, data + first))
        return data + first, data + last, key


def _counts(values: object) -> tuple[int, ...]:
    """A list of whole numbers of at least 0, from JSON."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < _TOO_LARGE for value in values):
        raise TypeError(f"expected whole numbers, found {values!r:.80}")
    return tuple(values)


class OpenFiles:
    """Reads plain files of a folder by parts. A file is opened once, so that the checked file is the one that is read,
    even if another process removes it meanwhile.

    If there are more files than a process should have open, files that are reopened have to be the same.
    """

    def __init__(self, folder: Path) -> None:
        self._open: dict[str, int] = {}
        self._identities: dict[str, tuple[int, ...]] = {}
        self._folder = -1
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._most = max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    @property
    def folder(self) -> int:
        """The descriptor of the folder."""
        return self._folder

    def descriptor(self, name: str) -> int:
        """The descriptor of a file.

        Raises:
            OSError: there is no such plain file, or it has been replaced.
        """
        if name not in self._open:
            if len(self._open) >= self._most:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[name] = open_plain(self._folder, name)
            about = os.fstat(self._open[name])
            identity = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
            if self._identities.setdefault(name, identity) != identity:
                raise OSError(f"{name} is another file than the one that was checked")
        return self._open[name]

    def read(self, name: str, placed: Placed, box: Box, into: torch.Tensor) -> None:
        """Read ``box`` of a tensor, which is inside the entry's, into ``into``, a view of its shape on the CPU.

        Raises:
            OSError: it cannot be read, or the file is shorter.
        """
        entry = placed.entry
        first, last = box.span(entry.box)
        offset = placed.offset + first * entry.dtype.itemsize
        if last - first == box.numel and into.is_contiguous() and into.dtype == entry.dtype:
            self._fill(name, bytes_of(into), offset)
            return
        if (last - first) * entry.dtype.itemsize > _BLOCK_BYTES and (halves := box.halves()):
            # Bytes between its rows are read with them: a part of a large tensor's columns, some rows at a time.
            for half in halves:
                self.read(name, placed, half, half.select(into, box))
            return
        span = torch.empty(last - first, dtype=entry.dtype, device="cpu")
        self._fill(name, bytes_of(span), offset)
        into.copy_(span.as_strided(box.sizes, torch.empty(entry.box.sizes, device="meta").stride()))

    def hash_of(self, name: str) -> str:
        """The XXH3 hash of 128 bits of a whole file, in hex digits."""
        digest, block, offset = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK_BYTES)), 0
        while moved := os.preadv(self.descriptor(name), [block], offset):
            digest.update(block[:moved])
            offset += moved
        return digest.hexdigest()

    def _fill(self, name: str, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            moved = os.preadv(self.descriptor(name), [view[done : done + _BLOCK_BYTES]], offset + done)
            if not moved:
                raise OSError(f"{name} ends {len(view) - done} bytes early")
            done += moved

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
        if self._folder >= 0:
            folder, self._folder = self._folder, -1
            os.close(folder)

    def __del__(self) -> None:
        if hasattr(self, "_folder"):
            self.close()
