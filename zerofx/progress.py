"""Progress bars on stderr, if that is a terminal, for work that takes more than two seconds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

PATIENCE_SECONDS = 2.0  # what is done sooner shows no bar
_BEAT_SECONDS = 0.5  # how often the elapsed time is written anew
_WITHOUT_COUNT = "{desc}: {elapsed}"


@contextmanager
def watch_progress(what: str, unit: str = "", total: int | None = None, *, show: bool = True) -> Iterator[tqdm[Any]]:
    """A bar that says ``what`` is being done for as long as the block runs; ``bar.update()`` counts.

    Args:
        what: the text in front; ``bar.set_description`` changes it.
        unit: what is counted, in the plural; ``""`` shows the elapsed time alone.
        total: how many there will be, if that is known.
        show: false for a rank that has nothing to say, or where another bar says it.

    The elapsed time moves on while a single call of long duration runs, too. Without a terminal nothing is written.
    """
    bar = tqdm(
        desc=what,
        unit=f" {unit}",
        total=total,
        bar_format=None if unit else _WITHOUT_COUNT,
        delay=PATIENCE_SECONDS,
        miniters=0,
        leave=False,
        disable=None if show else True,  # None: where stderr is no terminal
    )
    done = threading.Event()
    beat = threading.Thread(target=_beat, args=(bar, done), daemon=True)
    with bar:
        if not bar.disable:
            beat.start()
        try:
            yield bar
        finally:
            done.set()
            if beat.ident is not None:
                beat.join()


def _beat(bar: tqdm[Any], done: threading.Event) -> None:
    while not done.wait(_BEAT_SECONDS):
        bar.update(0)
