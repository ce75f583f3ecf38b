"""Find the loss in the result of a model, and the module that computes it from a batch."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from zerofx.capture.checkpointed.blocks import CheckpointedBlocks
from zerofx.capture.fake_state import TracedParts
from zerofx.capture.free_tensors.free_tensors import FreeTensors, RetraceError, StandInMaker, StandIns, change_error
from zerofx.capture.free_tensors.shared_model import SharedModel
from zerofx.capture.leaked_tensors import forget_traced
from zerofx.capture.objective.calling import argument_text, call_model, check_forward_call, split_call
from zerofx.capture.objective.module_state import Change, rebound_buffers, restore_modules, shape_text
from zerofx.capture.objective.token_weighted_loss import pop_term_counts, weigh_loss
from zerofx.capture.python_state.executed import ExecutedCode
from zerofx.capture.python_state.numbers import NumberInputs
from zerofx.capture.python_state.reads import Reads
from zerofx.capture.python_state.undo import silent, undo_changes
from zerofx.capture.values.known import KnownValues
from zerofx.capture.values.logged import LoggedReads, Logging, Source, example_of
from zerofx.capture.values.watched_calls import Checks
from zerofx.choices import OutputsOption
from zerofx.errors import CaptureError
from zerofx.ir.batch import Batch
from zerofx.ir.returned import NOTHING_ELSE, Returned
from zerofx.ir.text import type_text
from zerofx.torch_private.modules import buffer_table, mark_parameters, parameter_table
from zerofx.torch_private.operators import flatten_with_paths, pytree
from zerofx.torch_private.tensors import is_traced

LossFunction = Callable[..., Any]  # of outputs and what the model did not take
ForwardFunction = Callable[..., Any]  # of the model and a batch


def find_loss(outputs: Any, *, source: str = "the model") -> torch.Tensor:
    """The scalar that training minimises.

    It is ``outputs`` itself, or its ``.loss`` or ``["loss"]``, or the only scalar with a gradient in a tuple or list.

    Raises:
        CaptureError: there is none, or more than one; the message lists what was returned.
    """
    loss = _candidate(outputs)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.dtype.is_floating_point:
        if not loss.requires_grad:
            raise CaptureError(
                f"expected a loss that depends on a trainable parameter, found a scalar from {source} without a "
                f"gradient: check that some parameter has requires_grad=True and that nothing detaches the loss"
            )
        return loss if loss.dim() == 0 else loss.reshape(())
    raise CaptureError(
        f"expected a scalar loss from {source}, found {_describe(outputs)}: return a scalar, an object with .loss, a "
        f'dict with "loss", or give loss_fn=lambda outputs, *rest: ..., with what forward does not take'
    )


class Objective:
    """The objective of a step: the model's own loss, ``loss_fn`` of the model's outputs, or ``forward``.

    ``hands_out`` says which of the outputs besides the loss are handed out, for the first two.

    ``free_tensors`` are the tensors that either function uses besides the model's. ``executed`` is the Python code that
    has run in traces, ``reads`` gives the Python state that this code may have read, and ``num_watched`` counts the
    runs in which that was known. ``effects`` are plain values that the forward leaves on its modules for its next
    calls; ``unread`` names values that change nothing in these. ``trains``: whether it has gradients.
    """

    trains = True

    def __init__(
        self,
        loss_fn: LossFunction | None = None,
        forward: ForwardFunction | None = None,
        hands_out: OutputsOption = "numbers",
    ) -> None:
        self.loss_fn, self.forward, self.hands_out = loss_fn, forward, hands_out
        self.free_tensors = FreeTensors(forward or loss_fn, "loss_fn" if forward is None else "forward")
        self.executed = ExecutedCode()
        self.reads: Callable[[], Reads] | None = None
        self.effects: dict[str, Change] = {}
        self.unread: set[str] = set()
        self.logging = Logging()
        self.num_watched = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Objective) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)

    @property
    def _parts(self) -> tuple[object, ...]:
        return self.loss_fn, self.forward, self.hands_out

    @staticmethod
    def make(loss: Loss) -> Objective:
        """Wrap a loss function, or None for a model with a loss of its own; an objective is returned as it is."""
        return loss if isinstance(loss, Objective) else Objective(loss)

    @property
    def is_plain(self) -> bool:
        """True if the model returns its loss itself."""
        return self.loss_fn is None and self.forward is None

    def modules_by_prefix(self, model: nn.Module) -> dict[str, nn.Module]:
        """The model, and the modules that it is trained with, by the prefix of their attributes' paths."""
        return {"": model} | self.free_tensors.modules(model)

    def copy_for(self, memo: dict[int, Any]) -> Objective:
        """The objective of a copy of the model. What ``forward`` uses besides is shared: a step changes none of it."""
        return Objective(copy.deepcopy(self.loss_fn, memo), self.forward, self.hands_out)

    def setting(self, model: nn.Module) -> AbstractContextManager[None]:
        """The context that the forward runs in."""
        return contextlib.nullcontext()

    def run(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        scope: Callable[[], AbstractContextManager[None]],
    ) -> tuple[torch.Tensor, Returned, tuple[torch.Tensor, ...]]:
        """The loss of a batch, the structure of the other outputs, and their tensors.

        Code outside the model's forward runs in ``scope``.

        Raises:
            UsageError: the model, ``loss_fn`` or ``forward`` cannot be called with such a batch.
            CaptureError: there is no loss in what they give.
        """
        if self.forward is not None:
            check_forward_call(self.forward, args, kwargs)
            with scope():
                return self.parts_of(self.forward(model, *args, **kwargs))
        if self.loss_fn is None:
            return self.parts_of(call_model(model, args, kwargs))
        (own, named), (rest, others) = split_call(model, self.loss_fn, args, kwargs)
        outputs = call_model(model, own, named)
        with scope():
            try:
                returned = self.loss_fn(outputs, *rest, **others)
            except Exception as error:
                error.add_note(f"in loss_fn(outputs{argument_text(rest, others)})")
                raise
            return self.parts_of(returned)

    def parts_of(self, returned: Any) -> tuple[torch.Tensor, Returned, tuple[torch.Tensor, ...]]:
        """The result of ``run``, from what the model, ``loss_fn`` or ``forward`` has returned.

        Raises:
            CaptureError: as ``run``.
        """
        if self.forward is None:
            loss = find_loss(returned, source="the model" if self.loss_fn is None else "loss_fn")
            return loss, *self._extra_outputs(returned, loss)
        if isinstance(returned, torch.Tensor):
            return find_loss(returned, source="forward"), NOTHING_ELSE, ()
        if not (type(returned) is tuple and len(returned) == 2 and isinstance(returned[0], torch.Tensor)):
            raise CaptureError(
                f"expected forward to return its loss, a scalar tensor, or a pair (loss, extras), found "
                f"{_describe(returned)}: pick the loss, and put all that step() is to give besides into "
                f"one dict"
            )
        return find_loss(returned[0], source="forward"), *Returned.from_extras(returned[1])

    def _extra_outputs(self, returned: Any, loss: torch.Tensor) -> tuple[Returned, tuple[torch.Tensor, ...]]:
        """The outputs to hand out, with their tensors: nothing if the loss would be all of it."""
        if self.hands_out != "none" and not isinstance(returned, torch.Tensor):
            structure, tensors = Returned.from_outputs(returned, numbers_only=self.hands_out == "numbers")
            if len(tensors) > 1:
                return structure, tensors
        return Returned(left_out=_other_tensors(returned, loss)), ()


