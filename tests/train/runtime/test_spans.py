"""What streams did, from the stretches in which they were busy."""

from __future__ import annotations

import threading
import time

import torch

from zerofx.runtime.measure.spans import Span, SpanLog, StreamUse, stream_uses, transfers_of

CPU = torch.device("cpu")


def test_overlapping_stretches_are_busy_once_and_hidden_where_anything_computes() -> None:
    spans = [
        Span("compute", 0.0, 2.0),
        Span("nvme_read", 1.0, 2.0, 100),
        Span("nvme_read", 1.5, 2.0, 300),
        Span("host", 3.0, 1.0),
        Span("nvme_read", 5.0, 1.0, 50),
        Span("to_host", 2.0, 0.5, 7),
    ]
    found = stream_uses(spans)
    assert found["nvme_read"] == StreamUse(450, 3.5, 1.5)
    assert found["to_host"] == StreamUse(7, 0.5, 0.0)
    assert found["compute"] == StreamUse(0, 2.0, 2.0)
    assert list(found) == ["compute", "nvme_read", "host", "to_host"]


def test_blocks_of_a_drive_are_one_transfer_and_collectives_in_a_row_are_several() -> None:
    spans = [
        Span("compute", 0.0, 9.0),
        Span("nvme_read", 1.0, 2.0, 100),
        Span("nvme_read", 1.5, 2.0, 300),
        Span("collective", 2.0, 1.0, 10),
        Span("collective", 3.0, 1.5, 20),
        Span("nvme_read", 5.0, 1.0, 50),
    ]
    assert transfers_of(spans) == {"nvme_read": ((400, 2.5), (50, 1.0)), "collective": ((10, 1.0), (20, 1.5))}


def test_nothing_is_noted_outside_of_a_step() -> None:
    log = SpanLog()
    with log.span("compute"):
        assert not log.is_running
    log.start(CPU)
    assert log.take() == ()
    log.stop()
    with log.span("compute"):
        assert not log.is_running
    log.start(CPU)
    assert log.take() == ()


def test_spans_of_all_threads_are_noted_in_order_of_their_begin() -> None:
    log = SpanLog()
    log.start(CPU)

    def work() -> None:
        with log.span("to_host", 5):
            time.sleep(0.02)

    with log.span("compute"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    compute, copy = log.take()
    assert (compute.stream, copy.stream, copy.num_bytes) == ("compute", "to_host", 5)
    assert 0 <= compute.start_seconds <= copy.start_seconds
    assert copy.seconds >= 0.02 and copy.end_seconds <= compute.end_seconds


class Event:
    """An event of a device, ``seconds`` from its start."""

    def __init__(self, seconds: float, is_reached: bool = True) -> None:
        self.seconds, self.is_reached = seconds, is_reached

    def query(self) -> bool:
        return self.is_reached

    def elapsed_time(self, later: Event) -> float:
        assert self.is_reached and later.is_reached, "not ready"
        return 1e3 * (later.seconds - self.seconds)


def test_work_that_runs_on_into_the_next_step_is_that_steps() -> None:
    log, leaves = SpanLog(), threading.Event()

    def write_back() -> None:
        with log.span("to_host", 5):
            leaves.wait()

    log.start(CPU)
    log._first = Event(0.0)  # type: ignore[assignment]  # as on a device
    thread = threading.Thread(target=write_back)
    thread.start()
    end = Event(3.0, is_reached=False)
    log.add_events("to_device", Event(1.0), end, 7)  # type: ignore[arg-type]
    log.add_events("compute", Event(1.0), Event(2.0))  # type: ignore[arg-type]
    assert log.take() == (Span("compute", 1.0, 1.0),)
    log.start(CPU)
    log._first = Event(2.5)  # type: ignore[assignment]
    leaves.set()
    thread.join()
    end.is_reached = True
    copied, written = sorted(log.take(), key=lambda span: span.stream)
    assert copied == Span("to_device", -1.5, 2.0, 7)
    assert (written.stream, written.num_bytes) == ("to_host", 5) and written.start_seconds < 0 < written.end_seconds
