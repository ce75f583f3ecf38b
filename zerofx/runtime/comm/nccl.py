"""Collectives on CUDA: NCCL on its own stream, in one order over all communicators; messages go by links."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from zerofx.errors import PlanError
from zerofx.runtime.comm.groups import close_connections, destroy, gloo_over
from zerofx.runtime.comm.links import Link
from zerofx.runtime.comm.same_host.channels import GlooChannel
from zerofx.runtime.comm.transport import (
    Group,
    Groups,
    LostRankError,
    Pending,
    Pieces,
    T,
    Transport,
    copy_own_pieces,
    members_of,
)
from zerofx.runtime.measure.spans import SpanLog
from zerofx.torch_private import distributed

_ORDERING_NCCL = (2, 26)  # the first to have NCCL_LAUNCH_ORDER_IMPLICIT
_ONE_BY_ONE = (
    "collectives along different axes of the mesh run one after the other on a GPU: set NCCL_LAUNCH_ORDER_IMPLICIT=1 "
    "before the processes start, with NCCL 2.26 or later, for them to overlap"
)

_QUEUES = 32  # the most that a device has
_FEW_QUEUES = (
    f"messages between stages of several GPUs may stand still behind collectives that share a queue of the device with "
    f"them: set CUDA_DEVICE_MAX_CONNECTIONS={_QUEUES} before the processes start"
)


class Nccl(Transport):
    """NCCL collectives on a stream of their own.

    A collective starts after the work already queued on the compute stream, which also makes it safe to reuse memory
    that earlier computation read; computation waits for it only where the step says so. Sent bytes are counted as a
    ring sends them, to the next rank; those of an exchange, to their receiver.

    Communicators of one device whose kernels start in another order on another rank may deadlock. So each collective
    waits for the one before it, whichever communicator that is of, unless NCCL has been asked to keep the order of
    launches itself, which lets them overlap. Messages between two ranks alone (``send``, ``receive``) are not in that
    order, and take no part in it (``Link``).

    A kernel waits forever for a rank that does not come: on hearing that one has failed, call ``abort``, from any
    thread.

    The tensors that a collective writes, and those it reads except gathered slices, are held until its wait, and later
    uses of the memory come after that. So the allocator is not told of the stream (``record_stream``): it would keep a
    released buffer until the stream has finished everything queued by then, including early gathers, and take more
    memory than planned meanwhile.
    """

    breaks = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        log: SpanLog,
        whole: Nccl | None = None,
        groups: Groups | None = None,
    ) -> None:
        """Wrap ``group``. ``whole``: the transport between all ranks, if ``group`` is this rank's one of several
        ``groups`` made for this transport."""
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._whole = whole
        self._inner: list[Nccl] = []  # between some of these ranks
        self._links: dict[tuple[int, int], Link | None] = {}  # None: between two other ranks
        self._words: dist.ProcessGroup | None = None  # by which the hosts of a link meet
        self._moving = threading.Lock()  # while a link's message moves
        self.sent_to: Counter[int] = Counter() if whole is None else whole.sent_to
        self._group = group
        self._all_groups = groups or [range(self.num_ranks)]
        # Of the members, among all ranks.
        self._numbers = next(members for members in self._all_groups if self._world.rank in members)
        self._failed = False
        self._last: torch.cuda.Event | None = None  # the end of the last collective, of any communicator
        self._in_order: bool = keeps_order() if whole is None else whole._in_order
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # not held up by kernels that fill the device
        self._log = log
        self._flag = torch.ones((), dtype=torch.uint8, device=device)
        self._groups: dict[tuple[Group, int], dist.ProcessGroup] = {}

    @property
    def _world(self) -> Nccl:
        """The transport between all ranks."""
        return self._whole or self

    def split(self, groups: Groups) -> Nccl:
        group = self._new_group(groups)
        assert group is not None, "each rank is in one of them"
        inner = Nccl(group, self._device, self._log, self, groups)
        self._inner.append(inner)
        self.notice = "" if self._in_order else _ONE_BY_ONE
        return inner

    def open_links(self, pairs: Sequence[tuple[int, int]]) -> None:
        world = self._world
        if world._words is None:
            world._words = gloo_over(world._group, distributed.group_timeout(world._group))
            has_queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == str(_QUEUES)
            if world.num_ranks > self.num_ranks and not has_queues:
                world.notice = "; ".join(filter(None, (world.notice, _FEW_QUEUES)))
        for pair in pairs:
            if pair in self._links:
                continue
            ends = [[members[place] for place in pair] for members in self._all_groups]
            self._links[pair], group = None, world._new_group(ends)
            if group is not None:
                sends, peer = pair[0] == self.rank, self._numbers[sum(pair) - self.rank]
                words, tag = GlooChannel(world._words, peer), 3 * len(self._links)
                link = Link(group, self._device, self._log, words, tag, world._moving, sends=sends)
                self._links[pair] = link
                # Its communicator is made with its first message: here, where nothing waits.
                link.start(self._flag.view(1), self.stream).finish(None)

    def send(self, value: torch.Tensor, receiver: int) -> Pending[torch.Tensor]:
        pending = self._start_message((self.rank, receiver), value)
        self.sent_to[self._numbers[receiver]] += value.nbytes
        return pending

    def receive(self, into: torch.Tensor, sender: int) -> Pending[torch.Tensor]:
        return self._start_message((sender, self.rank), into)

    def _start_message(self, pair: tuple[int, int], value: torch.Tensor) -> Pending[torch.Tensor]:
        self.check_reachable()
        link = self._links.get(pair)
        if link is None:
            raise PlanError(
                f"expected messages between ranks that exchange some in the step as planned, found one from {pair[0]} "
                f"to {pair[1]} of those along the axis pipe: take the step's source as it was written"
            )
        pending = link.start(value, self.stream)

        def wait() -> None:
            try:
                pending.finish(None)
            finally:
                self.check_reachable()  # what a link is given up with says less

        return Pending.from_waits(value, wait)

    def all_gather_into(self, full: torch.Tensor, shard: torch.Tensor) -> Pending[torch.Tensor]:
        return self._start_gather(full, shard, "all", self.num_ranks)

    def gather_on_node(self, full: torch.Tensor, part: torch.Tensor, size: int) -> Pending[torch.Tensor]:
        return self._start_gather(full, part, "node", size)

    def all_gather_many(self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> Pending[None]:
        sent = self._ring_bytes(sum(shard.nbytes for shard in shards), "all", self.num_ranks)
        return self._start(None, lambda: distributed.gather_many(self._group, fulls, shards), sent, shards)

    def reduce_scatter(self, gradients: torch.Tensor, *, in_place: bool = False) -> Pending[torch.Tensor]:
        num_shard = gradients.numel() // self.num_ranks
        own = gradients.narrow(0, self.rank * num_shard, num_shard)
        shard = own if in_place else torch.empty_like(own)

        def launch() -> None:
            if shard.numel():
                distributed.reduce_single(shard, gradients, group=self._group)

        sent = self._ring_bytes(shard.nbytes, "all", self.num_ranks)
        return self._start(shard, launch, sent)

    def exchange(self, parts: torch.Tensor, size: int, group: Group) -> Pending[torch.Tensor]:
        received, own = torch.empty_like(parts), self._group_of(group, size)
        peers = [peer for peer in members_of(group, self.rank, size, self.num_ranks) if peer != self.rank]

        def launch() -> None:
            if parts.numel():
                dist.all_to_all_single(received, parts, group=own)

        sent = {self._numbers[peer]: parts.nbytes // size for peer in peers}
        return self._start(received, launch, sent)

    def exchange_pieces(self, result: torch.Tensor, sent: Pieces, into: Pieces, most: int) -> Pending[torch.Tensor]:
        everyone, num_bytes = dist.get_process_group_ranks(self._group), Counter[int]()
        for peer, piece in sent:
            num_bytes[self._numbers[peer]] += piece.nbytes if peer != self.rank else 0

        def launch() -> None:
            others, received = copy_own_pieces(self.rank, sent, into)
            messages = [dist.P2POp(dist.isend, piece, everyone[peer], self._group) for peer, piece in others]
            messages += [dist.P2POp(dist.irecv, piece, everyone[peer], self._group) for peer, piece in received]
            for message in dist.batch_isend_irecv(messages) if messages else ():
                message.wait()  # on this stream

        return self._start(result, launch, num_bytes)

    def shift(self, value: torch.Tensor) -> Pending[torch.Tensor]:
        received, everyone = torch.empty_like(value), dist.get_process_group_ranks(self._group)
        before, following = self.rank - 1, (self.rank + 1) % self.num_ranks

        def launch() -> None:
            if value.numel():
                messages = [
                    dist.P2POp(dist.isend, value, everyone[following], self._group),
                    dist.P2POp(dist.irecv, received, everyone[before], self._group),
                ]
                for message in dist.batch_isend_irecv(messages):
                    message.wait()  # on this stream

        return self._start(received, launch, {self._numbers[following]: value.nbytes})

    def all_reduce(self, value: torch.Tensor, reduction: str) -> Pending[torch.Tensor]:
        result = value.clone()
        operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[reduction]

        def launch() -> None:
            if result.numel():
                dist.all_reduce(result, op=operation, group=self._group)

        once = -(-result.nbytes * (self.num_ranks - 1) // self.num_ranks)
        following = self._numbers[(self.rank + 1) % self.num_ranks]
        return self._start(result, launch, {following: 2 * once})

    def broadcast_dense(self, tensors: Sequence[torch.Tensor]) -> None:
        def launch() -> None:
            for tensor in tensors:
                dist.broadcast(
                    tensor.view(torch.uint8), group=self._group, group_src=0
                )  # NCCL does not have all dtypes

        num_bytes = sum(tensor.nbytes for tensor in tensors) if self.rank == 0 else 0
        self._start(None, launch, dict.fromkeys(self._numbers[1:], num_bytes)).finish(None)

    def all_true(self, here: bool) -> bool:
        self._flag.fill_(here)

        def launch() -> None:
            dist.all_reduce(self._flag, op=dist.ReduceOp.MIN, group=self._group)

        self._start(None, launch, {}, noted=False).finish(None)
        return bool(self._flag.item())

    def settle(self) -> None:
        for transport in (self, *self._inner):
            torch.cuda.current_stream(self._device).wait_stream(transport._stream)
            for link in transport._own_links:
                link.settle()

    def abort(self) -> None:
        """Abort all communicators: running collectives end here, with any values, and none is started any more.

        Memory that the failed step has released is not reused before that.
        """
        if self._world._failed:
            return
        self._world._failed = True
        for transport in (self, *self._inner):
            if transport._words is not None:
                close_connections(transport._words)
            of_links = (link.group for link in transport._own_links)
            for group in (transport._group, *transport._groups.values(), *of_links):
                with contextlib.suppress(RuntimeError):  # of a device that has failed too
                    distributed.abort(group, self._device)
        with contextlib.suppress(RuntimeError):
            self.settle()

    def close(self) -> None:
        """Destroy the communicators; after a failure they have been aborted already."""
        if self._world._failed:
            return
        self._stream.synchronize()
        for link in self._own_links:
            link.close()
        groups = [*self._groups.values(), *(link.group for link in self._own_links)]
        groups += [group for group in (self._words, None if self._whole is None else self._group) if group is not None]
        destroy(groups)
        self._groups.clear()

    @property
    def _own_links(self) -> list[Link]:
        """Those that this rank is at one end of."""
        return [link for link in self._links.values() if link is not None]

    def _start_gather(self, full: torch.Tensor, shard: torch.Tensor, group: Group, size: int) -> Pending[torch.Tensor]:
        members = self._group_of(group, size)

        def launch() -> None:
            if full.numel():
                distributed.gather_single(full, shard, group=members)

        # A slice that is gathered in place is held with the rest.
        apart = shard.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()
        return self._start(full, launch, self._ring_bytes(shard.nbytes, group, size), (shard,) if apart else ())

    def _ring_bytes(self, num_bytes: int, group: Group, size: int) -> dict[int, int]:
        """The bytes that a ring over this rank's group sends for slices of ``num_bytes``, by rank."""
        members = members_of(group, self.rank, size, self.num_ranks)
        following = members[(members.index(self.rank) + 1) % size]
        return {self._numbers[following]: num_bytes * (size - 1)}

    def _group_of(self, group: Group, size: int) -> dist.ProcessGroup:
        """This rank's group. All ranks create all groups, where the step first needs them.

        Ranks also create groups that they are not in: torch names groups by how many a rank has created before.
        """
        if group == "all":
            return self._group
        if (group, size) not in self._groups:
            places = {tuple(members_of(group, rank, size, self.num_ranks)) for rank in range(self.num_ranks)}
            within = [[members[place] for place in own] for members in self._all_groups for own in sorted(places)]
            own = self._world._new_group(within)
            assert own is not None, "each rank is in one of them"
            self._groups[group, size] = own
        return self._groups[group, size]

    def _new_group(self, groups: Groups) -> dist.ProcessGroup | None:
        """Create all ``groups`` on all ranks, with the user's timeout; returns this rank's, None if it is in none."""
        self.check_reachable()
        backend, timeout = distributed.backend_for(self._group, self._device), distributed.group_timeout(self._group)
        everyone, own = dist.get_process_group_ranks(self._group), None
        for members in groups:
            new_group = dist.new_group([everyone[rank] for rank in members], timeout=timeout, backend=backend)
            if self.rank in members:
                own = new_group
        assert own is None or isinstance(own, dist.ProcessGroup)
        return own

    def _start(
        self,
        result: T,
        launch: Callable[[], None],
        sent: Mapping[int, int],
        unheld: Sequence[torch.Tensor] = (),
        *,
        noted: bool = True,
    ) -> Pending[T]:
        """Start a collective. ``unheld``: inputs that the step may release before the wait; ``noted``: if measured."""
        self.check_reachable()
        self.sent_to.update(sent)
        world = self._world
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if world._last is not None and not self._in_order:
            self._stream.wait_event(world._last)
        timed = self._log.is_running and noted
        begun, done = (torch.cuda.Event(enable_timing=timed) for _ in range(2))
        with torch.cuda.stream(self._stream):
            if timed:
                begun.record(self._stream)
                self._log.add_events(self.stream, begun, done, sum(sent.values()))
            launch()
            done.record(self._stream)
        world._last = done
        for tensor in unheld:
            tensor.record_stream(self._stream)

        def wait() -> None:
            self.check_reachable()
            torch.cuda.current_stream(self._device).wait_event(done)

        return Pending.from_waits(result, wait)

    def check_reachable(self) -> None:
        if self._world._failed:
            raise LostRankError("a rank has failed, and ranks reach one another no more")


def keeps_order() -> bool:
    """True if NCCL has been asked to start the kernels of all communicators in the order of their launches.

    NCCL reads this setting once in a process, at the first launch of all.
    """
    asked = os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") not in ("", "0")
    return asked and distributed.nccl_version() >= _ORDERING_NCCL
