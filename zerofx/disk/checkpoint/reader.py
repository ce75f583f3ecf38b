"""A checkpoint that is read: which boxes of which tensors its files hold, and any part of a tensor from them."""

from __future__ import annotations

from pathlib import Path

import torch

from zerofx.disk.checkpoint.boxes import Box
from zerofx.disk.checkpoint.folder import check_sizes, read_marker
from zerofx.disk.checkpoint.marker import Marker
from zerofx.disk.checkpoint.shard_file import OpenFiles, Placed, ShardFile, hash_of
from zerofx.errors import CheckpointError

MODEL, STATE = "model", "state"


def file_name(kind: str, rank: int, num_ranks: int) -> str:
    """The file of a rank's: ``kind`` is ``"model"`` for the model's tensors, ``"state"`` for all else."""
    return f"{kind}-{rank:05}-of-{num_ranks:05}.safetensors"


def state_name(parameter: str, state: str) -> str:
    """What an optimizer's state of a parameter is called in a file, as ``torch.distributed.checkpoint`` does."""
    return f"optimizer.state.{parameter}.{state}"


class CheckpointReader:
    """Reads the checkpoint at ``place``. Headers of files are read when they are first needed.

    Raises:
        CheckpointError: from every method, where the checkpoint is damaged or a file cannot be read.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.marker: Marker = read_marker(place)
        self._files = OpenFiles()
        self._shards: dict[str, ShardFile] = {}
        self._places: dict[str, dict[str, list[tuple[ShardFile, Placed]]]] = {}

    def verify(self, share: int, num_shares: int) -> None:
        """Check all files' sizes, and the hashes of every ``num_shares``-th file from number ``share`` on."""
        check_sizes(self.place, self.marker)
        for name, (size, digest) in sorted(self.marker.files.items(), key=lambda item: (-item[1][0], item[0]))[
            share::num_shares
        ]:
            try:
                digest_now = hash_of(self.place / name)
            except OSError as error:
                raise self._unreadable(name, error) from error
            if digest_now != digest:
                raise CheckpointError(
                    f"expected the hash {digest} of {self.place / name} ({size:,} bytes), found {digest_now}: it is "
                    f"not what was written; load another checkpoint, and look at the drive. Nothing has been loaded"
                )

    def shard(self, kind: str, rank: int) -> ShardFile:
        """The header of a rank's file."""
        name = file_name(kind, rank, self.marker.num_ranks)
        if name not in self._shards:
            try:
                self._shards[name] = ShardFile.open(self.place / name)
            except OSError as error:
                raise self._unreadable(name, error) from error
        return self._shards[name]

    def read_into(self, into: torch.Tensor, name: str, box: Box, kind: str = MODEL) -> None:
        """Read ``box`` of a tensor into ``into``, which is on the CPU and has its shape, in whatever dtype."""
        places = self._places_of(kind).get(name, [])
        overlaps = [(shard, placed, common) for shard, placed in places if (common := box.overlap(placed.entry.box))]
        if sum(common.numel for _, _, common in overlaps) != box.numel:
            raise CheckpointError(
                f"expected all elements of {name} in the files of {self.place}, found that some are missing: they are "
                f"not of this checkpoint, or zerofx has written them wrongly"
            )
        for shard, placed, common in overlaps:
            self.read_from(shard, placed, common, common.of(into, box))

    def read(self, name: str, box: Box, kind: str = MODEL) -> torch.Tensor:
        """``box`` of a tensor, on the CPU, in the dtype that it has in the files."""
        values = torch.empty(box.sizes, dtype=self.dtype_of(name, kind), device="cpu")
        self.read_into(values, name, box, kind)
        return values

    def read_from(self, shard: ShardFile, placed: Placed, box: Box, into: torch.Tensor) -> None:
        """Read ``box`` of an entry of one file into ``into``, which is on the CPU and has its shape."""
        try:
            self._files.read(shard.path, placed, box, into)
        except OSError as error:
            raise self._unreadable(shard.path.name, error) from error

    def read_entry(self, shard: ShardFile, placed: Placed) -> torch.Tensor:
        """An entry of one file, on the CPU, in its dtype."""
        values = torch.empty(placed.entry.box.sizes, dtype=placed.entry.dtype, device="cpu")
        self.read_from(shard, placed, placed.entry.box, values)
        return values

    def dtype_of(self, name: str, kind: str) -> torch.dtype:
        """The dtype that a tensor has in the files."""
        places = self._places_of(kind).get(name)
        if places:
            return places[0][1].entry.dtype
        if kind == MODEL and name in self.marker.tensors:  # without elements, in files of an earlier version
            return self.marker.tensors[name].torch_dtype.to_real()
        raise CheckpointError(f"expected {name} in the files of {self.place}, found nothing of it")

    def close(self) -> None:
        """Close all files; they are opened again as needed."""
        self._files.close()

    def _places_of(self, kind: str) -> dict[str, list[tuple[ShardFile, Placed]]]:
        if kind not in self._places:
            places: dict[str, list[tuple[ShardFile, Placed]]] = {}
            for rank in range(self.marker.num_ranks):
                shard = self.shard(kind, rank)
                for name, listed in shard.placed.items():
                    places.setdefault(name, []).extend((shard, placed) for placed in listed)
            self._places[kind] = places
        return self._places[kind]

    def _unreadable(self, name: str, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"expected to read {self.place / name}, found that it cannot be read ({error}): load another checkpoint, "
            f"and look at the drive"
        )
