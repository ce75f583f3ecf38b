"""A folder of checkpoints: each in a folder of its own, whole or absent, and the name of the latest.

A checkpoint is written to a folder with a name of its own that begins with a dot; when all of it is on disk, the folder
is renamed, and then ``latest`` is replaced. A process that is killed meanwhile leaves the earlier checkpoints as they
were, and a folder that the next save removes. Folders that another process still writes are locked, and left alone.

The path that a user gives may be a link. Nothing below it is reached by one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from zerofx.disk.checkpoint.contents import parse_marker
from zerofx.disk.checkpoint.marker import MARKER, MOST_MARKER_BYTES, Marker
from zerofx.disk.own_files import open_plain, read_plain
from zerofx.errors import CheckpointError
from zerofx.units import first_few

LATEST = "latest"
_NAME = re.compile(r"step-\d{8,}(-\d+)?")
_UNFINISHED = re.compile(r"(\.step-\d{8,}-[0-9a-f]{16})\.(part|lock)")  # its folder, and what its process locks
_GONE = re.compile(r"\.step-\d{8,}(-\d+)?-[0-9a-f]{16}\.gone")
_MOST_LATEST_BYTES = 256
_SILENT_SECONDS = 86_400.0  # after which what cannot be locked is taken for left by a process that was killed
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OLDER = "order"  # of a checkpoint in its folder, among what its marker says about it
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class Unfinished:
    """The folder of a checkpoint that this process writes; locked, so that no other one takes it for abandoned."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self._lock = -1
        while True:
            stem = folder / f".step-{num_steps:08}-{secrets.token_hex(8)}"
            self.path, self._lock_path = stem.with_suffix(".part"), stem.with_suffix(".lock")
            self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):  # a file system without locks: its age tells then
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.path.lexists(self._lock_path):
                break
            self.release()  # another process has been faster to lock and remove it
        try:
            self.path.mkdir()
        except OSError:
            self.end()
            raise

    def abandon(self) -> None:
        """Remove the written files."""
        # Renamed first, so that no other rank goes on to write into it.
        gone = self.path.with_suffix(".gone")
        with contextlib.suppress(OSError):
            os.rename(self.path, gone)
        shutil.rmtree(gone, ignore_errors=True)
        self.end()

    def end(self) -> None:
        """Remove the lock, once the folder is gone or in place."""
        with contextlib.suppress(OSError):
            self._lock_path.unlink()
        self.release()

    def release(self) -> None:
        """Release the lock, as the system does if a process is killed."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def __del__(self) -> None:
        self.release()


def begin(folder: Path, num_steps: int) -> Unfinished:
    """Begin a checkpoint in ``folder``, which is created; leftovers of killed processes are removed.

    Raises:
        CheckpointError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = os.listdir(folder)
        for name in names:
            if _GONE.fullmatch(name):
                shutil.rmtree(folder / name, ignore_errors=True)
        for stem in {match[1] for name in names if (match := _UNFINISHED.fullmatch(name))}:
            _remove_abandoned(folder / f"{stem}.part", folder / f"{stem}.lock")
        return Unfinished(folder, num_steps)
    except OSError as error:
        raise CheckpointError(
            f"expected to write a checkpoint to {folder}, found that it cannot be made there ({error}): give a folder "
            f"that can be written to"
        ) from error


def _remove_abandoned(part: Path, lock_path: Path) -> None:
    """Remove an unfinished checkpoint that no process writes any more."""
    lock, is_free = -1, False
    try:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            lock = os.open(lock_path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = True
    except BlockingIOError:
        os.close(lock)
        return
    except OSError:  # a file system without locks
        pass
    if is_free or _seconds_since_write(part, lock_path) > _SILENT_SECONDS:
        shutil.rmtree(part, ignore_errors=True)
        with contextlib.suppress(OSError):
            lock_path.unlink()
    if lock >= 0:
        os.close(lock)


def _seconds_since_write(*paths: Path) -> float:
    """The seconds since the latest write to some paths and their contents; 0 if they are gone."""
    times = []
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.lstat().st_mtime)
            times += [inner.lstat().st_mtime for inner in path.iterdir()]
    return time.time() - max(times, default=time.time())


def commit(unfinished: Unfinished, marker: Marker) -> Path:
    """Write the marker of a checkpoint whose other files are on disk, and move it into place; returns its folder.

    Raises:
        CheckpointError: a file is not there with its size.
        OSError: it cannot be written.
    """
    part, parent = unfinished.path, unfinished.path.parent
    with open_folder(parent) as folder, open_folder(part.name, folder, follow=False) as inner:
        check_sizes(inner, part, marker)
        marker = replace(marker, about={**marker.about, _OLDER: 1 + _order_of_latest(folder, parent)})
        _write(inner, MARKER, marker.to_json())
        # Written before anything is renamed: a drive that is full ends a save while all is as it was.
        place = place_of(parent, marker.num_steps)
        _write(inner, LATEST, place.name + "\n")
        while True:
            try:
                os.rename(part.name, place.name, src_dir_fd=folder, dst_dir_fd=folder)
                break
            except OSError as error:
                if error.errno not in _TAKEN or place_of(parent, marker.num_steps) == place:
                    raise
            place = place_of(parent, marker.num_steps)
            os.unlink(LATEST, dir_fd=inner)
            _write(inner, LATEST, place.name + "\n")
        os.fsync(folder)
        os.rename(LATEST, LATEST, src_dir_fd=inner, dst_dir_fd=folder)
        os.fsync(folder)
    unfinished.end()
    return place


