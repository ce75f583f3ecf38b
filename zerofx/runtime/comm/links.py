"""Messages between two ranks on GPUs: each begins once both its ends are there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from zerofx.runtime.comm.same_host.channels import GlooChannel
from zerofx.runtime.comm.transport import Pending
from zerofx.runtime.measure.spans import SpanLog
from zerofx.runtime.tiers.copies import Workers


class Link:
    """Messages one way between two ranks: a communicator of NCCL's, a stream and a thread at each end.

    A kernel that sends runs until its other end does, and one that receives, too: launched where the step comes to it,
    as collectives are, it would hold up what comes after it. In the order of collectives two stages that send to each
    other would each wait for their own send; on streams of their own the second value that is sent would wait for
    the first one's receiver, and with it, as streams share the device's queues, anything else (seen on paper, with one
    queue). And whatever waits for all that runs, as CUDA does to load a kernel or to give memory back, would wait for
    what only comes after it. So the hosts meet first: once computation has come, on both, to where the step starts a
    message, and neither moves another one, both launch. Such a kernel waits for nothing but the other, and the step,
    which waits for it on the host, stands still where a CPU's does: at the waits of ``passes/lib/message_check.py``,
    which are known to end. (On a device with fewer queues than streams, kernels of a message may yet be held up by
    computation that waits for a collective: ``docs/design/running.md``.) Of two ranks the first takes its turn
    (``moving``) before the second, so that no ranks wait for each other's in a circle.

    Messages move in the order in which they are started, the same at both ends. ``words`` is what the hosts meet by,
    with three tags from ``tag`` on.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        log: SpanLog,
        words: GlooChannel,
        tag: int,
        moving: threading.Lock,
        *,
        sends: bool,
    ) -> None:
        self.group, self._device, self._log, self._words = group, device, log, words
        self._tags, self._moving, self._sends = range(tag, tag + 3), moving, sends
        ranks = dist.get_process_group_ranks(group)
        (self._other,) = (rank for rank in ranks if rank != dist.get_rank())
        self._is_first = self._other == ranks[-1]
        self._stream = torch.cuda.Stream(device, priority=-1)  # not held up by kernels that fill the device
        self._thread = Workers("messages")

    def start(self, value: torch.Tensor, stream: str) -> Pending[torch.Tensor]:
        """Start to send a flat tensor, or to receive it; what is noted of that is on ``stream``."""
        began = time.perf_counter()
        ready, done = (torch.cuda.Event(blocking=True) for _ in range(2))
        ready.record(torch.cuda.current_stream(self._device))
        moved, num_bytes = [value], value.nbytes

        def move() -> None:
            ready.synchronize()
            with self._meet():
                self._stream.wait_event(ready)
                with torch.cuda.stream(self._stream):
                    self._launch(moved[0])
                    done.record(self._stream)
                done.synchronize()
            moved.clear()  # a job outlives the moment at which it is known to be done
            ended = time.perf_counter()
            # The receiver may take its time, which says nothing of the link.
            self._log.add(stream, ended if self._sends else began, ended, num_bytes if self._sends else 0)

        return Pending.from_waits(value, self._thread.submit(move).result)

    @contextlib.contextmanager
    def _meet(self) -> Iterator[None]:
        """A block for which both ends are here, and move nothing else.

        Raises:
            LostRankError: the other is gone.
        """
        here, first_begins, both_begin = self._tags
        word = torch.zeros(1, dtype=torch.uint8, device="cpu")
        if self._is_first:
            self._words.receive(word, here).wait()
            with self._moving:
                self._words.send(word, first_begins).wait()
                self._words.receive(word, both_begin).wait()
                yield
        else:
            self._words.send(word, here).wait()
            self._words.receive(word, first_begins).wait()
            with self._moving:
                self._words.send(word, both_begin).wait()
                yield

    def _launch(self, value: torch.Tensor) -> None:
        call = dist.isend if self._sends else dist.irecv
        for message in dist.batch_isend_irecv([dist.P2POp(call, value, self._other, self.group)]):
            message.wait()  # on this stream

    def settle(self) -> None:
        """Block until all that was started has moved."""
        self._thread.settle()

    def close(self) -> None:
        self._thread.close()
