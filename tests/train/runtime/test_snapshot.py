"""Snapshots: what is read from another thread is what there was, and a bound on what is held for it is kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from zerofx.errors import TierError
from zerofx.runtime.tiers.snapshot import Snapshot
from zerofx.runtime.tiers.stored import Place, Stored
from zerofx.runtime.tiers.tiers import Tiers

NUMEL, BLOCK = 1024, 4096  # elements of a value, and bytes of its block on the host
CPU = torch.device("cpu")


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(CPU, [tmp_path])
    made.prepare({"nvme": 16 * BLOCK}, 1)
    yield made
    made.close()


def places(tiers: Tiers, tier: str, num_values: int = 4) -> list[Place]:
    """Values 0, 1, ... in a tier."""
    tensors = [torch.full((NUMEL,), float(number)) for number in range(num_values)]
    return list(tensors) if tier == "device" else [tiers.hold(tensor, tier) for tensor in tensors]


def overwrite(tiers: Tiers, place: Place, how: str) -> None:
    """What a step does to a value."""
    if isinstance(place, torch.Tensor):
        tiers.keep([place], in_place=True)
        place.fill_(-1)
    elif how == "on the host":
        tiers.run_on_host(lambda tensors: tensors[0].sub_(100), [place], 0)
        tiers.settle_host(0)
    else:
        values = torch.full((NUMEL,), -1.0)
        tiers.copy_into(place, values).finish(values)


class Reader(threading.Thread):
    """Reads all values half by half once `begin` is set."""

    def __init__(self, snapshot: Snapshot, places: Sequence[Place]) -> None:
        super().__init__(daemon=True)
        self.begin, self.sums = threading.Event(), list[float]()
        self._snapshot, self._places = snapshot, places
        self.start()

    def run(self) -> None:
        self.begin.wait()
        for place in self._places:
            for first in (0, NUMEL // 2):
                with self._snapshot.elements(place, first, first + NUMEL // 2) as values:
                    self.sums.append(float(values.sum()))
            self._snapshot.mark_read(place)


EXPECTED = [number * NUMEL / 2 for number in range(4) for _ in range(2)]
CASES = [("device", ""), ("host", "on the host"), ("host", "from the device"), ("nvme", "from the device")]


@pytest.mark.parametrize(("tier", "how"), CASES)
def test_values_are_those_of_the_moment(tiers: Tiers, tier: str, how: str) -> None:
    values = places(tiers, tier)
    held, blocks = tiers.held_bytes, tiers.host_block_bytes
    snapshot = Snapshot([(place, 0, NUMEL) for place in values], tiers, None)
    reader = Reader(snapshot, values)
    for place in values * 2:
        overwrite(tiers, place, how)
    reader.begin.set()
    reader.join(60)
    assert reader.sums == EXPECTED
    snapshot.end()
    assert tiers.held_bytes == held and tiers.snapshot is None and tiers.host_block_bytes <= max(blocks, held["host"])
    for number, place in enumerate(values):  # and training goes on from what it has written
        now = tiers.load(place) if isinstance(place, Stored) else place
        assert now.unique().tolist() == [number - 200.0 if how == "on the host" else -1.0]


@pytest.mark.parametrize("reads_device", [True, False])
@pytest.mark.parametrize(("tier", "how"), CASES[:3])
def test_a_step_waits_where_there_is_no_space(tiers: Tiers, tier: str, how: str, reads_device: bool) -> None:
    values = places(tiers, tier)
    before = tiers.held_bytes["host"]
    snapshot = Snapshot([(place, 0, NUMEL) for place in values], tiers, 2 * BLOCK, reads_device=reads_device)
    reader = Reader(snapshot, values)
    timer = threading.Timer(0.2, reader.begin.set)
    timer.start()
    for place in reversed(values):  # the reader wants first what is overwritten last
        overwrite(tiers, place, how)
        assert tiers.held_bytes["host"] <= before + 2 * BLOCK
    reader.join(60)
    timer.join()
    assert reader.sums == EXPECTED
    snapshot.end()


def test_what_only_the_step_can_copy_is_copied_at_the_end(tiers: Tiers) -> None:
    values = places(tiers, "device")
    snapshot = Snapshot([(place, 0, NUMEL) for place in values], tiers, 2 * BLOCK, reads_device=False)
    reader = Reader(snapshot, values)
    reader.begin.set()
    snapshot.keep_all()
    reader.join(60)
    assert reader.sums == EXPECTED
    snapshot.end()


def test_space_for_one_value_is_needed(tiers: Tiers) -> None:
    for tier, reads_device in (("nvme", True), ("device", False)):
        with pytest.raises(TierError, match=r"4\.0 KiB of host_budget .* leaves 4\.0 KiB|leaves 0 B"):
            Snapshot([(places(tiers, tier)[0], 0, NUMEL)], tiers, BLOCK - 1, reads_device=reads_device)
        assert tiers.snapshot is None


def test_a_step_does_not_wait_for_a_reader_that_is_gone(tiers: Tiers) -> None:
    (value,) = places(tiers, "device", 1)
    snapshot = Snapshot([(value, 0, NUMEL)], tiers, 0)
    threading.Timer(0.1, snapshot.stop).start()
    overwrite(tiers, value, "")
    with pytest.raises(TierError, match="the step has ended"), snapshot.elements(value, 0, 1):
        pass
    snapshot.end()
