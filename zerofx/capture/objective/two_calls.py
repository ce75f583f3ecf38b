"""Check that later calls of a forward do the same as the first: a step is that call, again and again.

A module may note in its first call, in a number or a flag, that it has been called, and take another branch from then
on. That is fine where it makes a table once and reads it later, since a step makes it again. It is not where the first
call sets up the module for the batch that it is given, or computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.node import map_aggregate

from zerofx.capture.objective.loss import LossModule
from zerofx.capture.objective.module_state import attribute_tensors, numbers_of
from zerofx.errors import CaptureError, warn
from zerofx.torch_private.capture import FakeTensorMode
from zerofx.torch_private.dispatch import TorchDispatchMode
from zerofx.torch_private.tensors import memory_of, version_of
from zerofx.units import first_few


def check_second_call(lossy: LossModule, fakes: tuple[torch.Tensor, ...], mode: FakeTensorMode) -> None:
    """Call a forward twice more if it changes plain values; warns of numbers that count its calls.

    Values that do not affect later calls stay on the modules, and can be read. Values that make a later call find a
    different value in a buffer, put there by the first call, are effects of the step.

    Raises:
        CaptureError: later calls are not as the first.
    """
    # The code that the forward runs may have been known in none of its runs.
    if not lossy.objective.num_watched and lossy.objective.executed.may_write():
        with mode:
            lossy(*fakes)
    if not lossy.changed:
        return
    values = [*fakes, *(parameter for parameter in lossy.model.parameters() if parameter.requires_grad)]
    with lossy.restore_state(), mode:
        earlier = dict(attribute_tensors(lossy.model))
        first = _Run(values)
        first_written = first.call(lossy, fakes)
        numbers, later = numbers_of(lossy.model), dict(attribute_tensors(lossy.model))
        second = _Run(values)
        written = second.call(lossy, fakes)
        counts = {name for name, _ in numbers_of(lossy.model).items() - numbers.items()}
    plain = {name: change for name, change in lossy.changed.items() if change is not None}
    if first.calls == second.calls:
        for change in plain.values() if len(plain) == len(lossy.changed) else ():  # a flag may tell of hooks
            if change.full not in counts:
                change.make()
        if counts:
            lossy.objective.unread |= counts
            warn(
                f"expected a forward that changes no Python values of its modules from call to call, found that it "
                f"changes {first_few(sorted(counts))}: no step changes it; register what is to change as a buffer"
            )
        return
    tables = {memory_of(tensor) for name, tensor in later.items() if earlier.get(name) is not tensor}
    tables |= {memory for name, memory in first_written.items() if name not in written}
    found_there = tables & second.read
    replaced = lossy.left.keys() & lossy.changed.keys()
    if counts or replaced or not found_there or found_there & first.follows:
        raise CaptureError(
            f"expected a forward that does in each call what it does in its first, found that later ones do something "
            f"else, by {first_few(lossy.changed)}: call the model once before zerofx.compile, if later "
            f"ones are alike; keep in a buffer, or change between steps, what differs from call to call"
        )
    if not lossy.left and len(plain) == len(lossy.changed):
        lossy.objective.effects.update(plain)


class _Run(TorchDispatchMode):
    """The record of a call: operators with their arguments (shapes of tensors), the memory that they read, and the
    memory that depends on ``values`` or is random."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.calls: list[str] = []
        self.read: set[int] = set()
        self.follows = {memory_of(tensor) for tensor in values}
        self._kept: list[torch.Tensor] = []  # so that no memory is used twice

    def call(self, lossy: LossModule, fakes: tuple[torch.Tensor, ...]) -> Mapping[str, int]:
        """Run a call; returns the memory of the buffers that it writes or replaces, by name."""
        before = {name: (buffer, version_of(buffer)) for name, buffer in lossy.all_buffers().items()}
        with self:
            lossy.call_without_restoring(fakes)
        after = lossy.all_buffers()
        is_written = {
            name: after[name] is not old or version_of(old) != version for name, (old, version) in before.items()
        }
        return {name: memory_of(after[name]) for name, written in is_written.items() if written}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, results = list[torch.Tensor](), list[torch.Tensor]()

        def describe(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            given.append(leaf)
            return tuple(leaf.shape)

        text = f"{func} {map_aggregate((args, kwargs or {}), describe)}"
        result = func(*args, **(kwargs or {}))
        map_aggregate(result, lambda leaf: results.append(leaf) if isinstance(leaf, torch.Tensor) else None)
        self._kept += results
        read = {memory_of(tensor) for tensor in given}
        self.read |= read
        if read & self.follows or torch.Tag.nondeterministic_seeded in func.tags:
            self.follows |= {memory_of(tensor) for tensor in results}
        if func.namespace != "prim":  # a question, such as for a tensor's device, whose answer may be remembered
            self.calls.append(text)
        return result
