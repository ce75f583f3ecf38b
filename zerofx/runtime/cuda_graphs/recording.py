"""A step as CUDA graphs and calls: recorded by running its emitted function once without computing anything.

The device's work in regions is captured. Work with a part on the host stays a call between two graphs: collectives,
waits, and the optimizer's update with its numbers of this step. So one recording serves every learning rate, and
collectives run as they do without graphs, in the same order.

    graph 0 | update(bucket 2) | graph 1 | update(bucket 1) | graph 2 | update(bucket 0)        on one rank
    graph 0 | all_gather 1 | graph 1 | wait | graph 2 ...                                       on several

A value of the emitted function is one of three things here: a tensor of the graphs, whose memory stays where it is; a
``_Given``, which is looked up in the state that each step is run with; or a ``_Late``, which a call makes in each step.
A reader of a ``_Late`` is a call itself. Graphs read given tensors at fixed addresses: ``Recording.fits`` compares
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from zerofx.errors import ZeroFXError
from zerofx.ir.aliasing import storage_bytes
from zerofx.runtime.cuda_graphs.capturing import Capturer, Launch
from zerofx.runtime.executor import Outcome, Runtime, StepFunction, functions_of, replace_functions
from zerofx.torch_private.operators import pytree

T = TypeVar("T")

_BETWEEN_GRAPHS = frozenset(
    {
        "broadcast",
        "check_finite",
        "check_overflow",
        "check_gradients",
        "hyperparameters",
        "reduce_scatter",
        "reduce_scatter_into",
    }
)  # what a runtime does in each step as it is called there; gathers and waits besides


class CannotRecordError(ZeroFXError, RuntimeError):
    """The step does something that graphs and calls cannot represent; the message says what."""


@dataclass(frozen=True)
class _Given:
    """The value under this name in the state that a step is run with."""

    name: str


@dataclass(frozen=True)
class _Late:
    """A value that a call makes in each step: output ``index`` of call ``number``, or its whole result for None."""

    number: int
    index: int | None = None


@dataclass(frozen=True)
class _Gather:
    """A gather that has been started into a buffer of the graphs."""

    started: _Late
    full: torch.Tensor


@dataclass
class _Values:
    """The arguments of one step's calls, and their results so far, by number."""

    runtime: Runtime
    state: Mapping[str, Any]
    results: dict[int, Any] = field(default_factory=dict)

    def find(self, argument: Any) -> Any:
        match argument:
            case _Given():
                return self.state[argument.name]
            case _Late():
                outcome = self.results[argument.number]
                return outcome if argument.index is None else outcome[argument.index]
            case list():
                return [self.find(each) for each in argument]
            case _:
                return argument


@dataclass
class _Call:
    """A call between graphs. ``over``: the calls whose results nothing reads after this one."""

    number: int
    function: Callable[[_Values, list[Any]], Any]
    args: list[Any]
    over: tuple[int, ...] = ()

    def run(self, values: _Values) -> None:
        values.results[self.number] = self.function(values, [values.find(argument) for argument in self.args])
        for number in self.over:
            values.results.pop(number, None)


@dataclass
class Recording:
    """A recorded step. ``addresses`` are those of the tensors that its graphs read or write, by name."""

    _pieces: list[_Call | Launch]
    _batch: dict[str, tuple[torch.Tensor, torch.Tensor]]  # the inputs of graphs, each with its memory
    _addresses: dict[str, int]
    _outcome: Any
    graphs: tuple[Launch, ...]

    @property
    def num_graphs(self) -> int:
        return sum(not isinstance(piece, _Call) for piece in self._pieces)

    @property
    def num_calls(self) -> int:
        return sum(isinstance(piece, _Call) for piece in self._pieces)

    def fits(self, state: Mapping[str, Any]) -> bool:
        """True if all tensors that the graphs read or write are at the same addresses."""
        return all(state[name].data_ptr() == address for name, address in self._addresses.items())

    def run(self, runtime: Runtime, state: Mapping[str, Any], batch: Mapping[str, torch.Tensor]) -> Outcome:
        """Run one step; its result has memory of its own."""
        for name, (_, memory) in self._batch.items():
            memory.copy_(_span(batch[name]))
        values = _Values(runtime, state)
        for piece in self._pieces:
            if isinstance(piece, _Call):
                piece.run(values)
            else:
                piece()
        outcome = values.find(self._outcome)
        return own_memory(tuple(outcome) if isinstance(outcome, list) else outcome)


