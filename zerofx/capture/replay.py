"""Run the code around a forward's modules again after a step, with the values that the step computed.

A forward that reads tensors for its logs (``values/logged.py``) is called again on fakes, without what its modules
compute, once the step has run::

    outputs = model(**inputs)                          # what it gave in the trace
    loss = outputs.loss                                # a fake
    self.metrics["loss"].append(loss.item())           # the step's own loss, appended by the script's own line

Each tensor has a number that says how it was computed, by which its values are found among the step's outputs. The
loss and all else that the step returns have to have the numbers that they had in the trace: then what was read decided
nothing of them. At capture that is tried with several values for all that is read.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from zerofx.capture.blame import depends_on_values, line_of_caller
from zerofx.capture.objective.loss import LossModule, leave_no_trace, roots_of
from zerofx.capture.python_state.undo import Before, WritesError
from zerofx.capture.traceable import Forward, model_tensors, traceable, try_eager_then_compiled
from zerofx.capture.values.logged import Source, example_of
from zerofx.capture.values.tensor_numbers import ANY_NUMBER, Number, Numbers, tensors_of_tree
from zerofx.errors import CaptureError, UsageError, ZeroFXError
from zerofx.torch_private.capture import fake_mode
from zerofx.torch_private.dispatch import without_modes
from zerofx.torch_private.operators import pytree
from zerofx.units import first_few

T = TypeVar("T")
_NUM_DRAWS = 4
_FLOATS = (0.0, -1e4, 1e4, float("nan"), 0.5)


def trace_logging(forward: Forward, trace: Callable[[bool], T]) -> T:
    """The result of ``try_eager_then_compiled``; also of a forward that reads values which only Python gets."""
    objective = forward.objective

    def retrace(compiled: bool) -> T:
        return objective.free_tensors.retrace(lambda: trace(compiled))

    if not objective.logging.is_on:
        before = Before(roots_of(forward.model, objective), objective.executed)
        refusal: Exception | None = None
        try:
            try:
                traced = try_eager_then_compiled(retrace)
                if not objective.logging.changes:
                    return traced
            except Exception as error:
                if not _reads_values(error):
                    raise
                refusal = error
            before.restore()
            objective.logging.is_on, objective.logging.compiled = True, refusal is not None
            try:
                Replay.make(forward, chooses=True)
            except BaseException as error:
                objective.logging.is_on = False
                objective.logging.untrue.clear()
                if isinstance(error, Exception) and refusal is None:
                    return traced
                decided_elsewhere = isinstance(error, ZeroFXError) and not _name_one_line(refusal, error)
                if refusal is None or decided_elsewhere or not isinstance(error, Exception):
                    raise
                raise refusal from error
        finally:
            refusal = None  # which would hold this frame, and that holds the model
    return _mute_writers(forward, lambda: retrace(objective.logging.compiled))


def _reads_values(error: Exception) -> bool:
    """True if a trace failed as values were read, which may be for a log."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    return depends_on_values(cause) or ".numpy() is not supported" in str(cause)


def _name_one_line(refusal: Exception | None, other: Exception) -> bool:
    """True if two refusals blame the same line: of the first, what is to be done there is known."""
    places = [line for line in str(refusal).splitlines() if line.startswith("  ")]
    return any(place.strip() in str(other) for place in places)


def _mute_writers(forward: Forward, trace: Callable[[], T]) -> T:
    """The result of ``trace``, in which what would write to a file or the like writes nothing."""
    while True:
        try:
            return trace()
        except Exception as error:
            chain = [error, error.__cause__, error.__context__]
            writer = next((each for each in chain if isinstance(each, WritesError)), None)
            if writer is None:
                raise
            # What it was raised through would keep the model.
            forward.objective.logging.writers.append(writer.with_traceback(None))


@dataclass(frozen=True)
class _Run:
    """One call: numbers of results, of buffers after it, and of what was read, with lines; whether it kept traced
    tensors somewhere; the lines of sums by rounding that results depend on, and those that read truths."""

    results: tuple[Number, ...]
    buffers: tuple[Number, ...]
    reads: tuple[Number, ...]
    lines: tuple[str, ...]
    keeps_traced: bool = False
    rounded: tuple[str, ...] = ()
    truths: tuple[str, ...] = ()

    def decides_as(self, other: _Run) -> bool:
        """True if both compute the same tensors."""
        return (self.results, self.buffers) == (other.results, other.buffers)


