"""Update buffers a second time where eager mode does, when it recomputes a checkpointed block in backward.

A batch norm in a block adds each batch to its statistics twice. Of a block, only the operators that write to buffers or
read these buffers are run again: at the end of the forward, the last block first, as backward goes.
``bring_forward.py`` moves them to their inputs.

Does not handle: blocks that compute with a buffer that they change, or replace it by another tensor. In eager mode the
gradient of such a block does not match its loss; here it does, and a warning says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_aggregate

from zerofx.capture.layers import annotate_layer, current_layer, run_again
from zerofx.errors import warn
from zerofx.torch_private.activation_checkpoints import Kind, disable_checkpoints, saves_tensors
from zerofx.torch_private.dispatch import TorchDispatchMode
from zerofx.torch_private.operators import OpOverload, schema_of
from zerofx.units import first_few


class CheckpointedBlocks:
    """The calls of checkpointed blocks, in order."""

    def __init__(self) -> None:
        self._open: list[_Block] = []
        self._closed: list[_Block] = []

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """While open, ``torch.utils.checkpoint`` runs blocks as they are, and their writes are recorded."""
        with disable_checkpoints(self._run):
            yield

    @contextlib.contextmanager
    def _run(self, kind: Kind) -> Iterator[None]:
        block, outer = _Block(kind), self._open[-1] if self._open else None
        began = len(outer.calls) if outer is not None else 0
        self._open.append(block)
        try:
            with block:
                yield
        finally:
            self._open.pop()
        if outer is not None:
            outer.has_inner(range(began, len(outer.calls)), kind)
        self._closed.append(block)

    def run_again(
        self, loss: torch.Tensor, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
    ) -> None:
        """Write to buffers what eager mode writes when it recomputes blocks in the backward of ``loss``, and let go of
        the calls.

        Args:
            loss: of this forward.
            before: the buffers that blocks may write to, by name.
            after: the buffers after the forward, some of which may be other tensors.
        """
        names = {id(buffer): name for name, buffer in reversed(list(before.items()))}
        put = {id(buffer): name for name, buffer in after.items() if buffer is not before.get(name)}
        blocks, self._closed = self._closed, []
        again = [(block.writes(names), block.gives(put)) for block in reversed(blocks)]
        reached = _nodes_from(loss.grad_fn) if any(writes or gives for writes, gives in again) else set()
        for writes, gives in again:
            computes = writes.run() if writes is not None and not reached.isdisjoint(writes.functions) else []
            if affected := [*computes, *gives]:
                warn(
                    f"expected a block under torch.utils.checkpoint that does the same again in backward, found that "
                    f"one changes {first_few(affected)} and computes its result with it, or puts another tensor in its "
                    f"place: eager mode does so once more before it computes the block's gradient; here there is one "
                    f"forward, and its gradient. Change the buffer outside of the block"
                )


@dataclass(frozen=True)
class _Call:
    function: OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    layer: str

    def run(self, instead: Mapping[int, torch.Tensor]) -> Any:
        """Run the call once more, with tensors replaced by ``instead``, by identity."""
        args, kwargs = map_aggregate((self.args, dict(self.kwargs)), lambda leaf: instead.get(id(leaf), leaf))
        return self.function(*args, **kwargs)

    def tensors_read(self) -> list[torch.Tensor]:
        return _tensors((self.args, self.kwargs))

    def written_tensors(self) -> list[torch.Tensor]:
        """The tensors that the call writes to: by its schema, or the running statistics of a batch norm that trains."""
        arguments = schema_of(self.function).arguments
        values = {argument.name: value for argument, value in zip(arguments, self.args, strict=False)}
        values |= self.kwargs
        names = {entry.name for entry in arguments if entry.alias_info is not None and entry.alias_info.is_write}
        if self.has_statistics and values.get("training", True):
            names |= _STATISTICS
        return _tensors([values.get(name) for name in names])

    @property
    def has_statistics(self) -> bool:
        return any(argument.name in _STATISTICS for argument in schema_of(self.function).arguments)

    @property
    def gives_view(self) -> bool:
        returns = schema_of(self.function).returns
        return any(entry.alias_info is not None and not entry.alias_info.is_write for entry in returns)


class _Block(TorchDispatchMode):
    """Records the operators that run in a block."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._kind = kind
        self.calls: list[_Call] = []
        self._inner: set[int] = set()  # calls of blocks in the block, which save for themselves
        self._last_saved = -1  # of what those are given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append(_Call(func, args, kwargs or {}, result, current_layer()))
        return result

    def has_inner(self, calls: range, kind: Kind) -> None:
        """Note that a block inside this one made ``calls``."""
        self._inner.update(calls)
        self._last_saved = (calls.stop if kind.is_reentrant else calls.start) - 1

    def gives(self, names: Mapping[int, str]) -> list[str]:
        """The names of the results that have one, by identity."""
        return [names[id(tensor)] for call in self.calls for tensor in _tensors(call.result) if id(tensor) in names]

    def writes(self, names: Mapping[int, str]) -> _Writes | None:
        """The buffer writes of recomputing the block, for buffers with these ``names``; None if it writes nothing."""
        owners: dict[int, int] = {}  # of views
        for call in self.calls:
            if call.gives_view and (read := call.tensors_read()):
                owners |= {id(view): owners.get(id(read[0]), id(read[0])) for view in _tensors(call.result)}
        changed = {
            owners.get(id(tensor), id(tensor)) for call in self.calls for tensor in call.written_tensors()
        } & names.keys()
        if not changed:
            return None
        functions = [
            {tensor.grad_fn for tensor in _tensors(call.result) if tensor.grad_fn is not None} for call in self.calls
        ]
        end = len(self.calls)
        if self._kind.stops_early:
            saving = (i for i, nodes in enumerate(functions) if i not in self._inner and any(map(saves_tensors, nodes)))
            end = 1 + max(self._last_saved, *saving, -1)
        return _Writes(self.calls[:end], {key: names[key] for key in changed}, owners, set().union(*functions))