def own_memory(outcome: T) -> T:
    """A copy of a step's result, which graphs store where the next step writes."""
    copied: T = pytree.tree_map_only(torch.Tensor, torch.clone, outcome)
    return copied


def record(
    capturer: Capturer,
    function: StepFunction,
    functions: Mapping[str, int],
    updates: frozenset[str],
    runtime: Runtime,
    state: Mapping[str, Any],
    batch: Mapping[str, torch.Tensor],
    *,
    fresh: bool = True,
) -> Recording:
    """Record a step. Nothing is computed, sent or updated.

    Args:
        function: the step's function.
        functions: the names of its region functions, each with the number of values it returns.
        updates: the region functions that take this step's numbers of the optimizer. runtime, state, batch: as for
            ``function``.
        fresh: no other recording of this capturer's is left.

    Raises:
        CannotRecordError: the step makes a call that cannot be recorded.
        RuntimeError: the device refused to capture; torch's message says why.
    """
    recorder = _Recorder(capturer, runtime, state)
    called = functions_of(function, functions)
    regions = {
        name: _Region(recorder, called[name], num_outputs, is_update=name in updates)
        for name, num_outputs in functions.items()
    }
    inputs = {name: _copy_with_memory(tensor) for name, tensor in batch.items()}
    places = {name: _Given(name) for name in state}
    with capturer.session(fresh=fresh):
        try:
            outcome = replace_functions(function, regions)(
                recorder,  # type: ignore[arg-type]  # has a runtime's methods
                places,  # type: ignore[arg-type]  # names instead of tensors
                {name: view for name, (view, _) in inputs.items()},
            )
            recorder.close()
        except BaseException:
            capturer.give_up()
            raise
        return recorder.finish(inputs, list(outcome) if isinstance(outcome, tuple) else outcome)


