"""A folder of checkpoints: each in a folder of its own, there whole or not at all, and the name of the latest.

A checkpoint is written to a folder with a name of its own that begins with a dot; when all of it is on disk, the
folder is renamed, and then ``latest`` is replaced. A process that is killed meanwhile leaves the checkpoints before as
they were, and a folder that the next save removes.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from zerofx.disk.checkpoint.marker import MARKER, Marker
from zerofx.disk.own_files import write_text
from zerofx.errors import CheckpointError
from zerofx.units import first_few

LATEST = "latest"
_NAME = re.compile(r"step-\d{8,}(-\d+)?")
_PART = re.compile(r"\.step-\d{8,}-[0-9a-f]{16}\.part")
_LATEST_PART = re.compile(r"\.latest-[0-9a-f]{16}\.part")  # as write_text writes it aside
_GONE = re.compile(r"\.step-\d{8,}(-\d+)?-[0-9a-f]{16}\.gone")


def begin(folder: Path, num_steps: int) -> Path:
    """A fresh folder to write a checkpoint to, in ``folder``, which is made; what killed processes left there goes.

    Raises:
        CheckpointError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.iterdir():
            if _PART.fullmatch(left.name) or _GONE.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)
            elif _LATEST_PART.fullmatch(left.name):
                left.unlink(missing_ok=True)
        part = folder / f".step-{num_steps:08}-{secrets.token_hex(8)}.part"
        part.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"expected to write a checkpoint to {folder}, found that it cannot be made there ({error}): give a folder "
            f"that can be written to"
        ) from error
    return part


def commit(part: Path, marker: Marker, keep: int | None) -> Path:
    """Write the marker of a checkpoint whose other files are on disk, and put it in its place; returns its folder.

    ``keep``: remove all but so many recent ones.

    Raises:
        CheckpointError: a file is not there with its size.
        OSError: it cannot be written.
    """
    check_sizes(part, marker)
    with open(part / MARKER, "x", encoding="utf-8") as file:
        file.write(marker.to_json())
        file.flush()
        os.fsync(file.fileno())
    _sync(part)
    folder = part.parent
    place = place_of(folder, marker.num_steps)
    os.rename(part, place)
    _sync(folder)
    write_text(folder / LATEST, place.name + "\n")
    _sync(folder)
    if keep is not None:
        _prune(folder, place, keep)
    return place


def place_of(folder: Path, num_steps: int) -> Path:
    """Where a checkpoint of so many steps would be put now."""
    stem, number = f"step-{num_steps:08}", 1
    while (place := folder / (stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return place


def abandon(part: Path) -> None:
    """Remove what has been written of a checkpoint that cannot be finished."""
    shutil.rmtree(part, ignore_errors=True)


def resolve(path: Path) -> Path:
    """The folder of a checkpoint: ``path`` itself, or the latest of the checkpoints in it.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MARKER).is_file():
        return path
    place = latest(path)
    if place is None:
        what = "nothing there" if not path.exists() else f"neither {MARKER} nor {LATEST} in it"
        raise CheckpointError(
            f"expected a checkpoint, or a folder with some, at {path}, found {what}: give the path that "
            f"step.save_checkpoint was given, or what it returned"
        )
    return place


def latest(folder: Path) -> Path | None:
    """The latest checkpoint in a folder; None where none has been finished.

    Raises:
        CheckpointError: the one that ``latest`` names is not there.
    """
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"expected to read {folder / LATEST}, found that it cannot be read: {error}") from error
    if not _NAME.fullmatch(name) or not (folder / name / MARKER).is_file():
        others = sorted(item.parent.name for item in folder.glob(f"step-*/{MARKER}"))
        raise CheckpointError(
            f"expected {folder / LATEST} to name a checkpoint in {folder}, found {name[:80]!r}, which is none: load "
            f"one of those that are there by its own path ({', '.join(others) or 'there is none'})"
        )
    return folder / name


def read_marker(place: Path) -> Marker:
    """The marker of the checkpoint at ``place``.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    try:
        text = (place / MARKER).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"expected the marker of a checkpoint at {place / MARKER}, found that it cannot be read: {error}"
        ) from error
    return Marker.from_json(text, place / MARKER)


def check_sizes(place: Path, marker: Marker) -> None:
    """Check that all files of a checkpoint are there, and none is cut short.

    Raises:
        CheckpointError: names those that are not.
    """
    wrong = []
    for name, (size, _) in marker.files.items():
        try:
            size_now = (place / name).stat().st_size
            if size_now != size:
                wrong.append(f"{name} ({size_now:,} bytes of {size:,})")
        except OSError as error:
            wrong.append(f"{name} ({error.strerror})")
    if wrong:
        raise CheckpointError(
            f"expected the {len(marker.files)} files of {place} as they were written, found {len(wrong)} that are not: "
            f"{first_few(wrong)}. Ranks of all nodes have to write to one file system; load another checkpoint where "
            f"this one has been damaged"
        )


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove all finished checkpoints but the ``keep`` that were saved last, of which ``newest`` is one."""
    finished: list[tuple[str, Path]] = []
    for place in folder.iterdir():
        if place != newest and _NAME.fullmatch(place.name) and (place / MARKER).is_file():
            try:
                finished.append((read_marker(place).saved_at, place))
            except CheckpointError:
                continue  # what is not known is left alone
    for _, place in sorted(finished, reverse=True)[keep - 1 :]:
        # Under a name that is none of a checkpoint's first, so that one that is half gone is never taken for one.
        gone = folder / f".{place.name}-{secrets.token_hex(8)}.gone"
        os.rename(place, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
