"""Text files that the user has named: read up to a size that no such file has, and written whole, or a clear error."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from zerofx.disk.own_files import write_text
from zerofx.errors import UsageError

_MOST_BYTES = 2**30  # of a plan or a graph, many times what one has


def read_named(path: str | Path) -> str:
    """What is in a file, as text; a pipe is read to its end, a device is not read.

    Raises:
        OSError: it cannot be read, is a device, or is longer than any file of ours.
        UnicodeDecodeError: it is no text.
    """
    with Path(path).open("rb") as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is a device")
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise OSError(f"{path} has more than {_MOST_BYTES} bytes")
    return data.decode()


def write_named(path: str | Path, text: str) -> None:
    """Write a file as a whole, as ``write_text``; what UTF-8 has no bytes for is written escaped.

    Raises:
        UsageError: it cannot be written; what was there is as it was, where it is a plain file.
    """
    try:
        write_text(path, as_utf8(text))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"expected a file that can be written, found none at {path}: {why}") from error


def as_utf8(text: str) -> str:
    """``text``, with what UTF-8 has no bytes for escaped, such as half a surrogate pair in a layer's name."""
    return text.encode("utf-8", "backslashreplace").decode()
