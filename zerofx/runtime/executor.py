"""The runtime object, which the emitted step calls."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any, TypeVar

import torch

from zerofx.errors import NonFiniteGradientsError, NonFiniteLossError, RowOverflowError
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.facts import DEVICE
from zerofx.ir.op_kernels import fp8_slices
from zerofx.ir.op_kernels.row_routes import most_shares, most_undealt
from zerofx.ir.owners import Owners
from zerofx.runtime.arena import Allocate, Allocations, Arena
from zerofx.runtime.comm.collectives import JointGathers, send_to_owners, send_to_slices
from zerofx.runtime.comm.groups import Communicators
from zerofx.runtime.comm.transport import Group, LostRankError, Pending, Transport
from zerofx.runtime.tiers.stored import Stored
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.placements import LOSS_OF_OVERFLOW
from zerofx.torch_private.operators import pytree

T = TypeVar("T")


class Runtime:
    """One instance serves every step of a compiled model. Its methods are named like the operators they run."""

    def __init__(self, layout: BucketLayout, communicators: Communicators, device: torch.device, tiers: Tiers) -> None:
        self.tiers = tiers
        self._layout = layout
        self._communicators = communicators
        self._transport = communicators.world
        self.owners: Mapping[int, Owners] = {}  # of the buckets whose updates need whole parameters
        self._updates: Mapping[int, Callable[..., None]] = {}  # of those buckets
        self._scalars: Mapping[int, tuple[float, ...]] = {}
        self._agreed: Callable[[], object] | None = None
        self._joint = JointGathers()
        self.arena = Arena(device)
        self._device = device
        # No method of its own, by which a closed runtime would keep itself, and its connections.
        self._anywhere: Allocate = partial(_allocate_anywhere, device)
        self._allocate: Allocate = self._anywhere
        # What is between tiers is theirs; a step's file asks the runtime for all that it does.
        self.offload, self.copy_into = tiers.offload, tiers.copy_into
        self.empty_stored, self.settle = tiers.empty_stored, tiers.settle_host
        self.host, self.run_on = tiers.run_on_host, tiers.run_on
        # What the step that was ended last has given: ``check_finite`` has its loss, ``check_gradients`` all of it.
        self.stopped: list[torch.Tensor] | None = None
        # The most rows of experts for one rank in the step, in equal shares, if none were dealt; 0 where none are.
        self.undealt_shares = 0.0
        self._draws: deque[list[bytes]] = deque()  # the generators' states of micro-batches, in turn
        self._last_step: object = None
        self._changed: Sequence[torch.Tensor] = ()  # buffers that the last steps change, each rank its own

    def begin(
        self,
        scalars: Mapping[int, tuple[float, ...]],
        agreed: Callable[[], object],
        updates: Mapping[int, Callable[..., None]] = MappingProxyType({}),
    ) -> None:
        """A step begins.

        Args:
            scalars: its hyperparameters, by bucket.
            updates: of whole parameters, by bucket.
            agreed: waits until all ranks are about to run the same step; called before the first collective.
        """
        self._scalars, self._updates, self.undealt_shares = scalars, updates, 0.0
        self._agreed = agreed
        self._joint = JointGathers()  # a step that failed may have left some
        self._allocate = self._anywhere

    def allocate_in(self, allocations: Allocations | None) -> None:
        """Until the step is over, give buffers the places that are planned for them."""
        if allocations is not None:
            allocations.begin(self.arena)
            self._allocate = allocations.take

    def begin_with_equal_buffers(self, step: object) -> None:
        """Give ranks rank 0's buffers where the steps before were not ``step`` and changed some, as
        DistributedDataParallel does in every forward: by itself a step begins with rank 0's of those that it changes.
        """
        if step is not self._last_step and self._changed:
            self.broadcast(self._changed)
            self._changed = ()
        self._last_step = step

    def end(self) -> None:
        """End a step: wait for the other ranks' agreement to run it even if no collective ran.

        Raises:
            LostRankError: a rank has failed meanwhile.
        """
        self._allocate = self._anywhere
        self._agree()
        self._check_reachable()

    def close(self) -> None:
        """After the last step of all ranks: let go of what moves tensors between them."""
        self.arena.clear()
        self._communicators.close()

    @property
    def mesh(self) -> Mesh:
        """All ranks."""
        return self._layout.mesh

    @property
    def has_communicated(self) -> bool:
        """True once the step has begun with its first collective."""
        return self._agreed is None

    @property
    def notice(self) -> str:
        """The reason why messages between ranks are slower than they could be, and what to do; empty for none."""
        return self._transport.notice if self._transport is not None else ""

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that this rank has sent so far."""
        return self._transport.sent_bytes if self._transport is not None else 0

    @property
    def sent_to(self) -> Mapping[int, int]:
        """Payload bytes that this rank has sent so far to each other rank."""
        return dict(self._transport.sent_to) if self._transport is not None else {}

    def hyperparameters(self, bucket: int) -> tuple[float, ...]:
        return self._scalars[bucket]

    def empty_gradients(self, bucket: int) -> torch.Tensor:
        """A flat gradient buffer; only its padding is defined, and zero."""
        layout = self._layout.buckets[bucket]
        buffer = self._allocate((layout.numel,), (1,), layout.reduce_dtype)
        for start, end in layout.padding():
            buffer[start:end].zero_()
        return buffer

    def all_gather(
        self,
        shard: torch.Tensor,
        bucket: int,
        num_ranks: int,
        more: int = 0,
        *,
        in_place: bool = False,
        over: str = "shard",
    ) -> Pending[torch.Tensor]:
        full = self._allocate((shard.numel() * num_ranks,), (1,), shard.dtype)
        whole = self._transport_along(over).read_in_place(full, shard) if in_place else None
        if whole is None:
            return self.all_gather_onto(full, shard, more, bucket, over=over)
        if not more:
            self._start_joint(over)
        return Pending.from_waits(whole)

    def all_gather_onto(
        self, full: torch.Tensor, shard: torch.Tensor, more: int = 0, bucket: int = -1, *, over: str = "shard"
    ) -> Pending[torch.Tensor]:
        """``all_gather``, with the buffer that it makes."""
        if not more and not self._joint.num_parts:
            return _label(self._transport_along(over).all_gather_into(full, shard), "gather", bucket)
        pending = self._joint.add(full, shard)
        if not more:
            self._start_joint(over)
        return _label(pending, "gather", bucket)

    def _start_joint(self, over: str) -> None:
        if self._joint.num_parts:
            self._joint.start(self._transport_along(over))
            self._joint = JointGathers()

    def all_gather_into(
        self, full: torch.Tensor, shard: torch.Tensor, bucket: int, *, over: str = "shard"
    ) -> Pending[torch.Tensor]:
        return _label(self._transport_along(over).all_gather_into(full, shard), "gather", bucket)

    def reduce_scatter(
        self, gradients: torch.Tensor, bucket: int, num_ranks: int, *, over: str = "shard"
    ) -> Pending[torch.Tensor]:
        return _label(self._transport_along(over).reduce_scatter(gradients), "reduction", bucket)

    def reduce_scatter_into(
        self, gradients: torch.Tensor, bucket: int, num_ranks: int, *, over: str = "shard"
    ) -> Pending[torch.Tensor]:
        return _label(self._transport_along(over).reduce_scatter(gradients, in_place=True), "reduction", bucket)

    def gather_values(self, part: torch.Tensor, num_ranks: int, *, over: str) -> Pending[torch.Tensor]:
        full = part.new_empty((num_ranks, *part.shape))
        return _reshape_result(self._transport_along(over).all_gather_into(full.view(-1), part.view(-1)), full.shape)

    def reduce_scatter_values(self, parts: torch.Tensor, num_ranks: int, *, over: str) -> Pending[torch.Tensor]:
        return _reshape_result(self._transport_along(over).reduce_scatter(parts.view(-1)), parts.shape[1:])

    def all_reduce_values(
        self, value: torch.Tensor, reduction: str, num_ranks: int, *, over: str
    ) -> Pending[torch.Tensor]:
        return _reshape_result(self._transport_along(over).all_reduce(value, reduction), value.shape)

    def exchange_values(self, parts: torch.Tensor, num_ranks: int, *, over: str) -> Pending[torch.Tensor]:
        return _reshape_result(self._transport_along(over).exchange(parts, num_ranks, "all"), parts.shape)

    def shift_values(self, value: torch.Tensor, num_ranks: int, *, over: str) -> Pending[torch.Tensor]:
        return self._transport_along(over).shift(value)

    def send_value(self, value: torch.Tensor, to: int, *, over: str) -> Pending[torch.Tensor]:
        flat = value.as_strided((value.numel(),), (1,))
        sent = self._transport_along(over).send(flat, to)
        return Pending.from_waits(value.new_empty(0), lambda: sent.finish(flat))

    def receive_value(
        self,
        source: int,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        *,
        over: str,
    ) -> Pending[torch.Tensor]:
        value = self._allocate(tuple(size), tuple(stride), dtype)
        flat = value.as_strided((value.numel(),), (1,))
        received = self._transport_along(over).receive(flat, source)
        return Pending.from_waits(value, lambda: received.finish(flat))

    def gather_on_node(
        self, part: torch.Tensor, bucket: int, num_ranks: int, *, over: str = "shard"
    ) -> Pending[torch.Tensor]:
        return _label(
            self._transport_along(over).gather_on_node(part.new_empty(part.numel() * num_ranks), part, num_ranks),
            "gather on the node",
            bucket,
        )

    def exchange(
        self, parts: torch.Tensor, bucket: int, num_ranks: int, group: Group, *, over: str = "shard"
    ) -> Pending[torch.Tensor]:
        return _label(self._transport_along(over).exchange(parts, num_ranks, group), "exchange", bucket)

    def to_owners(
        self, shard: torch.Tensor, bucket: int, num_ranks: int, numel: int, moved: int, *, over: str = "shard"
    ) -> Pending[torch.Tensor]:
        owned, transport = self._allocate((numel,), (1,), shard.dtype), self._transport_along(over)
        return _label(send_to_owners(transport, self.owners[bucket], shard, owned), "exchange", bucket)

    def from_owners(
        self, owned: torch.Tensor, bucket: int, num_ranks: int, numel: int, moved: int, *, over: str = "shard"
    ) -> Pending[torch.Tensor]:
        shard, transport = self._allocate((numel,), (1,), owned.dtype), self._transport_along(over)
        return _label(send_to_slices(transport, self.owners[bucket], owned, shard), "exchange", bucket)

    def cast_owned(self, owned: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        low = self._allocate((numel,), (1,), dtype)
        low[: owned.numel()].copy_(owned)
        return low

    def update_whole(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: list[torch.Tensor],
        parts: list[torch.Tensor],
        bucket: int,
        *,
        over: str,
        **_costs: Any,
    ) -> None:
        self.tiers.keep(params, in_place=True)

        def share(value: torch.Tensor, owner: int) -> torch.Tensor:
            transport = self._transport_along(over)
            if transport.rank == owner:
                value = value.detach().contiguous()
                sent = [(rank, value) for rank in range(transport.num_ranks) if rank != owner]
                return transport.exchange_pieces(value, sent, (), 1).finish(None)
            received = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            return transport.exchange_pieces(received, (), [(owner, received)], 1).finish(None)

        self._updates[bucket](params, grads, states, parts, share)

    def second_shard(self, full: torch.Tensor, bucket: int, num_ranks: int, *, over: str = "shard") -> torch.Tensor:
        return full.chunk(num_ranks)[self._transport_along(over).rank % num_ranks].clone()

    def fp8_slice_largest(
        self, shard: torch.Tensor, bucket: int, scaled: fp8_slices.Scaled, _num_scales: int, *, over: str
    ) -> torch.Tensor:
        return fp8_slices.largest(shard, self._layout.buckets[bucket], self._transport_along(over).rank, scaled)

    def fp8_slice_cast(
        self,
        shard: torch.Tensor,
        scales: torch.Tensor,
        bucket: int,
        scaled: fp8_slices.Scaled,
        first: int,
        *,
        over: str,
    ) -> torch.Tensor:
        place = self._transport_along(over).rank
        return fp8_slices.cast(shard, scales[first:], self._layout.buckets[bucket], place, scaled)

    def reload(self, stored: Stored, tier: str = DEVICE) -> Pending[Any]:
        if tier != DEVICE:
            return self.tiers.reload(stored, tier)
        return self.tiers.reload(stored, tier, self._allocate(stored.shape, stored.stride, stored.dtype))

    def update(self, function: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        """An update's region, on the device: what is saved of its inputs is kept first."""
        self.tiers.keep(inputs, in_place=True)
        return function(inputs)

    def keep_draws(self, first: bool) -> None:
        """Keep the generators' states for the micro-batch that is run here; ``first``: before all others."""
        if first:
            self._draws.clear()
        self._draws.append(self._read_draws())

    def take_draws(self) -> None:
        """Go on with the states that were kept longest ago: those of the micro-batch that is run next."""
        states = (torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in self._draws.popleft())
        state, *on_device = states
        torch.set_rng_state(state)
        for other in on_device:
            torch.cuda.set_rng_state(other, self._device)

    def swap_draws(self) -> None:
        """Go on with the states that were kept longest ago; the next ``take_draws`` goes back to those here."""
        here = self._read_draws()
        self.take_draws()
        self._draws.appendleft(here)

    def _read_draws(self) -> list[bytes]:
        on_device = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        # As bytes, which are no tensors that a peak would count.
        return [bytes(state.numpy()) for state in (torch.get_rng_state(), *on_device)]

    def drop_draw(self, drawn: torch.Tensor) -> None:
        """Nothing needs what was drawn: the generators have gone on."""

    def check_finite(self, loss: torch.Tensor) -> None:
        """End the step before its updates where the loss of a rank is not finite.

        Raises:
            NonFiniteLossError: on all ranks.
        """
        if not self._holds_on_all(math.isfinite(loss.item())):
            self.stopped = [loss]
            raise NonFiniteLossError(f"the loss is {loss.item()} here")

    def check_overflow(self, loss: torch.Tensor, shares: Sequence[torch.Tensor | list[torch.Tensor]]) -> None:
        """End the step before its updates where the loss of a rank says that rows of experts have found no room.

        ``shares``: of each micro-batch, the most rows that a rank has for another; a loop gives those of its rounds.

        Raises:
            RowOverflowError: on all ranks.
        """
        if not self._holds_on_all(loss.item() != LOSS_OF_OVERFLOW):
            self.stopped = [loss]
            raise RowOverflowError(most_shares(pytree.tree_leaves(shares)))
        self.undealt_shares = most_undealt(pytree.tree_leaves(shares))

    def _holds_on_all(self, truth: bool) -> bool:
        """True if ``truth`` is on all ranks. Collective."""
        return truth if self._transport is None else self._connect().all_true(truth)

    def check_gradients(self, largest: torch.Tensor, outcome: list[torch.Tensor]) -> None:
        """End the step before its updates where ``largest``, the largest gradient of all ranks, is not finite.

        Raises:
            NonFiniteGradientsError: on all ranks.
        """
        is_finite = math.isfinite(largest.item())
        self._check_reachable()
        if not is_finite:
            self.stopped = outcome
            raise NonFiniteGradientsError(f"the largest gradient is {largest.item()}")

    def finish_collectives(self) -> None:
        """After a step that all ranks have left at one place: wait for what they have sent one another."""
        if self._transport is not None:
            self._transport.settle()

    def part(self, whole: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
        return whole.as_strided(size, stride, whole.storage_offset() + offset)

    def wait(self, pending: Pending[T], source: object = None) -> T:
        try:
            return pending.finish(source)
        except LostRankError as error:
            if pending.bucket < 0:
                raise
            own = self._layout.buckets
            name = own[pending.bucket].name if pending.bucket < len(own) else "what another step trains"
            raise LostRankError(
                f"{error} (awaited in the {pending.kind} of {name}, bucket {pending.bucket})"
            ) from error

    def broadcast(self, buffers: Sequence[torch.Tensor]) -> None:
        transport = self._connect()
        try:
            transport.broadcast(buffers)
        except LostRankError as error:
            raise LostRankError(f"{error} (awaited in the broadcast of buffers)") from error
        self._changed = buffers

    def _transport_along(self, axes: str) -> Transport:
        """The transport between this rank's group along some axes of the mesh."""
        self._connect()
        return self._communicators.transport(axes)

    def _connect(self) -> Transport:
        assert self._transport is not None, "a step for one rank has no collectives"
        self._agree()
        return self._transport

    def _check_reachable(self) -> None:
        if self._transport is not None:
            self._transport.check_reachable()

    def _agree(self) -> None:
        if self._agreed is not None:
            self._agreed()
            self._agreed = None


def _label(pending: Pending[T], kind: str, bucket: int) -> Pending[T]:
    """``pending``, which says what it is where it fails."""
    pending.kind, pending.bucket = kind, bucket
    return pending


def _reshape_result(pending: Pending[torch.Tensor], shape: torch.Size) -> Pending[torch.Tensor]:
    """A collective on flat tensors as one on tensors of a step's: its result has ``shape``."""

    def finish(source: torch.Tensor) -> torch.Tensor:
        return pending.finish(source.view(-1)).view(shape)

    return Pending(pending.result, finish, "exchange of a value")


# What a step gives: its loss, after it what else it hands out, and the norm of all gradients where they are clipped.
Outcome = torch.Tensor | tuple[torch.Tensor, ...]
StepFunction = Callable[[Runtime, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], Outcome]


def functions_of(function: StepFunction, names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """The functions that a step function calls by these names."""
    assert isinstance(function, FunctionType)
    return {name: function.__globals__[name] for name in names}


def replace_functions(function: StepFunction, replaced: Mapping[str, Callable[..., Any]]) -> StepFunction:
    """A step function like ``function``, but with others in the place of functions that it calls by name."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__, {**function.__globals__, **replaced}, function.__name__)


def _allocate_anywhere(
    device: torch.device, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)
