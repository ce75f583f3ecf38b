"""A model's whole parameters while its step holds them: all of them, copies of them, or one by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, get_args

import torch
from torch import nn

from zerofx.choices import SlowerTier
from zerofx.deferred import is_deferred
from zerofx.errors import UsageError, wrap_defects
from zerofx.ir.batch import hash_of
from zerofx.ir.tensor_parts import named_buffers, named_parameters
from zerofx.option_table import is_count
from zerofx.runtime.cuda_graphs.graphed import GraphedSteps
from zerofx.session.checkpointed import Checkpointed
from zerofx.session.life import Life
from zerofx.session.places import find_place, show_tensor
from zerofx.session.taken_over import TakenOver


class Whole(Checkpointed):
    """The part of a ``Step`` that shows whole parameters."""

    _gradients: Mapping[int, torch.Tensor]
    _outputs: Any
    _graphs: GraphedSteps
    _sent: dict[str, dict[str, str]]  # hashes of what ``weights`` gave last, by dtype and name

    def flush(self) -> None:
        """Finish updates that are delayed or under way on the host, so that the parameters are those after all steps so
        far. Collective.

        Whatever shows parameters or states does so by itself: ``full_parameters``, ``full_state_dict``,
        ``optimizer.state_dict`` and ``close``. The step after a flush computes with parameters that are up to date, as
        the first one after the warm-up does.
        """
        with self._life.claim("flush the step"):
            self._life.check_open("flush the step", reads=True)
            if self._steps.taken is not None:
                self._life.control.meet("flush the step")
                with self._life.control.fail_together("flush the step"):
                    self._steps.taken.state.flush()

    def park(self, tier: SlowerTier = "host") -> None:
        """Give the device back between phases: all that the step holds there waits on the host, or on nvme. Collective.

        That is parameters, masters, the optimizer's states, buffers, gradients that are kept, and the arena. ``unpark``
        brings them up, and so does whatever reads them next: a step, ``evaluate``, ``full_parameters``, a checkpoint.
        What lies in slower tiers already stays there. Until then ``step.tiers()`` has no bytes on the device but those
        of constants that were captured.

        Raises:
            UsageError: no step has been prepared yet, or there is no such tier, or no folder for it.
            TierError: it has no room for what is on the device (``host_budget``); nothing has been changed.
        """
        if tier not in get_args(SlowerTier):
            raise UsageError(f"expected to park the step on 'host' or 'nvme', found {tier!r}")
        taken = self._require_model("park the step")
        self.finish_saving()
        with self._life.claim("park the step"), wrap_defects("park the step"):
            self._life.control.agree("park the step", tier, "tiers to park on", "Give every rank the same.")
            taken.park(tier)
            self._graphs.clear()
            self._outputs, self._gradients = None, {}

    def unpark(self) -> None:
        """Bring up what ``park`` has moved; does nothing where nothing is. Collective."""
        taken = self._require_model("unpark the step")
        with self._life.claim("unpark the step"), wrap_defects("unpark the step"):
            taken.unpark()

    @contextmanager
    def full_parameters(self, *, write_back: bool = False) -> Iterator[nn.Module]:
        """The model with its whole, trained parameters, for evaluation, generation or saving. Every rank must enter.

        Args:
            write_back: take the values that the parameters have at the end of the block as those to train on from, for
                example after ``model.load_state_dict``. Without it, or where the block raises, changes made in the
                block are dropped where parameters are sharded; whole parameters are changed where they lie.

        Before the first step and after ``close`` this is the model as it is.
        """
        taken, life = self._steps.taken, self._life
        if taken is not None and not life.showing:
            if write_back:
                life.check_trained("write parameters back")
                self.finish_saving()
            with taken.show_whole(write_back=write_back):
                yield self.model
            return
        if taken is None and is_deferred(self.model):
            raise UsageError(
                "expected full parameters to be asked for once there are any, found a deferred model before its "
                "first step: call step.prepare(batch) first, which makes its values"
            )
        if taken is not None and write_back:
            raise UsageError(
                "expected write_back=True at the outermost full_parameters() block, found it inside another: give "
                "it there"
            )
        yield self.model

    @contextmanager
    def generating(self, tier: SlowerTier = "host") -> Iterator[nn.Module]:
        """The model with its trained parameters, to generate between steps. Every rank must enter.

        ::

            with step.generating() as model:
                tokens = model.generate(prompts)

        Meanwhile the optimizer's states wait on the host, or on nvme. Parameters are whole, in the dtype in which they
        are stored; where ``memory_budget`` has no room for all of them besides what the step has on the device, those
        of a bucket are gathered for the modules that read them. Then all ranks call modules in the same order, as often
        (``model.generate(..., synced_gpus=True)``). After the block all is as it was, to the bit.

        Before the first step this is the model as it is.

        Raises:
            UsageError: there is no such tier, or no folder for it.
            TierError: it has no room for the states (``host_budget``); nothing has been changed.
        """
        if tier not in get_args(SlowerTier):
            raise UsageError(f"expected states to wait on 'host' or 'nvme', found {tier!r}")
        taken = self._steps.taken
        if taken is None or self._life.showing:
            with self.full_parameters() as model:
                yield model
            return
        self._require_model("generate", reads=True)
        self.finish_saving()
        self._graphs.clear()  # which have the addresses of states
        latest = self._steps.shapes.latest
        assert latest is not None, "a step has taken the model over"
        with taken.show_to_generate(tier, self._steps.budget, lambda: taken.held_bytes(latest.arguments)["device"]):
            yield self.model

    @contextmanager
    def averaged_parameters(self, *, whole: bool = True) -> Iterator[nn.Module]:
        """The model with the averages that ``average=`` keeps in the place of its parameters. Every rank must enter.

        ::

            with step.averaged_parameters():
                torch.save(model.state_dict(), "averaged.pt")
            with step.averaged_parameters(whole=False):
                loss = step.evaluate(batch)

        Parameters that are not trained, and buffers, are as they are. Training goes on from where it was: no step runs
        inside, and nothing is saved or loaded.

        Args:
            whole: show the model whole, as ``full_parameters()`` does. Else parameters stay in slices and tiers, and
                ``evaluate``, ``full``, ``full_parameters`` and ``full_state_dict`` read averages.

        Raises:
            UsageError: there is no average, or no step has entered it yet.
        """
        taken = self._require_model("enter averaged_parameters()")
        self.finish_saving()
        with taken.show_averages(), taken.show_whole(write_back=False) if whole else nullcontext():
            yield self.model

    @contextmanager
    def full(self, name: str, state: str | None = None, *, write_back: bool = False) -> Iterator[torch.Tensor]:
        """One parameter, whole, in the dtype in which it is stored, a ``state`` that the optimizer has of it, or its
        gradient in the step that ran last.

        ::

            with step.full("layers.0.weight") as weight: ...
            with step.full("layers.0.weight", "exp_avg", write_back=True) as average:
                average.zero_()
            with step.full("layers.0.weight", "grad") as gradient: ...  # with keep_gradients=("layers.0.weight",)

        It is a copy on the device; no other parameter is gathered with it but those of its bucket. Every rank must
        enter, and no step run inside. Where the block raises, nothing is written.

        Args:
            name: of a parameter, as ``model.named_parameters()`` has it; any one of the names of a shared one.
            state: ``"exp_avg"``, say, or ``"grad"`` for what ``keep_gradients=`` asks for: the mean over all ranks and
                micro-batches, before clipping. None for the parameter itself.
            write_back: take the values that it has at the end of the block as those to train on from. They have to be
                the same on all ranks, which is checked.

        Raises:
            UsageError: there is no such parameter or state, or no step has been prepared yet, or one has run inside.
            RankMismatchError: ranks ask for others, or write other values.
        """
        taken = self._require_model("read one tensor", reads=not write_back and state is None)
        if write_back:
            self.finish_saving()
        before = self.num_steps
        place = find_place(taken, self._life, name, state, self._gradients)
        if write_back and place.gradients:
            raise UsageError(
                f"expected the gradient of {name} to be read, found write_back=True: its update has been made; for "
                f"gradients that are other than the loss's, change the loss, with forward="
            )
        with show_tensor(taken, self._life, place, write_back=write_back) as tensor:
            yield tensor
            if write_back and self.num_steps != before:
                raise UsageError(
                    f"expected no step while {name} is written, found that {self.num_steps - before} ran, whose update "
                    f"would be lost: call step(batch) outside the block"
                )

    def full_state_dict(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        """``model.state_dict()`` with whole, trained parameters, as copies on the CPU, on every rank. Collective.

        One bucket at a time is gathered on the device. A rank that says ``keep=False`` gets and holds none of it.
        """
        taken, life = self._steps.taken, self._life
        if taken is not None and not life.showing:
            with life.claim("call step.full_state_dict()"):
                if (entries := self._own_entries()) is not None:
                    whole = _whole_parameters(taken, life, keep=keep)
                    return {
                        name: whole[id(tensor)] if id(tensor) in whole else _copy_on_cpu(tensor)
                        for name, tensor in (entries if keep else {}).items()
                    }
        with self.full_parameters():  # what a model makes of its parameters for this is made of whole ones
            return {
                name: _copy_on_cpu(tensor) if isinstance(tensor, torch.Tensor) else tensor
                for name, tensor in (self.model.state_dict() if keep else {}).items()
            }

    def weights(
        self, *, dtype: torch.dtype | None = None, rank: int | None = None, changed: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The names and tensors of ``full_state_dict``, one after the other, on the device. Collective.

        ::

            for name, tensor in step.weights(dtype=torch.bfloat16, changed=True):
                engine.update(name, tensor)

        A bucket at a time is gathered, in the dtype that is asked for, into one buffer of the size of the largest: a
        tensor is valid until the next is asked for (clone what is to stay). All ranks go through to the end, without a
        step, and get the same in the same order: parameters, in the order of buckets, then persistent buffers.

        Args:
            dtype: what floating-point tensors are cast to; None for the dtypes that they are stored in.
            rank: the one that gets any, where the others only send; None for all.
            changed: leave out those whose values are, bit for bit, what ``changed`` gave last in this dtype; the first
                time gives all.

        Raises:
            UsageError: no step has been prepared yet, one runs meanwhile, or the model's ``state_dict()`` has what it
                makes of parameters.
            RankMismatchError: ranks ask for others.
        """
        purpose, life = "read weights", self._life
        taken = self._require_model(purpose, reads=True)
        if rank is not None and not is_count(rank, 0, life.control.num_ranks - 1):
            raise UsageError(f"expected rank to be None or one of {life.control.num_ranks} ranks, found {rank!r}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UsageError(f"expected dtype to be None or a floating-point dtype, found {dtype!r}")
        entries = self._own_entries()
        if entries is None:
            raise UsageError(
                f"expected to {purpose} that a model has, found that its state_dict() makes others of them: call "
                f"step.full_state_dict()"
            )
        with life.claim(purpose):
            life.control.agree(
                purpose, f"dtype={dtype}\nrank={rank}\nchanged={changed}", "weights", "Ask for the same on each."
            )
            with life.control.fail_together(purpose):
                taken.state.flush()
        is_here = rank in (None, life.control.rank)
        sent = self._sent.setdefault(str(dtype), {}) if changed else None
        return (pair for pair in self._iterate(taken, entries, dtype, sent if is_here else None) if is_here)

    def _iterate(
        self,
        taken: TakenOver,
        entries: Mapping[str, torch.Tensor],
        dtype: torch.dtype | None,
        sent: dict[str, str] | None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Entries of the model's state with whole values, but for those whose hashes are as they were ``sent``."""
        life, state, before = self._life, taken.state, self.num_steps
        names: dict[int, list[str]] = {}
        for name, entry in entries.items():
            names.setdefault(id(entry), []).append(name)
        parameters = state.iterate(dtype)
        buffers = [b for _, b in named_buffers(self.model) if id(b) in names]
        while True:
            if self.num_steps != before:
                raise UsageError("expected no step while weights are read, found that one ran: read them again")
            with life.claim("read weights"), life.control.fail_together("read weights"), torch.no_grad():
                if (coming := next(parameters, None)) is not None:
                    named, tensor = names.get(id(state.parameter(coming[0])), []), coming[1]
                elif buffers:
                    buffer = buffers.pop(0)
                    kind = buffer.dtype if dtype is None or not buffer.is_floating_point() else dtype
                    named, tensor = names[id(buffer)], buffer.detach().to(kind, copy=True)
                else:
                    return
            for name in named:
                if sent is not None:
                    last, sent[name] = sent.get(name), hash_of(tensor)
                    if last == sent[name]:
                        continue
                yield name, tensor

    def _own_entries(self) -> dict[str, torch.Tensor] | None:
        """The model's ``state_dict()``, if it has the model's own parameters and buffers and nothing else."""
        with self._life.lift_guard():
            entries: dict[str, torch.Tensor] = self.model.state_dict(keep_vars=True)
        own = {id(tensor) for _, tensor in (*named_parameters(self.model), *named_buffers(self.model))}
        return entries if all(id(entry) in own for entry in entries.values()) else None


def _copy_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    # Some classes of weights in few bits have a `to` that cannot be asked for a copy.
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()


def _whole_parameters(taken: TakenOver, life: Life, *, keep: bool) -> dict[int, torch.Tensor]:
    """Copies of all parameters on the CPU by the identity of each, if this rank is to ``keep`` them. Collective."""
    purpose, state = "call step.full_state_dict()", taken.state
    life.check_world()
    life.control.meet(purpose)
    whole: dict[int, torch.Tensor] = {}
    with life.control.fail_together(purpose), torch.no_grad():
        state.flush()
        for name, tensor in state.iterate():
            if keep:
                whole[id(state.parameter(name))] = tensor.to("cpu", copy=True)
    return whole