class _Recorder:
    """Stands in for a runtime while a step is recorded. Its methods are named like a runtime's."""

    def __init__(self, capturer: Capturer, runtime: Runtime, state: Mapping[str, Any]) -> None:
        self._capturer = capturer
        self._runtime = runtime
        self._state = state
        self._pieces: list[_Call | Launch] = []
        self._graphs: list[Launch] = []
        self._addresses: dict[str, int] = {}
        self._num_calls = 0
        self._is_open = False
        self._has_work = False

    # ------------------------------------------------------------------------------------------------ in graphs

    def capture(self, function: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        """Run ``function`` on the tensors themselves, inside a graph; it empties ``inputs``."""
        self._open(work=True)
        inputs[:] = [self._fix_address(argument) for argument in inputs]
        return function(inputs)

    def empty_gradients(self, bucket: int) -> torch.Tensor:
        self._open(work=True)
        return self._runtime.empty_gradients(bucket)

    def part(self, whole: Any, size: Sequence[int], stride: Sequence[int], offset: int) -> Any:
        if isinstance(whole, _Late):
            return self.call(lambda values, args: values.runtime.part(*args), [whole, size, stride, offset])
        return self._runtime.part(self._fix_address(whole), size, stride, offset)

    def can_capture(self, inputs: Sequence[Any]) -> bool:
        """True if all of ``inputs`` are at addresses that are known now."""
        return all(
            isinstance(argument, torch.Tensor)
            or (isinstance(argument, _Given) and isinstance(self._state[argument.name], torch.Tensor))
            for argument in inputs
        )

    def _open(self, *, work: bool) -> None:
        if not self._is_open:
            self._capturer.begin()
            self._is_open = True
        self._has_work |= work

    def close(self) -> None:
        """End the graph that is being captured, if one is."""
        if not self._is_open:
            return
        launch = self._capturer.end()
        self._graphs.append(launch)  # also one that only made a buffer: it holds the memory
        if self._has_work:
            self._pieces.append(launch)
        self._is_open = self._has_work = False

    def _fix_address(self, argument: Any) -> Any:
        if not isinstance(argument, _Given):
            return argument
        tensor = self._state[argument.name]
        self._addresses[argument.name] = tensor.data_ptr()
        return tensor

    # ------------------------------------------------------------------------------------------------ between graphs

    def call(self, function: Callable[[_Values, list[Any]], Any], args: Sequence[Any]) -> _Late:
        """Note a call; in each step ``function`` is given the values that ``args`` stand for."""
        self.close()
        late = _Late(self._num_calls)
        self._num_calls += 1
        self._pieces.append(_Call(late.number, function, [self._alias(argument) for argument in args]))
        return late

    def _alias(self, argument: Any) -> Any:
        """An argument as a call keeps it: of a tensor of the graphs its address, not its memory."""
        return pytree.tree_map_only(torch.Tensor, self._capturer.alias, argument)

    def _call_runtime(self, name: str, *args: Any, **keywords: Any) -> _Late:
        return self.call(lambda values, given: getattr(values.runtime, name)(*given, **keywords), args)

    def all_gather(
        self, shard: Any, bucket: int, num_ranks: int, more: int = 0, *, in_place: bool = False, over: str = "shard"
    ) -> _Late | _Gather:
        if isinstance(shard, _Late):
            return self._call_runtime("all_gather", shard, bucket, num_ranks, more, over=over)
        like = self._state[shard.name] if isinstance(shard, _Given) else shard
        self._open(work=False)
        full = like.new_empty(like.numel() * num_ranks)
        return _Gather(self._call_runtime("all_gather_onto", full, shard, more, over=over), full)

    def all_gather_into(self, full: Any, shard: Any, bucket: int, *, over: str = "shard") -> _Late | _Gather:
        started = self._call_runtime("all_gather_into", full, shard, bucket, over=over)
        return _Gather(started, full) if isinstance(full, torch.Tensor) else started

    def wait(self, pending: Any, source: Any = None) -> Any:
        started = pending.started if isinstance(pending, _Gather) else pending
        arrived = self._call_runtime("wait", started, source)
        return pending.full if isinstance(pending, _Gather) else arrived

    def __getattr__(self, name: str) -> Any:
        if name in _BETWEEN_GRAPHS:
            return partial(self._call_runtime, name)
        raise CannotRecordError(f"expected a step of regions, collectives and updates, found runtime.{name} in it")

    # ------------------------------------------------------------------------------------------------ the outcome

    def finish(self, inputs: dict[str, tuple[torch.Tensor, torch.Tensor]], outcome: Any) -> Recording:
        last: dict[int, _Call] = {}
        for piece in self._pieces:
            if isinstance(piece, _Call):
                last[piece.number] = piece
                last.update(dict.fromkeys(_late(piece.args), piece))
        returned = set(_late([outcome]))
        for number, piece in last.items():
            if number not in returned:
                piece.over += (number,)
        return Recording(self._pieces, inputs, self._addresses, self._alias(outcome), tuple(self._graphs))


@dataclass(frozen=True)
class _Region:
    """A region's function while a step is recorded."""

    recorder: _Recorder
    function: Callable[[list[Any]], Any]
    num_outputs: int
    is_update: bool

    def __call__(self, inputs: list[Any]) -> Any:
        if not self.is_update and self.recorder.can_capture(inputs):
            return self.recorder.capture(self.function, inputs)
        arguments = list(inputs)
        inputs.clear()
        late = self.recorder.call(self._call, arguments)
        return tuple(_Late(late.number, index) for index in range(self.num_outputs))

    def _call(self, values: _Values, inputs: list[Any]) -> Any:
        return values.runtime.update(self.function, inputs) if self.is_update else self.function(inputs)


def _late(args: Sequence[Any]) -> list[int]:
    """The numbers of the calls whose results are among ``args``."""
    return [leaf.number for leaf in pytree.tree_leaves(args) if isinstance(leaf, _Late)]


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """The elements from the first to the last that ``tensor`` addresses, whatever its strides."""
    return tensor.as_strided((storage_bytes(tensor) // tensor.element_size(),), (1,))


def _copy_with_memory(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy with the same strides, and its memory."""
    memory = _span(tensor).clone()
    return memory.as_strided(tensor.shape, tensor.stride()), memory
