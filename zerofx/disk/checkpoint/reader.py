"""Read a checkpoint: the boxes of tensors that its files hold, and any part of a tensor from them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from zerofx.disk.checkpoint.boxes import Box
from zerofx.disk.checkpoint.contents import check_contents
from zerofx.disk.checkpoint.folder import check_sizes, marker_in, resolve
from zerofx.disk.checkpoint.marker import MARKER, MODEL, STATE, Marker, file_name
from zerofx.disk.checkpoint.shard_file import OpenFiles, Placed, ShardFile
from zerofx.errors import CheckpointError


def open_checkpoint(path: Path, name: str = "") -> CheckpointReader:
    """A reader of the checkpoint at ``path``, of the latest one in it, or of the one named ``name`` there.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if name and (path / name).is_dir():
        return CheckpointReader(path / name)
    while True:
        place = resolve(path)
        try:
            return CheckpointReader(place)
        except CheckpointError:
            # Another process may have finished a later one meanwhile, and have removed this one.
            if place == path or resolve(path) == place:
                raise


class CheckpointReader:
    """Reads the checkpoint at ``place``, whose files stay open until ``close``: it may be removed meanwhile.

    Headers of files are read when they are first needed.

    Raises:
        CheckpointError: from every method, if the checkpoint is damaged or a file cannot be read.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        with self._name_unreadable(MARKER):
            self._files = OpenFiles(place)
        self.marker: Marker = marker_in(self._files.folder, place)
        self._shards: dict[str, ShardFile] = {}
        self._places: dict[str, dict[str, list[tuple[ShardFile, Placed]]]] = {}

    def verify(self, share: int, num_shares: int) -> None:
        """Check all files' sizes and headers, and the hashes of every ``num_shares``-th from ``share`` on."""
        check_sizes(self._files.folder, self.place, self.marker)
        for name in self.marker.files:
            with self._name_unreadable(name):
                self._files.descriptor(name)
        for name, (size, digest) in sorted(self.marker.files.items(), key=lambda item: (-item[1][0], item[0]))[
            share::num_shares
        ]:
            with self._name_unreadable(name):
                digest_now = self._files.hash_of(name)
            if digest_now != digest:
                raise CheckpointError(
                    f"expected the hash {digest} of {self.place / name} ({size:,} bytes), found {digest_now}: it is "
                    f"not what was written; load another checkpoint, and look at the drive. Nothing has been loaded"
                )
        self.check_contents()

    def check_contents(self) -> None:
        """Check that the files contain everything that the marker names, once."""
        for kind in (MODEL, STATE):
            shards = [self.shard(kind, rank) for rank in range(self.marker.num_ranks)]
            check_contents(self.marker, kind, shards, self.place)

    def shard(self, kind: str, rank: int) -> ShardFile:
        """The header of a rank's file."""
        name = file_name(kind, rank, self.marker.num_ranks)
        if name not in self._shards:
            with self._name_unreadable(name):
                self._shards[name] = ShardFile.read(self._files.descriptor(name), self.place / name)
        return self._shards[name]

    def read_into(self, into: torch.Tensor, name: str, box: Box, kind: str = MODEL) -> None:
        """Read ``box`` of a tensor into ``into``, which is on the CPU with its shape, in any dtype."""
        places = self._places_of(kind).get(name, [])
        overlaps = [(shard, placed, common) for shard, placed in places if (common := box.overlap(placed.entry.box))]
        if sum(common.numel for _, _, common in overlaps) != box.numel:
            raise CheckpointError(
                f"expected all elements of {name} in the files of {self.place}, found that some are missing: they are "
                f"not of this checkpoint, or zerofx has written them wrongly"
            )
        for shard, placed, common in overlaps:
            self.read_from(shard, placed, common, common.select(into, box))

    def read(self, name: str, box: Box, kind: str = MODEL) -> torch.Tensor:
        """Read ``box`` of a tensor to the CPU, in the dtype that it has in the files."""
        values = torch.empty(box.sizes, dtype=self.dtype_of(name, kind), device="cpu")
        self.read_into(values, name, box, kind)
        return values

    def read_from(self, shard: ShardFile, placed: Placed, box: Box, into: torch.Tensor) -> None:
        """Read ``box`` of an entry of one file into ``into``, which is on the CPU with its shape."""
        with self._name_unreadable(shard.path.name):
            self._files.read(shard.path.name, placed, box, into)

    def read_entry(self, shard: ShardFile, placed: Placed) -> torch.Tensor:
        """Read an entry of one file to the CPU, in its dtype."""
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

    def shape_of(self, name: str, kind: str) -> tuple[int, ...]:
        """The shape of a tensor in the files."""
        return self._places_of(kind)[name][0][1].entry.shape

    def close(self) -> None:
        """Close all files."""
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

    @contextlib.contextmanager
    def _name_unreadable(self, name: str) -> Iterator[None]:
        """A block that reads a file, whose name the error gives where it cannot be read."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"expected to read {self.place / name}, found that it cannot be read ({error}): load another "
                f"checkpoint, and look at the drive"
            ) from error