Loss = LossFunction | Objective | None


class LossModule(nn.Module):
    """The model followed by its loss, called with the batch's tensors alone.

    ``loss_scope`` opens a context that ``loss_fn`` and ``forward`` run in. Where the forward replaces its buffers by
    other tensors (``self.mean = 0.9 * self.mean + ...``), these come after the loss, in the order of their names in
    ``rebound``; then the checked values, as booleans, in the order of their texts in ``checked``; then the tensors of
    ``returned``. ``left`` and ``changed`` have the names of the tensors, and of the plain values and hooks, that the
    forward leaves on its modules, which are restored. The parameters and buffers of ``free_tensors`` stand for the
    tensors that ``objective`` uses besides the model's, in the order of ``free_tensor_names``; ``lent`` are models of
    other steps that it uses. ``trains`` is the objective's.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        objective: Objective,
        num_micro_batches: int,
        loss_scope: Callable[[], AbstractContextManager[None]],
        known: KnownValues,
        stand_ins: StandInMaker,
        parts: TracedParts,
    ) -> None:
        super().__init__()
        self.model = model
        self.parts = parts
        self.free_tensors = nn.Module()
        self._lenders = objective.free_tensors.lent
        self.lent = nn.ModuleList([lender.model for lender in self._lenders])
        self._reached = objective.free_tensors.modules(model)
        self._batch = batch
        self.objective = objective
        self._num_micro_batches = num_micro_batches
        self._loss_scope = loss_scope
        self._known = known
        self._fake = stand_ins.fake
        self._places = dict(stand_ins.of_model)
        self.free_tensor_names: tuple[str, ...] = ()
        self.rebound: tuple[str, ...] = ()
        self.checked: tuple[str, ...] = ()
        self.left: dict[str, None] = {}
        self.changed: dict[str, Change | None] = {}
        self.returned = NOTHING_ELSE
        self.source: Source = example_of
        self.reads: LoggedReads | None = None
        self.watches = True  # for what would write what is read
        self.keeps_traced: list[bool] = []
        self.trains = objective.trains
        self._stand_in()

    def _stand_in(self) -> None:
        """Register fake tensors for the free tensors that are known."""
        free, own = self.objective.free_tensors, self.free_tensors
        free.forget_index()
        named = {n: tensor for n, tensor in free.tensors().items() if id(tensor) not in self._places}
        for index, real in enumerate(named.values()):
            fake, key = self._fake(real), str(index)
            table: dict[str, Any] = parameter_table(own) if real.requires_grad else buffer_table(own)
            table[key] = fake
            self._places[id(real)] = table, key
        self.free_tensor_names = tuple(named)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        with self.restore_state():
            return self.call_without_restoring(tensors)

    @contextlib.contextmanager
    def restore_state(self) -> Iterator[None]:
        """Restore the attributes of modules on exit, and empty caches that hold traced tensors."""
        before = self.objective.reads() if self.objective.reads and self.objective.executed.globals else None
        with ExitStack() as stack:
            stack.callback(forget_traced)
            if self.objective.logging.is_on:
                self.keeps_traced = stack.enter_context(leave_no_trace(self.model, self.objective))
            # What is reached may have the step's own models in it, and what is offered may not have been used so far.
            for name, reached in self._reached.items():
                stack.enter_context(restore_modules(reached, self.left, self.changed, name))
            for lender in self.objective.free_tensors.candidates:
                stack.enter_context(restore_modules(lender.model, self.left, self.changed))
            stack.enter_context(restore_modules(self.model, self.left, self.changed))
            yield
        if before is not None:
            self.objective.num_watched += 1
            put_back = [path for path in before.put_back() if path.removeprefix("model.") not in self.changed]
            self.changed |= dict.fromkeys(put_back)
            is_log = (not path.startswith("model.") and not path.endswith(("(hooks)", "(class)")) for path in put_back)
            self.objective.logging.changes |= any(is_log)

    def call_without_restoring(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The loss and the outputs after it, from a call whose changes of modules stay."""
        held = self.all_buffers()
        layouts = {name: (buffer.shape, buffer.stride()) for name, buffer in held.items()}
        stand_ins = StandIns(self._places, self.objective.free_tensors, self._fake)
        for name, fake, real in zip(self._batch.names, tensors, self._batch.tensors, strict=True):
            if name in self._batch.hashes:
                self._known.learn(fake, real)
        elsewhere = self._buffers_outside()
        logging, logged = self.objective.logging, None
        if logging.is_on:
            logged = LoggedReads(self.source, logging.untrue, watches=self.watches)
        self.reads = logged
        with (
            self.parts.shown(),
            Checks(logged, self._is_known) as checks,
            self._known.answer_reads(checks.answer),
            ExitStack() as inner,
        ):
            for model in (self.model, *self.lent):
                inner.enter_context(mark_parameters(model))
            has_numbers = self.objective.free_tensors.tape.is_open
            if has_numbers or not self.objective.is_plain:
                inner.enter_context(stand_ins)
            if has_numbers:
                inner.enter_context(NumberInputs())
            args, kwargs = self._batch.rebuild(tensors)
            counts = pop_term_counts(kwargs)
            if not self.trains:
                inner.enter_context(torch.no_grad())
            blocks = CheckpointedBlocks()
            with blocks.watch(), self.objective.executed:
                loss, self.returned, extras = self.objective.run(self.model, args, kwargs, self._loss_scope)
            now, elsewhere_now = self.all_buffers(), self._buffers_outside()
            blocks.run_again(loss, held, now)
        for name, layout in layouts.items():
            if (held[name].shape, held[name].stride()) != layout:
                raise CaptureError(
                    f"expected a forward that leaves each buffer its shape and strides, found that it makes "
                    f"{shape_text(held[name])} with strides {list(held[name].stride())} of {name}, of shape "
                    f"{list(layout[0])} and strides {list(layout[1])}, in place: use what gives a view (x.t(), not "
                    f"x.t_()), and give a buffer its full size at first"
                )
        if stand_ins.has_learned:
            raise RetraceError
        if logged is not None:
            self.returned = replace(self.returned, num_logged=len(logged.tensors))
            extras = (*extras, *logged.tensors)
        for name, buffer in elsewhere.items():
            if elsewhere_now.get(name) is not buffer:
                raise change_error(f"puts another tensor in the place of {name}")
        if counts:
            loss = weigh_loss(loss, *counts)
        elif self._num_micro_batches > 1:
            loss = loss / self._num_micro_batches
        rebound, noted = rebound_buffers(held, now), checks.conditions()
        self.rebound, self.checked = tuple(rebound), tuple(text for _, text in noted)
        # A copy each: what is put in a buffer's place may be another buffer, or a view.
        others = *(tensor.clone() for tensor in rebound.values()), *(holds for holds, _ in noted), *extras
        return (loss, *others) if others else loss

    def _is_known(self, value: Any) -> bool:
        """True unless ``value`` is a traced tensor whose values differ from step to step."""
        return not (isinstance(value, torch.Tensor) and is_traced(value) and self._known.value(value) is None)

    def lenders(self) -> tuple[SharedModel, ...]:
        """The models of other steps that the objective uses, in the order of ``lent``."""
        return self._lenders

    def all_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers by all of their names, those of other steps' models too."""
        own = dict(self.model.named_buffers(remove_duplicate=False))
        return own | {name: buffer for lender in self.lenders() for name, buffer in lender.buffers().items()}

    def _buffers_outside(self) -> dict[str, torch.Tensor]:
        """Buffers of modules that can be reached, but belong to no step's model."""
        lenders = self.objective.free_tensors.candidates
        ours = set(self.model.modules()).union(*(lender.model.modules() for lender in lenders))
        return {
            f"{path}.{name}": buffer
            for root, reached in self._reached.items()
            for path, module in reached.named_modules(prefix=root)
            if module not in ours
            for name, buffer in buffer_table(module).items()
        }