def _write(folder: int, name: str, text: str) -> None:
    """Write a file that does not exist yet to an open folder; both are on disk then."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o666, dir_fd=folder), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.fsync(folder)


def place_of(folder: Path, num_steps: int) -> Path:
    """The path that a checkpoint of so many steps would be moved to now."""
    stem, number = f"step-{num_steps:08}", 1
    while os.path.lexists(place := folder / (stem if number == 1 else f"{stem}-{number}")):
        number += 1
    return place


def resolve(path: Path) -> Path:
    """The folder of a checkpoint: ``path`` itself, or the latest of the checkpoints in it.

    Raises:
        CheckpointError: there is none.
    """
    if os.path.lexists(path / MARKER):
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
    """The latest checkpoint in a folder; None if none has been finished.

    Raises:
        CheckpointError: the one that ``latest`` names is not there.
    """
    try:
        with open_folder(folder) as opened:
            name = read_plain(opened, LATEST, _MOST_LATEST_BYTES).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"expected to read {folder / LATEST}, found that it cannot be read: {error}") from error
    if not _NAME.fullmatch(name) or not _is_checkpoint(folder / name):
        others = sorted(item.name for item in folder.glob("step-*") if _is_checkpoint(item))
        raise CheckpointError(
            f"expected {folder / LATEST} to name a checkpoint in {folder}, found {name[:80]!r}, which is none: load "
            f"one of those that are there by its own path ({', '.join(others) or 'there is none'})"
        )
    return folder / name


def _is_checkpoint(place: Path) -> bool:
    return stat.S_ISDIR(_mode(place)) and stat.S_ISREG(_mode(place / MARKER))


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def read_marker(place: Path) -> Marker:
    """The marker of the checkpoint at ``place``.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    try:
        with open_folder(place) as folder:
            return marker_in(folder, place)
    except OSError as error:
        raise _unreadable(place, error) from error


def marker_in(folder: int, place: Path) -> Marker:
    """The marker of the checkpoint in an open folder, whose path is ``place``; raises as ``read_marker``."""
    try:
        text = read_plain(folder, MARKER, MOST_MARKER_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(place, error) from error
    return parse_marker(text, place / MARKER)


def _unreadable(place: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"expected the marker of a checkpoint at {place / MARKER}, found that it cannot be read: {error}"
    )


def check_sizes(folder: int, place: Path, marker: Marker) -> None:
    """Check that all files of the checkpoint in an open folder are there, plain files, and none is cut short.

    Raises:
        CheckpointError: names those that are not.
    """
    wrong = []
    for name, (size, _) in marker.files.items():
        try:
            descriptor = open_plain(folder, name)
            size_now = os.fstat(descriptor).st_size
            os.close(descriptor)
            if size_now != size:
                wrong.append(f"{name} ({size_now:,} bytes of {size:,})")
        except OSError as error:
            wrong.append(f"{name} ({error.strerror or error})")
    if wrong:
        raise CheckpointError(
            f"expected the {len(marker.files)} files of {place} as they were written, found {len(wrong)} that are not: "
            f"{first_few(wrong)}. Ranks of all nodes have to write to one file system; load another checkpoint where "
            f"this one has been damaged"
        )


def prune(newest: Path, keep: int) -> str:
    """Remove all finished checkpoints but the last ``keep`` saved, of which ``newest`` is one.

    Returns:
        The ones that could not be removed, in words; empty if there are none.
    """
    failed: list[str] = []
    with open_folder(newest.parent) as folder:
        others = [name for name in os.listdir(folder) if name != newest.name and _NAME.fullmatch(name)]
        finished = [
            (_order(marker), marker.saved_at, name)
            for name in others
            if (marker := _marker_of(folder, newest.parent / name)) is not None
        ]
        for _, _, name in sorted(finished, reverse=True)[keep - 1 :]:
            # Under a name that is none of a checkpoint's first, so that one that is half gone is never taken for one.
            gone = f".{name}-{secrets.token_hex(8)}.gone"
            try:
                os.rename(name, gone, src_dir_fd=folder, dst_dir_fd=folder)
            except FileNotFoundError:
                continue  # another process has removed it
            except OSError as error:
                failed.append(f"{name} ({error.strerror})")
                continue
            shutil.rmtree(newest.parent / gone, ignore_errors=True)
    return first_few(failed) if failed else ""


def _marker_of(folder: int, place: Path) -> Marker | None:
    """The marker of a finished checkpoint in an open folder; None if it is not one, or unknown: it is left alone."""
    try:
        with open_folder(place.name, folder, follow=False) as inner:
            return marker_in(inner, place)
    except (OSError, CheckpointError):
        return None


def _order(marker: Marker) -> int:
    """The position of a checkpoint in its folder's order: clocks may be set back, and step counts may restart."""
    order = marker.about.get(_OLDER)
    return order if type(order) is int else 0  # a checkpoint of an earlier version: its time tells


def _order_of_latest(folder: int, path: Path) -> int:
    """The order of the checkpoint that was saved last, as far as the folder says; 0 if there is none."""
    try:
        name = read_plain(folder, LATEST, _MOST_LATEST_BYTES).decode(errors="replace").strip()
    except OSError:
        name = ""
    if _NAME.fullmatch(name) and (marker := _marker_of(folder, path / name)):
        return _order(marker)
    markers = [_marker_of(folder, path / other) for other in os.listdir(folder) if _NAME.fullmatch(other)]
    return max((_order(marker) for marker in markers if marker is not None), default=0)


@contextlib.contextmanager
def open_folder(path: str | Path, parent: int | None = None, *, follow: bool = True) -> Iterator[int]:
    """The descriptor of a folder, ``path`` relative to ``parent`` if given; ``follow``: it may be a link."""
    descriptor = os.open(path, _FOLDER | (0 if follow else os.O_NOFOLLOW), dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
