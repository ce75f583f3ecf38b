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

_Key = tuple[int, int]  # the number of a stage, and of a bucket there


@contextmanager
def gather_on_demand(state: TrainingState) -> Iterator[None]:
    """While open, parameters have values in calls of the modules that they are registered in.

    Those of a bucket stay until another is gathered: at most what modules that call one another read is there, and one
    bucket besides. What other stages have, these send. Ranks make the same calls in the same order, as each gathers.
    What reads a parameter without a call of its module is refused (``held.py``).
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
    """The buckets that are there now, each by its stage and number, and how many calls in progress read each."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._there: dict[_Key, None] = {}
        self._readers = Counter[_Key]()
        self._of_parameter: dict[int, list[_Key]] = {}
        here = state.number_along("pipe")
        for bucket, _, slot in state.slots():
            self._of_parameter.setdefault(id(state.parameter(slot.source)), []).append((here, bucket.index))
        for stage, buckets in enumerate(state.of_stages):
            for index, names in enumerate(buckets if stage != here else ()):
                for name in names:
                    self._of_parameter[id(state.parameter(name))] = [(stage, index)]

    def buckets_of(self, module: nn.Module) -> list[_Key]:
        """The buckets in which a module's own parameters lie, in their order."""
        own = (self._of_parameter.get(id(parameter), []) for parameter in parameter_table(module).values())
        return sorted({key for keys in own for key in keys})

    def enter(self, buckets: list[_Key]) -> Any:
        """A hook in front of a call."""

        def hook(*_: Any) -> None:
            self._readers.update(buckets)
            missing = [key for key in buckets if key not in self._there]
            if missing:
                self.release()
            with torch.no_grad():
                for key in missing:
                    self._state.show_bucket_of(*key)
                    self._there[key] = None

        return hook

    def leave(self, buckets: list[_Key]) -> Any:
        """A hook after a call, also of one that raises."""
        return lambda *_: self._readers.subtract(buckets)

    def release(self) -> None:
        """Let go of the buckets that no call in progress reads."""
        for key in [key for key in self._there if not self._readers[key]]:
            del self._there[key]
            self._state.hide_bucket_of(*key)
