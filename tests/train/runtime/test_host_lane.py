"""Updates on the host run by themselves: what follows from them waits for them, and nothing else does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zerofx.errors import TierError
from zerofx.runtime.tiers.stored import Stored
from zerofx.runtime.tiers.tiers import Tiers

NUMEL = 1000
SECONDS = 30.0  # until a test that waits for nothing is over


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    tiers = Tiers(torch.device("cpu"), [])
    yield tiers
    tiers.close()


class Gate:
    """An update that adds one once it is let."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, tensors: list[Any]) -> None:
        assert self.opened.wait(SECONDS)
        tensors[0].add_(1)


def test_copies_of_its_results_wait_for_an_update_and_others_do_not(tiers: Tiers) -> None:
    master, other = (tiers.hold(torch.full((NUMEL,), value), "host") for value in (1.0, 5.0))
    low, gate = torch.zeros(NUMEL), Gate()
    tiers.run_on_host(gate, [master], 0)
    up = tiers.copy_into(low, master)
    assert torch.equal(tiers.load(other), torch.full((NUMEL,), 5.0))  # on the same link, started later
    assert not low.any()
    gate.opened.set()
    up.finish(master)
    assert torch.equal(low, torch.full((NUMEL,), 2.0))


def test_of_copies_that_wait_each_begins_when_it_may_whichever_was_started_first(tiers: Tiers) -> None:
    """Parameters come up in the order of forward, and are updated in that of backward, the last layer's first."""
    late, early = (tiers.hold(torch.full((NUMEL,), value), "host") for value in (1.0, 5.0))
    updates = [Gate(), Gate()]
    for bucket, (gate, stored) in enumerate(zip(updates, (early, late), strict=True)):
        tiers.run_on_host(gate, [stored], bucket)
    first, second = tiers.reload(late), tiers.reload(early)
    updates[0].opened.set()
    landed = threading.Event()

    def wait() -> None:
        second.finish(early)
        landed.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    came_up = landed.wait(SECONDS / 3)
    updates[1].opened.set()
    waiter.join()
    assert came_up, "it waited for the update of what was started before it"
    assert torch.equal(first.finish(late), torch.full((NUMEL,), 2.0))
    assert torch.equal(second.result, torch.full((NUMEL,), 6.0))


def test_an_update_waits_for_its_gradient(tiers: Tiers) -> None:
    master, gradient = (tiers.hold(torch.zeros(NUMEL), "host") for _ in range(2))
    begun, gate = threading.Event(), threading.Event()
    copies = tiers._device_copies()

    def held_back() -> None:
        begun.set()
        assert gate.wait(SECONDS)

    assert isinstance(gradient, Stored) and isinstance(gradient.lease.place, torch.Tensor)
    values = torch.ones(NUMEL)
    down = copies.start("to_host", values.view(torch.uint8), gradient.lease.place[: 4 * NUMEL], after=held_back)
    gradient.lease.used_by(down)
    tiers.run_on_host(lambda tensors: tensors[0].add_(tensors[1]), [master, gradient], 0)
    assert begun.wait(SECONDS) and not master.memory.any()
    gate.set()
    tiers.settle_host(0)
    assert torch.equal(master.tensor, torch.ones(NUMEL))


def test_an_update_that_fails_fails_what_follows_from_it(tiers: Tiers) -> None:
    master, other = (tiers.hold(torch.zeros(NUMEL), "host") for _ in range(2))
    low = torch.zeros(NUMEL)

    def fail(tensors: list[Any]) -> None:
        raise FloatingPointError("the host cannot")

    tiers.run_on_host(fail, [master], 0)
    up = tiers.copy_into(low, master)
    tiers.run_on_host(lambda tensors: tensors[0].add_(1), [master], 1)
    tiers.run_on_host(lambda tensors: tensors[0].add_(1), [other], 2)
    with pytest.raises(TierError, match="FloatingPointError: the host cannot"):
        up.finish(master)
    for bucket in (0, 1):
        with pytest.raises(TierError, match="FloatingPointError: the host cannot"):
            tiers.settle_host(bucket)
    tiers.settle_host(2)
    assert not low.any() and not master.memory.any()
    assert torch.equal(other.tensor, torch.ones(NUMEL))


def test_a_block_is_not_used_again_while_an_update_reads_it(tiers: Tiers) -> None:
    gradient, gate = tiers.hold(torch.zeros(NUMEL), "host"), Gate()
    tiers.run_on_host(gate, [gradient], 0)
    memory = gradient.memory
    del gradient
    assert tiers.held_bytes["host"] == 0
    threading.Timer(0.2, gate.opened.set).start()
    tiers.hold(torch.full((NUMEL,), 7.0), "host")
    assert gate.opened.is_set() and torch.equal(memory, torch.full((NUMEL,), 7.0))
