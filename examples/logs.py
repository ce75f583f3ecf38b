"""Numbers of a run, as lines of JSON and for TensorBoard."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class Log:
    """Appends what it is given to `log.jsonl` in `folder`, and to TensorBoard's files there where that is installed.

    With no folder, or on another process than the first, nothing is written. A run that is resumed goes on in the same
    file: lines of steps that were not saved, and are done again, are there twice, the later ones after a line that says
    from where.
    """

    def __init__(self, folder: Path | None, *, rank: int, resumed_from: Path | None = None) -> None:
        self._file: Any = None
        self._board: Any = None
        if folder is None or rank != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "log.jsonl").open("a", encoding="utf-8")
        if resumed_from is not None:
            self._line({"resumed_from": resumed_from.name})
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(folder)

    def write(self, numbers: Mapping[str, float]) -> None:
        """Note the numbers of a step, whose own is "step"."""
        if self._file is not None:
            self._line(dict(numbers))
        if self._board is not None:
            for name, number in numbers.items():
                self._board.add_scalar(name, number, int(numbers["step"]))

    def close(self) -> None:
        for sink in (self._file, self._board):
            if sink is not None:
                sink.close()

    def _line(self, content: dict[str, Any]) -> None:
        self._file.write(json.dumps({"time": round(time.time(), 3), **content}) + "\n")
        self._file.flush()