class Replay:
    """The code around the modules of one captured forward. ``make`` checks that what it reads decides no tensor.

    ``run`` calls it with the values of a step.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward, self._mode = forward, fake_mode()
        self._calls: dict[nn.Module, list[_Call]] = {}
        self._known = self._known_exactly = self._in_full = _Run((), (), (), ())
        # Which a step computes with where the code has numbers.
        self._has_inputs = bool(forward.objective.free_tensors.tape.inputs)

    @staticmethod
    def make(forward: Forward, *, chooses: bool = False) -> Replay:
        """The replay of a forward; ``chooses`` which branches of its logs are captured, for all its shapes.

        Raises:
            CaptureError: what it reads decides what the step computes, or what it keeps in Python does.
        """
        replay, logging = Replay(forward), forward.objective.logging
        tried, logging.tried = logging.tried, None
        _mute_writers(forward, lambda: forward.objective.free_tensors.retrace(replay._note))
        if chooses and _mute_writers(forward, replay._choose_branches):
            _mute_writers(forward, lambda: forward.objective.free_tensors.retrace(replay._note))
        if replay._has_inputs or replay._known != tried:
            _mute_writers(forward, replay._try_values)
        if chooses:  # the step that is about to be built has a replay of the same forward
            logging.tried = replay._known
        return replay

    @property
    def num_reads(self) -> int:
        """Tensors that are read."""
        return len(self._known.reads)

    def run(self, values: Sequence[torch.Tensor]) -> None:
        """Do all that the forward does besides computing tensors, with the values of what it reads, in their order.

        Raises:
            UsageError: what was read would have decided another step.
        """
        if len(values) != len(self._known.reads):
            raise UsageError(
                f"expected {len(self._known.reads)} tensors to be read for logs, as when the step was captured, found "
                f"{len(values)}: a forward is to do the same in each call"
            )
        given: dict[Number, list[torch.Tensor]] = {}
        for number, tensor in zip(self._known.reads, values, strict=True):
            given.setdefault(number, []).append(tensor)
        numbers = Numbers(self._has_inputs)

        def value(tensor: torch.Tensor) -> torch.Tensor:
            left = given.get(numbers.number(tensor))
            if left is None:
                raise UsageError(
                    f"expected a forward that reads for its logs what it read when the step was captured, found that "
                    f"the values of this step lead to a branch that reads something else, at\n  "
                    f"{line_of_caller()}\nThis step has been done: compute such a value before the "
                    f"branch, and let the branch choose between numbers"
                )
            real = left.pop(0) if len(left) > 1 else left[0]
            with without_modes():
                return real.detach().cpu()

        run = self._call(value, numbers, skips=True, undoes=False, is_real=True)
        if not run.decides_as(self._known):
            raise UsageError(
                f"expected values that are read for logs to decide nothing of a step, found that those of this step "
                f"would have decided its tensors, read at\n  {first_few(dict.fromkeys(run.lines))}\n"
                f"This step has been done as it was captured: go back to a checkpoint, and replace the branch by "
                f"torch.where"
            )

    def _note(self) -> None:
        """Run the whole forward, and learn what its modules give."""
        self._calls = {}
        recorder = _Recorder()
        self._known = self._call(example_of, Numbers(self._has_inputs), recorder=recorder)
        self._calls, self._in_full = recorder.calls(), self._known
        if self._known.rounded:
            raise CaptureError(
                f"expected a forward whose shapes do not depend on values, found that what it computes depends on the "
                f"elements that a mask names, as many as values say, at\n  {first_few(self._known.rounded)}\n"
                f"A step is planned for one shape: compute with all elements, and leave out what does not count by "
                f"torch.where or a weight of 0. Their sum, mean, minimum and maximum may be logged."
            )
        try:
            again = self._call(example_of, Numbers(self._has_inputs), skips=True)
        except WritesError:
            raise
        except Exception:  # noqa: BLE001 - then all of it runs each time, which says what is wrong
            again = None
        if again is None or (again.results, again.reads) != (self._known.results, self._known.reads):
            self._calls, again = {}, self._known
        self._known = again  # in which modules that are not called change no buffers
        # While values are tried, numbers of Python's stay the same: one that differs is computed from what is read.
        self._known_exactly = self._call(example_of, Numbers(), skips=True) if self._has_inputs else again
        if again.keeps_traced:
            raise CaptureError(
                "expected a forward that logs numbers, found that it keeps a tensor in a list, a dict or an attribute, "
                "where no step would put one: keep tensor.item() or tensor.tolist(), or return the tensor from forward="
            )

    def _choose_branches(self) -> bool:
        """Have truths be False in examples where more is read then, so that the step has it; returns whether any is.

        ``if x.isnan().all(): return nan``, say, reads nothing in its branch, and the minimum of ``x`` after it.
        """
        untrue, reads_more = self._forward.objective.logging.untrue, False
        tried = set[str]()
        while truths := [line for line in self._known.truths if line not in tried]:
            tried.add(truths[0])
            untrue.add(truths[0])
            run = self._attempt(example_of)
            if run is not None and set(run.reads) > set(self._known.reads):
                self._known, reads_more = run, True
            else:
                untrue.discard(truths[0])
        return reads_more

    def _try_values(self) -> None:
        draws = random.Random(0)
        sources: list[Source] = [_constant(value, value) for value in (0, *_FLOATS)]
        sources += [_draw(draws) for _ in range(_NUM_DRAWS)]
        # Modules that compute nothing here may read what was kept elsewhere: some values go through all of them.
        in_full = self._attempt(example_of, skips=False) if self._calls and self._has_inputs else self._in_full
        if self._calls and in_full is not None:
            for source in (_constant(0.5, 7), _draw(draws)):
                run = self._attempt(source, skips=False)
                if run is not None and not run.decides_as(in_full):
                    self._refuse(source)
        for source in sources:
            if (run := self._attempt(source)) is not None and not run.decides_as(self._known_exactly):
                self._refuse(source)
        self._try_second_call(draws)

    def _refuse(self, source: Source) -> NoReturn:
        lines = self._find_line(source)
        raise CaptureError(
            f"expected a forward whose path does not depend on values, found one that reads a tensor's value "
            f"at\n  {first_few(lines)}\nand computes tensors by it. A step is one graph, planned before it "
            f"runs: what is only logged may be read, for the rest replace .item(), float(tensor), or an if on "
            f"a tensor by torch.where or a Python value, name an argument of the batch that has the same "
            f"values in every step (constant=('mask',)), or take that part out of the training step."
        )

    def _find_line(self, source: Source) -> dict[str, None]:
        """The lines of the reads that decide something, changed one by one."""
        deciding: dict[str, None] = {}
        for index, line in enumerate(self._known.lines):
            counter = itertools.count()

            def change_at(tensor: torch.Tensor, index: int = index, counter: Iterator[int] = counter) -> torch.Tensor:
                return source(tensor) if next(counter) == index else example_of(tensor)

            run = self._attempt(change_at)
            if run is not None and not run.decides_as(self._known_exactly):
                deciding[line] = None
        return deciding or dict.fromkeys(self._known.lines)

    def _try_second_call(self, draws: random.Random) -> None:
        """Check that what a call leaves in Python's objects decides nothing of the next one."""
        with leave_no_trace(self._forward.model, self._forward.objective):
            for _ in range(2):
                run = self._attempt(_draw(draws), undoes=False)
                if run is not None and not run.decides_as(self._known_exactly):
                    raise CaptureError(
                        f"expected a forward that does in each call what it does in its first, found that values that "
                        f"it reads and keeps decide the next call's tensors, read at\n  "
                        f"{first_few(dict.fromkeys(run.lines))}\nKeep what tensors are computed with in a buffer."
                    )

    def _attempt(self, source: Source, *, undoes: bool = True, skips: bool = True) -> _Run | None:
        """A run with other values; None if the script's own code cannot take them."""
        try:
            return self._call(source, Numbers(), skips=skips, undoes=undoes)
        except (ZeroFXError, WritesError):
            raise
        except Exception:  # noqa: BLE001 - a logarithm of a negative number, say
            return None

    def _call(
        self,
        source: Source,
        numbers: Numbers,
        *,
        skips: bool = False,
        undoes: bool = True,
        is_real: bool = False,
        recorder: _Recorder | None = None,
    ) -> _Run:
        with ExitStack() as stack:
            compiled = self._forward.objective.logging.compiled
            lossy, fakes, _, mode = stack.enter_context(traceable(self._forward, compiled=compiled, mode=self._mode))
            lossy.source, lossy.watches = source, not is_real
            for tensor, what in model_tensors(lossy, fakes):
                is_input = self._has_inputs and what.name.startswith("number ")
                numbers.put(tensor, ANY_NUMBER if is_input else hash(str(what)))
            stack.enter_context(mode)
            stack.enter_context(numbers)
            if recorder is not None:
                stack.enter_context(recorder.watch(numbers, lossy))
            if skips:
                stack.enter_context(self._skip_modules(numbers))
            held = list(lossy.all_buffers().values())
            outcome = lossy(*fakes) if undoes else lossy.call_without_restoring(fakes)
            results = outcome if isinstance(outcome, tuple) else (outcome,)
            assert lossy.reads is not None, "the forward reads values"
            num, lines = len(results) - len(lossy.reads.tensors), tuple(lossy.reads.lines)
            if recorder is not None:
                recorder.exclude(lossy.changed, lossy.model)
            given = tuple(map(numbers.number, results))
            keeps_traced = undoes and (any(lossy.keeps_traced) or bool(lossy.left))
            buffers = tuple(numbers.number(buffer) for buffer in held)
            rounded = {numbers.number(tensor): line for tensor, line in lossy.reads.rounded}
            used = numbers.sources(given[:num] + buffers) & rounded.keys() if rounded else ()
            of_truths = [
                line for read, line in zip(lossy.reads.tensors, lines, strict=True) if read.dtype == torch.bool
            ]
            return _Run(
                given[:num], buffers, given[num:], lines, keeps_traced, tuple(rounded[n] for n in used),
                tuple(dict.fromkeys(of_truths)),
            )  # fmt: skip

    @contextmanager
    def _skip_modules(self, numbers: Numbers) -> Iterator[None]:
        """While open, modules give what they gave in the trace, and compute nothing."""
        before = {module: vars(module).get("forward") for module in self._calls}
        for module, calls in self._calls.items():
            vars(module)["forward"] = _Given(iter(calls), numbers)
        try:
            yield
        finally:
            for module, forward in before.items():
                if forward is None:
                    vars(module).pop("forward", None)
                else:
                    vars(module)["forward"] = forward


