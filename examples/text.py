"""Training text that every Python has: the bytes of its standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

VOCAB = 256  # a token is a byte

# Other people's packages, tests, and files that are tables rather than text; `pydoc_data` has English prose of its own.
_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__"}
)


def load_source() -> tuple[Tensor, Tensor]:
    """Training and validation bytes (uint8, one dimension) of the standard library's Python source.

    A file belongs wholly to one of the two, by a hash of its relative path: one file in ten is for validation.

    Raises:
        FileNotFoundError: this Python comes without the source of its standard library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _SKIPPED.intersection(name.parts):
            validation = hashlib.sha256(name.as_posix().encode()).digest()[0] % 10 == 0
            parts[validation].append(path.read_bytes())
    if not all(parts):
        raise FileNotFoundError(f"no Python source to learn from under {root}")
    return _to_tensor(b"".join(parts[0])), _to_tensor(b"".join(parts[1]))


def load_prose() -> tuple[Tensor, Tensor]:
    """Training and validation bytes (uint8, one dimension) of Python's own help topics: English, not code.

    The last tenth is for validation.

    Raises:
        FileNotFoundError: this Python comes without its help topics.
    """
    data = _to_tensor((Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py").read_bytes())
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


class Batches:
    """Endless random (tokens, targets), each int64 [batch_size, block]; targets are the tokens one place on.

    All ranks draw the same positions for the whole batch and each keeps its own share of them, so one process with a
    batch of 16 and two processes with a batch of 8 see the same data. The state is that of the generator, which is the
    same on all ranks, so that others can go on from it, however many they are.
    """

    def __init__(
        self, data: Tensor, block: int, batch_size: int, *, rank: int = 0, world_size: int = 1, seed: int = 0
    ) -> None:
        self._data, self._block, self._batch_size = data, block, batch_size
        self._rank, self._world_size = rank, world_size
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        num_rows = self._batch_size * self._world_size
        starts = torch.randint(len(self._data) - self._block, (num_rows,), generator=self._generator)
        first = self._rank * self._batch_size
        return _windows(self._data, starts[first : first + self._batch_size], self._block)

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._generator.set_state(state["generator"])


def validation_batches(
    data: Tensor, block: int, batch_size: int, num_batches: int, *, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """`num_batches` (tokens, targets) for this rank, as `Batches` gives, spread evenly and always the same."""
    count = batch_size * num_batches * world_size
    starts = torch.linspace(0, len(data) - block - 1, count, dtype=torch.float64).long()
    for mine in starts.view(world_size, num_batches, batch_size)[rank]:
        yield _windows(data, mine, block)


def unigram_entropy(data: Tensor) -> float:
    """Entropy in nats per byte of how often each byte occurs: the loss of a model that ignores the context."""
    counts = torch.bincount(data.int(), minlength=VOCAB).double()
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * frequencies.log()).sum())


def encode(text: str) -> Tensor:
    """The bytes of `text`, int64 [length]."""
    return _to_tensor(text.encode()).long()


def decode(tokens: Tensor) -> str:
    """Text of a sequence of bytes; what is not valid UTF-8 shows as a replacement character."""
    return bytes(tokens.tolist()).decode(errors="replace")


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _windows(data: Tensor, starts: Tensor, block: int) -> tuple[Tensor, Tensor]:
    windows = data[starts[:, None] + torch.arange(block + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
