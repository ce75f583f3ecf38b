"""Collectives as the emitted step starts them: the choice of transport, and several collectives as one."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from zerofx.errors import UsageError
from zerofx.ir.owners import Message, Owners
from zerofx.runtime.comm.gloo import make_gloo_transport
from zerofx.runtime.comm.groups import gloo_over
from zerofx.runtime.comm.nccl import Nccl
from zerofx.runtime.comm.transport import Pending, Transport
from zerofx.runtime.measure.spans import SpanLog
from zerofx.torch_private import distributed

_ON_THE_HOST = ("gloo", "mpi")  # backends that take tensors of CUDA's, and block the thread that calls them


def make_transport(
    group: dist.ProcessGroup | None,
    device: torch.device,
    rank_timeout_seconds: float,
    log: SpanLog,
    *,
    reads_memory: bool = True,
) -> Transport | None:
    """The transport for a device; None for a world of one, where no step has a collective. Collective itself.

    ``rank_timeout_seconds`` is for a rank that neither comes nor fails; NCCL has the timeout of ``group`` for that.
    ``log`` notes the duration of each collective, where a step is measured. ``reads_memory``: whether ranks of one host
    may read each other's memory; it is the same on all.

    Raises:
        UsageError: on all ranks, where the backend of ``group`` is not one for the device.
    """
    if group is None or dist.get_world_size(group) == 1:
        return None
    if device.type == "cuda":
        check_backend(distributed.backend_for(group, device))
        return Nccl(group, device, log)
    own = gloo_over(group, timedelta(seconds=rank_timeout_seconds))
    return make_gloo_transport(own, log, rank_timeout_seconds, reads_memory=reads_memory)


def check_backend(backend: str) -> None:
    """Check that the process group has a backend for CUDA whose collectives run on the device's streams.

    Raises:
        UsageError: it has none, or one in which the host waits for each collective.
    """
    if backend in ("", *_ON_THE_HOST):
        theirs = f"{backend}, in which the host waits for each of them" if backend else "none"
        raise UsageError(
            f"expected a process group with a backend that runs collectives on a GPU's streams, found {theirs}: call "
            f"torch.distributed.init_process_group() without a backend, or with 'nccl' or 'cpu:gloo,cuda:nccl'"
        )


def is_on_cpu(device: torch.device) -> bool:
    """True if ``device`` runs the CPU's kernels, and the messages between ranks of ``PointToPoint``."""
    return device.type != "cuda"


class JointGathers:
    """Gathers that start as one collective and finish as one; each has its own buffer and name."""

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pending: Pending[None] | None = None

    @property
    def num_parts(self) -> int:
        """The number of gathers that have not been started."""
        return len(self._parts)

    def add(self, full: torch.Tensor, shard: torch.Tensor) -> Pending[torch.Tensor]:
        """Add a gather; nothing is moved before ``start``."""
        self._parts.append((full, shard))
        return Pending.from_waits(full, self._finish)

    def start(self, transport: Transport) -> None:
        fulls, shards = zip(*self._parts, strict=True)
        self._parts.clear()
        self._pending = transport.all_gather_many(fulls, shards)

    def _finish(self) -> None:
        # Only once, and nothing is held after it: a bucket that is released must not live on in another's name.
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish(None)


def send_to_owners(
    transport: Transport, owners: Owners, shard: torch.Tensor, owned: torch.Tensor
) -> Pending[torch.Tensor]:
    """Start sending slices of a bucket, ``shard``, to the owners of its parameters, each of which has them in
    ``owned``."""
    rank = transport.rank
    sent = [(m.owner, _piece(shard, m.in_slice, m)) for m in owners.messages if m.slice_rank == rank]
    into = [(m.slice_rank, _piece(owned, m.in_owned, m)) for m in owners.messages if m.owner == rank]
    return transport.exchange_pieces(owned, sent, into, owners.most_messages)


def send_to_slices(
    transport: Transport, owners: Owners, owned: torch.Tensor, shard: torch.Tensor
) -> Pending[torch.Tensor]:
    """Start sending what owners have of a bucket back into the slices, ``shard``; padding there is zero."""
    rank = transport.rank
    for begin, end in owners.gaps(rank, shard.numel()):
        shard[begin:end].zero_()
    sent = [(m.slice_rank, _piece(owned, m.in_owned, m)) for m in owners.messages if m.owner == rank]
    into = [(m.owner, _piece(shard, m.in_slice, m)) for m in owners.messages if m.slice_rank == rank]
    return transport.exchange_pieces(shard, sent, into, owners.most_messages)


def _piece(flat: torch.Tensor, begin: int, message: Message) -> torch.Tensor:
    """The elements of a message in a flat tensor that has them from ``begin`` on."""
    return flat[begin : begin + message.numel]
