"""A model called outside of its step, a bucket at a time: gathered for modules that read it, and let go of after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from zerofx.runtime.state.state import TrainingState
from zerofx.torch_private.modules import parameter_table


@contextmanager
def gather_on_demand(state: TrainingState) -> Iterator[None]:
    """While open, parameters have values in calls of the modules that they are registered in.

    Those of a bucket stay until another is gathered: at most what modules that call one another read is there, and one
    bucket besides. Ranks make the same calls in the same order, as each gathers. What reads a parameter without a call
    of its module is refused (``held.py``).
    """
    on_demand = _OnDemand(state)
    with ExitStack() as stack:
        for module in state.model.modules():
            if buckets := on_demand.buckets_of(module):
                stack.callback(module.register_forward_pre_hook(on_demand.enter(buckets)).remove)
                hook = module.register_forward_hook(on_demand.leave(buckets), always_call=True)
                stack.callback(hook.remove)
        try:
            yield
        finally:
            on_demand.release()


class _OnDemand:
    """The buckets that are there now, and how many calls in progress read each."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._there: dict[int, None] = {}
        self._readers = Counter[int]()
        self._of_parameter: dict[int, list[int]] = {}
        for bucket, _, slot in state.slots():
            self._of_parameter.setdefault(id(state.parameter(slot.source)), []).append(bucket.index)

    def buckets_of(self, module: nn.Module) -> list[int]:
        """The buckets in which a module's own parameters lie, in their order."""
        own = (self._of_parameter.get(id(parameter), []) for parameter in parameter_table(module).values())
        return sorted({index for indices in own for index in indices})

    def enter(self, buckets: list[int]) -> Any:
        """A hook in front of a call."""

        def hook(*_: Any) -> None:
            self._readers.update(buckets)
            missing = [index for index in buckets if index not in self._there]
            if missing:
                self.release()
            with torch.no_grad():
                for index in missing:
                    self._state.show_bucket(self._state.layout.buckets[index])
                    self._there[index] = None

        return hook

    def leave(self, buckets: list[int]) -> Any:
        """A hook after a call, also of one that raises."""
        return lambda *_: self._readers.subtract(buckets)

    def release(self) -> None:
        """Let go of the buckets that no call in progress reads."""
        for index in [index for index in self._there if not self._readers[index]]:
            del self._there[index]
            self._state.hide_bucket(self._state.layout.buckets[index])