def roots_of(model: nn.Module, objective: Objective) -> tuple[Any, ...]:
    """The objects by which a forward reaches all others."""
    return model, objective.forward, objective.loss_fn


@contextlib.contextmanager
def leave_no_trace(model: nn.Module, objective: Objective) -> Iterator[list[bool]]:
    """While open, a forward that logs what it reads prints nothing; what it does to Python's objects is undone at the
    end, and the list has whether it kept traced tensors in one."""
    with (
        silent(),
        undo_changes(roots_of(model, objective), objective.executed, objective.logging.writers) as keeps_traced,
    ):
        try:
            yield keeps_traced
        finally:
            sys.setprofile(None)  # which the first read has set


def _other_tensors(outputs: Any, loss: torch.Tensor) -> tuple[str, ...]:
    """The tensors among outputs that are not the loss, as texts."""
    if isinstance(outputs, torch.Tensor):
        return ()
    named = flatten_with_paths(outputs)[0]
    return tuple(
        f"{pytree.keystr(path)} {type_text(leaf)}".strip()
        for path, leaf in named
        if isinstance(leaf, torch.Tensor) and leaf is not loss and leaf.numel() != 1
    )


def _candidate(outputs: Any) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    if getattr(outputs, "loss", None) is not None:
        return outputs.loss
    if isinstance(outputs, tuple | list):
        scalars = [o for o in outputs if isinstance(o, torch.Tensor) and o.numel() == 1 and o.requires_grad]
        if len(scalars) == 1:
            return scalars[0]
    return None


def _describe(outputs: Any) -> str:
    if isinstance(outputs, torch.Tensor):
        return shape_text(outputs)
    if isinstance(outputs, Mapping):
        return f"a {type(outputs).__name__} with keys {list(outputs)}"
    if is_dataclass(outputs):
        return f"a {type(outputs).__name__} with fields {[f.name for f in fields(outputs)]}"
    if isinstance(outputs, tuple | list):
        return f"a {type(outputs).__name__} of {[_describe(item) for item in outputs]}"
    return f"a {type(outputs).__name__}"