@dataclass(frozen=True)
class _Writes:
    """The writes of a block to buffers.

    ``calls``: the calls that run when it is recomputed. ``changed``: the names of these buffers by identity.
    ``owners``: the tensor that a view is of, by identity. ``functions``: autograd's nodes of the block.
    """

    calls: list[_Call]
    changed: Mapping[int, str]
    owners: Mapping[int, int]
    functions: set[Any]

    def run(self) -> list[str]:
        """Run the calls again; returns the buffers whose changes other results with a gradient depend on."""
        renewed: dict[int, torch.Tensor] = {}  # results that follow from the buffers, by identities of the first
        computes = False
        for call in self.calls:
            if not any(id(tensor) in renewed or self._owner(tensor) in self.changed for tensor in call.tensors_read()):
                continue
            with torch.no_grad(), annotate_layer(call.layer), run_again():
                result = call.run(renewed)
            if call.written_tensors() and (call.has_statistics or not call.gives_view):
                continue
            first = _tensors(call.result)
            renewed |= {id(old): new for old, new in zip(first, _tensors(result), strict=True)}
            computes = computes or any(tensor.requires_grad for tensor in first)
        return sorted(self.changed.values()) if computes else []

    def _owner(self, tensor: torch.Tensor) -> int:
        return self.owners.get(id(tensor), id(tensor))


_STATISTICS = frozenset({"running_mean", "running_var"})


def _nodes_from(function: Any) -> set[Any]:
    """Autograd's nodes that a backward from ``function`` runs."""
    reached, waiting = {function}, [function]
    while waiting:
        for source, _ in waiting.pop().next_functions:
            if source is not None and source not in reached:
                reached.add(source)
                waiting.append(source)
    return reached


def _tensors(tree: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    map_aggregate(tree, lambda leaf: tensors.append(leaf) if isinstance(leaf, torch.Tensor) else None)
    return tensors
