"""A step's state in the form that ``torch.distributed.checkpoint`` (DCP) takes: tensors given as boxes, without values.

DCP asks any tensor that has ``__create_write_items__``, ``__create_chunk_list__`` and ``__get_tensor_shard__`` (as
``DTensor`` has) which boxes of a whole tensor this rank has, and for each of them as it writes or reads it. So it
writes from whatever tier values are in, and the values it reads are held on the host until ``load_state_dict`` takes
them over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zerofx.checkpoints.pieces import Piece
from zerofx.disk.checkpoint.boxes import Box
from zerofx.errors import UsageError
from zerofx.torch_private.tensors import make_wrapper, without_torch_function


class BoxedTensor(torch.Tensor):
    """A tensor of which this rank writes the boxes ``owned``, with values from ``read``, and reads the boxes ``held``.

    It has shape and dtype, and no values: only DCP can use it. ``begin`` is called before a save reads the first.
    """

    _owned: Sequence[Piece]
    _held: Sequence[Piece]
    _read: Callable[[Piece], torch.Tensor]
    _begin: Callable[[], None]
    _loaded: dict[tuple[int, ...], torch.Tensor] | None

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        dtype: torch.dtype,
        owned: Sequence[Piece],
        held: Sequence[Piece],
        read: Callable[[Piece], torch.Tensor],
        begin: Callable[[], None] = lambda: None,
    ) -> BoxedTensor:
        """Create one with the shape of ``like``."""
        wrapper: BoxedTensor = make_wrapper(cls, like.shape, dtype=dtype, device=torch.device("cpu"))
        wrapper._owned, wrapper._held, wrapper._read, wrapper._begin, wrapper._loaded = owned, held, read, begin, None
        return wrapper

    __torch_function__ = without_torch_function  # type: ignore[assignment]  # no method, by its type

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types a default that does nothing
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise UsageError(
            f"expected a tensor of step.state_dict() to be saved or loaded by dcp.save or dcp.load, which ask for its "
            f"values, found {func}: it has none of its own; dcp.async_save copies them all first, and "
            f"step.full_state_dict() has whole tensors"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch prints values
        return f"Sharded({list(self.shape)}, {self.dtype}, {len(self._owned)} boxes here)"

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        self._loaded = None  # by an earlier load of the same dictionary
        self._begin()
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, self.shape),
            )
            for offsets, sizes in map(self._chunk, self._owned)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self._loaded = {}
        return [ChunkStorageMetadata(*self._chunk(piece)) for piece in self._held]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        offsets = tuple(index.offset)
        if self._loaded is None:
            return self._view_as_model(self._read(next(p for p in self._owned if self._chunk(p)[0] == index.offset)))
        if offsets not in self._loaded:
            sizes = next(sizes for begin, sizes in map(self._chunk, self._held) if begin == index.offset)
            self._loaded[offsets] = torch.empty(sizes, dtype=self.dtype, device="cpu")
        return self._loaded[offsets]

    @property
    def is_loaded(self) -> bool:
        """True if all boxes that this rank holds have been read."""
        return self._loaded is not None and len(self._loaded) == len(self._held)

    def get_loaded(self, box: Box) -> torch.Tensor:
        """The values read into a box that this rank holds, as real numbers."""
        assert self._loaded is not None
        values = self._loaded[box.offsets[: self.dim()]]
        return torch.view_as_real(values) if values.is_complex() else values

    def _chunk(self, piece: Piece) -> tuple[torch.Size, torch.Size]:
        """Offsets and sizes of a piece's box, with the dimensions of the model's tensor."""
        return torch.Size(piece.box.offsets[: self.dim()]), torch.Size(piece.box.sizes[: self.dim()])

    def _view_as_model(self, values: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(values.contiguous()) if self.dtype.is_complex else values