@dataclass(frozen=True)
class _Call:
    """A call of a module: the number of its ``inputs``, and its ``outputs`` with the ``numbers`` of their tensors."""

    inputs: Number
    outputs: Any
    numbers: tuple[Number, ...]


class _Given:
    """The forward of a module that computes nothing: what it gave, call by call."""

    def __init__(self, calls: Iterator[_Call], numbers: Numbers) -> None:
        self._calls, self._numbers = calls, numbers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = next(self._calls, None)
        if call is None:
            raise UsageError(
                "expected a forward that calls its modules as when the step was captured, found one more call"
            )
        inputs = self._numbers.number_of_inputs(args, kwargs)
        for tensor, number in zip(tensors_of_tree(call.outputs), call.numbers, strict=True):
            self._numbers.put(tensor, number if inputs == call.inputs else hash((number, inputs)))
        return pytree.tree_map(lambda leaf: leaf, call.outputs)  # whoever changes a container has a copy


class _Recorder:
    """Records what modules give, the outermost ones in whose calls nothing is read."""

    def __init__(self) -> None:
        self._open: list[list[Any]] = []  # of each module in progress: module, reads before, calls inside
        self._found: list[tuple[nn.Module, _Call]] = []
        self._excluded: set[nn.Module] = set()

    @contextmanager
    def watch(self, numbers: Numbers, lossy: LossModule) -> Iterator[None]:
        """While open, calls of modules are recorded."""

        def num_reads() -> int:
            return 0 if lossy.reads is None else len(lossy.reads.tensors)

        def enter(module: nn.Module, _: Any) -> None:
            self._open.append([module, num_reads(), []])

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            entered, before, inside = self._open.pop()
            assert entered is module, "calls are nested"
            given = tuple(map(numbers.settle, tensors_of_tree(output)))
            own = [(module, _Call(numbers.number_of_inputs(args, kwargs), output, given))]
            outer = self._open[-1][2] if self._open else self._found
            outer += own if num_reads() == before and module is not lossy else inside

        handles = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def exclude(self, changed: Mapping[str, Any], model: nn.Module) -> None:
        """Leave out the modules that change values of their own, for they are to do so in each step."""
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            if any(path.removeprefix("model.").startswith(prefix) for path in changed):
                self._excluded.add(module)

    def calls(self) -> dict[nn.Module, list[_Call]]:
        """The calls by module, in order."""
        by_module: dict[nn.Module, list[_Call]] = {}
        for module, call in self._found:
            by_module.setdefault(module, []).append(call)
        return {} if self._excluded & by_module.keys() else by_module


def _constant(number: float, whole: float) -> Source:
    def source(tensor: torch.Tensor) -> torch.Tensor:
        with without_modes():
            value = number if tensor.dtype.is_floating_point or tensor.dtype.is_complex else _to_whole(whole)
            return torch.full(tensor.shape, value, device="cpu").to(tensor.dtype)

    return source


def _to_whole(number: float) -> int:
    return 0 if number != number or number < 1 else 7


def _draw(draws: random.Random) -> Source:
    def source(tensor: torch.Tensor) -> torch.Tensor:
        return _constant(draws.choice(_FLOATS), draws.choice((0, 1e4)))(tensor)

    return source
