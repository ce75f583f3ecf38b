"""Steps that are done in the background, on a thread of their own, one after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

Step = Callable[[], object]


class Background:
    """Steps in order, each once. A step may append others. After one that fails, none is done.

    Args:
        name: of the thread.
        steps: to begin with ``resume``.
    """

    def __init__(self, name: str, steps: Iterable[Step] = ()) -> None:
        self._name = name
        self._steps = deque(steps)
        self._changed = threading.Condition()
        self._is_running = self._is_stopped = False
        self._error: BaseException | None = None

    def append(self, step: Step) -> None:
        """Do ``step`` too, after what there is."""
        with self._changed:
            if self._error is not None:
                return
            self._steps.append(step)
        self.resume()

    def resume(self) -> None:
        """Go on with the steps that are left."""
        with self._changed:
            self._is_stopped = False
            if self._steps and not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name=self._name).start()

    def stop(self) -> None:
        """Begin no further step until ``resume``; the one being done is not interrupted."""
        with self._changed:
            self._is_stopped = True

    def wait(self) -> BaseException | None:
        """Wait until no step is being done; returns what a step has raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running)
            return self._error

    def _run(self) -> None:
        while (step := self._next()) is not None:
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - for who waits
                with self._changed:
                    self._error = error
                    self._steps.clear()

    def _next(self) -> Step | None:
        with self._changed:
            if self._steps and not self._is_stopped:
                return self._steps.popleft()
            self._is_running = False
            self._changed.notify_all()
            return None
