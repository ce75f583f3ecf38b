"""Sides of updates whose states are on the host: on the host or on the device, so that both ways end together.

Through the device a bucket's states and masters come up and go down again. On the host its gradient goes down, the host
computes, and the new parameters come up. The first way takes the links, the second the host's memory: two resources
that work at once. The updates that run on the host are the first ones, which have the rest of backward to hide in, or
they are spread evenly, so that links have the time of several layers for each of the others: whatever lets the step end
the soonest by the pace of its lanes: when computation reaches each run of layers, with what links and the host do
meanwhile.

Runs compute in order. What arrives from a slower tier is copied one at a time on each link, of what may be asked for
the one that is wanted first, and computation waits where it is not there in time. (``scheduler/cost/simulate.py`` takes
copies in the order in which a graph starts them, which is decided after the sides are.) A bucket whose states are on
the host is updated after the run that completes its gradient, on one of two sides:

    on the host      gradient down -> update on the host -> parameters up
    on the device    states up -> computation waits for them -> states down

Computation goes on meanwhile, but for one thing: what the update before has on its way down is awaited where the next
update is, so that no more than one bucket's is held. Nor does the step's end wait for what may run on into the next
one: for what the last update has on its way down, and for the host (``may_run_on``), which that waits for where it
first reads those parameters. So the pace is that of a step among steps like it.

Where gradients are clipped, all updates are after the last run, those on the host first, in the order in which the next
step needs them: what it needs late may be updated while it runs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from zerofx.ir.buckets import Bucket
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.transfers import copy_seconds
from zerofx.scheduler.decide.ledger import Level
from zerofx.scheduler.decide.states import host_seconds, update_traffic_bytes
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.facts import Tier
from zerofx.units import format_seconds

_NEW = -1  # parameters that the host has updated go up before all that later runs want
_STEPS = 4  # paced at most, until two are alike; with nothing that runs on, one
_SAME_SECONDS = 1e-9  # what two steps like each other differ by, as their seconds are rounded


@dataclass(frozen=True)
class Arrival:
    """``num_bytes`` that are wanted on tier ``to`` before run ``needed``.

    They may be asked for from run ``earliest`` on, and up to run ``latest``. ``bucket``: whose parameters they are,
    which come up once the host has updated them.
    """

    num_bytes: int
    tier: Tier
    to: Tier
    needed: int
    latest: int
    earliest: int = 0
    bucket: int | None = None


@dataclass(frozen=True)
class Departure:
    """``num_bytes`` that leave the device for the host after run ``after``, and are there at the end of run ``by``."""

    num_bytes: int
    after: int
    by: int


@dataclass(frozen=True)
class Update:
    """A bucket with states on the host, whose gradient is complete ``after`` a run, and the seconds that its update
    takes of links, of the host and of the device on either side.

    ``states``: how they arrive for an update on the device. ``handed_bytes`` are what the host is given for an update
    there, besides the states. ``used``: the run of the next step that first reads parameters that the host may go on to
    update in it; None where their own step awaits them. ``waits``: whether the update is after the step's last run.
    ``leaves_down``: whether a step may end while an update on the device has states on their way down.
    """

    bucket: Bucket
    after: int
    states: Arrival
    computed: float
    states_down: float
    gradient_down: float
    host: float
    parameters_up: float
    handed_bytes: int
    used: int | None = None
    waits: bool = False
    leaves_down: bool = False

    @staticmethod
    def from_bucket(
        bucket: Bucket, states: Arrival, stage: int, machine: Machine, *,
        is_away: bool, used: int | None = None, waits: bool = False, leaves_down: bool = False,
    ) -> Update:  # fmt: skip
        """The update of ``bucket`` after run ``states.latest``; ``is_away``: whether its parameters are on the host
        too. One that ``waits`` has its gradient on the host by then."""
        numel = bucket.updated_numel(stage)
        gradient, new = numel * bucket.reduce_dtype.itemsize, numel * bucket.compute_dtype.itemsize
        stored = states.num_bytes - (new if is_away and not bucket.has_master else 0)
        return Update(
            bucket=bucket,
            after=states.latest,
            states=states,
            computed=update_traffic_bytes(bucket, stored, numel) / machine.memory_bandwidth,
            states_down=copy_seconds(stored + (new if is_away else 0), "device", "host", machine),
            gradient_down=0.0 if waits else copy_seconds(gradient, "device", "host", machine),
            host=host_seconds(bucket, stored, numel, machine),
            parameters_up=0.0 if is_away else copy_seconds(new, "host", "device", machine),
            handed_bytes=gradient + (new if bucket.has_master else 0),
            used=used,
            waits=waits,
            leaves_down=leaves_down,
        )

    def turn(self, *, on_host: bool) -> tuple[bool, int]:
        """Sort key of updates that would run one after the other otherwise."""
        runs_on = self.waits and on_host and self.used is not None
        return not runs_on, (self.used or 0) if runs_on else 0


@dataclass(frozen=True)
class Pace:
    """In seconds from a step's begin: ``reached``, when computation reaches each run, and the end of the last;
    ``end_seconds``, when the next step begins; ``new``, when parameters that the host has updated are up, each with the
    seconds that its copy takes; ``down``, when what the step before has left on its way down is there.
    """

    reached: tuple[float, ...]
    end_seconds: float
    new: tuple[tuple[float, float], ...] = ()
    down: float = 0.0

    def is_like(self, other: Pace) -> bool:
        """True if the other step reaches each run at the same time."""
        times = zip((*self.reached, self.end_seconds), (*other.reached, other.end_seconds), strict=True)
        return all(abs(mine - others) <= _SAME_SECONDS for mine, others in times)


def pace(
    arrivals: Sequence[Arrival],
    updates: Sequence[Update],
    on_host: Collection[int],
    run_seconds: Sequence[float],
    machine: Machine,
    *,
    departures: Sequence[Departure] = (),
    ahead: bool = True,
) -> Pace:
    """The pace of a step, among steps like it, in which all is copied as soon as its link is free.

    Args:
        arrivals: what is wanted from slower tiers, but for the states of ``updates``.
        updates: in their order.
        on_host: indices of the buckets that are updated on the host; the others are on the device.
        run_seconds: those of each run.
        machine: its links.
        departures: what leaves the device besides.
        ahead: whether copies overlap with computation, or are awaited at once.
    """
    lanes, order = _Lanes(machine, ahead), _Order.sort(arrivals, updates, on_host, departures)
    paced = _pace_one(lanes, order, run_seconds)
    for _ in range(_STEPS - 1 if lanes.runs_on else 0):
        before, paced = paced, _pace_one(lanes, order, run_seconds)
        if paced.is_like(before):
            break
    return paced


@dataclass(frozen=True)
class _Order:
    """All that a step's lanes do, by kind, the last first.

    ``due`` has each update with True if it is on the host, ``used`` the run that first reads what the host updates with
    its bucket, ``awaited`` the buckets whose update on the host their own step awaits.
    """

    asked: tuple[Arrival, ...]
    wanted: tuple[Arrival, ...]
    due: tuple[tuple[Update, bool], ...]
    used: tuple[tuple[int, int], ...]
    leaving: tuple[Departure, ...]
    leaving_by: tuple[Departure, ...]
    awaited: tuple[int, ...]

    @staticmethod
    def sort(
        arrivals: Sequence[Arrival],
        updates: Sequence[Update],
        on_host: Collection[int],
        departures: Sequence[Departure],
    ) -> _Order:
        placed = [(update, update.bucket.index in on_host) for update in updates]
        there = [update for update, is_on_host in placed if is_on_host]
        coming = [*arrivals, *(update.states for update, is_on_host in placed if not is_on_host)]
        return _Order(
            asked=tuple(sorted(coming, key=lambda arrival: arrival.earliest, reverse=True)),
            wanted=tuple(sorted(arrivals, key=lambda arrival: arrival.needed, reverse=True)),
            due=tuple(sorted(placed, key=lambda entry: entry[0].turn(on_host=entry[1]))[::-1]),
            used=tuple(sorted(((u.used, u.bucket.index) for u in there if u.used is not None), reverse=True)),
            leaving=tuple(sorted(departures, key=lambda departure: departure.after, reverse=True)),
            leaving_by=tuple(sorted(departures, key=lambda departure: departure.by, reverse=True)),
            awaited=tuple(update.bucket.index for update in there if update.used is None),
        )


def _pace_one(lanes: _Lanes, order: _Order, run_seconds: Sequence[float]) -> Pace:
    """The pace of the step that comes next on ``lanes``."""
    asked, wanted, due, used = list(order.asked), list(order.wanted), list(order.due), list(order.used)
    leaving, leaving_by = list(order.leaving), list(order.leaving_by)
    begun, left, reached = lanes.begin(), lanes.left_down, []
    for run, seconds in enumerate((*run_seconds, 0.0)):
        while due and due[-1][0].after < run:
            update, is_on_host = due.pop()
            lanes.update(update, on_host=is_on_host)
        while leaving and leaving[-1].after < run:
            lanes.leave(leaving.pop())
        while leaving_by and leaving_by[-1].by < run:
            lanes.hold_until_gone(leaving_by.pop())
        while lanes.ahead and asked and asked[-1].earliest <= run:
            lanes.ask(asked.pop())
        while used and used[-1][0] <= run:
            lanes.settle(used.pop()[1])
        while wanted and wanted[-1].needed <= run:
            lanes.wait(wanted.pop())
        reached.append(lanes.now - begun)
        lanes.now += seconds
    lanes.end(order.awaited)
    new = ((end - begun, seconds) for end, seconds in lanes.new if end > begun)
    return Pace(tuple(reached), lanes.now - begun, tuple(new), left)


class _Lanes:
    """When computation (``now``), each link and the host are free; ``ahead`` as in ``pace``."""

    def __init__(self, machine: Machine, ahead: bool) -> None:
        self.ahead, self.now = ahead, 0.0
        # Layers are alike: few sizes are copied, many times each.
        self._copy_seconds = functools.cache(functools.partial(copy_seconds, machine=machine))
        self._up = self._down = self._host = self._drive = 0.0
        self._leaves_down = False  # whether the step may end before what is on its way down is there
        # When it may be copied up, for which run, number, seconds.
        self._asked: list[tuple[float, int, int, float]] = []
        self._ready: list[tuple[int, int, float]] = []  # of those, what may be copied by now
        self._count = itertools.count()
        self._numbers: dict[int, int] = {}  # of a step's arrivals, in the order in which they were asked for
        self._there: dict[int, float] = {}  # when each is there, by number
        self._new_seconds: dict[int, float] = {}
        self._gone: dict[int, float] = {}  # when what leaves the device has left it
        self._updated: dict[int, float] = {}  # when the host has updated a bucket
        self._under_way: dict[int, int] = {}  # by bucket, the number of the copy up of what the host has updated
        self.new: list[tuple[float, float]] = []

    @property
    def runs_on(self) -> bool:
        """True if the next step begins with work of this one still running."""
        return bool(self._under_way) or self.left_down > 0.0

    @property
    def left_down(self) -> float:
        """Seconds until what is on its way down is there."""
        return max(0.0, self._down - self.now)

    def begin(self) -> float:
        """Begin a step, with what is under way; returns when that is."""
        self._numbers.clear()
        self.new.clear()
        return self.now

    def ask(self, arrival: Arrival) -> None:
        """Let what is wanted be copied from now on."""
        number, begin = self._next(arrival), self.now
        if arrival.bucket is not None:
            begin = max(begin, self._updated.get(arrival.bucket, 0.0))
        if arrival.tier == "nvme":
            seconds = self._copy_seconds(arrival.num_bytes, "nvme", "host")
            begin = self._drive = max(begin, self._drive) + seconds
        if arrival.to == "device":
            seconds = self._copy_seconds(arrival.num_bytes, "host", "device")
            heappush(self._asked, (begin, arrival.needed, number, seconds))
        else:
            self._there[number] = begin

    def _next(self, asked: Arrival | Update) -> int:
        return self._numbers.setdefault(id(asked), next(self._count))

    def wait(self, arrival: Arrival) -> None:
        """Computation stands still until it is there."""
        if not self.ahead:
            self.ask(arrival)
        self._hold(self._numbers[id(arrival)])

    def settle(self, bucket: int) -> None:
        """Computation stands still until what the host has updated is there, if it is still under way."""
        if bucket in self._under_way:
            self._hold(self._under_way.pop(bucket))

    def _hold(self, number: int) -> None:
        while number not in self._there:
            self._copy_up()
        self.now = max(self.now, self._there[number])

    def _copy_up(self) -> None:
        """Copy the one that is wanted first, of what may be copied by now, until it is done or another one may be too.

        A copy that is under way is put off for one that is wanted before it: it could have been begun later.
        """
        if not self._ready:
            self._up = max(self._up, self._asked[0][0])
        while self._asked and self._asked[0][0] <= self._up:
            _, needed, number, seconds = heappop(self._asked)
            heappush(self._ready, (needed, number, seconds))
        needed, number, seconds = heappop(self._ready)
        if self._asked and self._asked[0][0] < self._up + seconds:
            heappush(self._ready, (needed, number, self._up + seconds - self._asked[0][0]))
            self._up = self._asked[0][0]
            return
        self._up += seconds
        self._there[number] = self._up
        if needed == _NEW:
            self.new.append((self._up, self._new_seconds[number]))

    def leave(self, departure: Departure) -> None:
        """Let what leaves the device be copied from now on."""
        begin = max(self.now, self._down)
        self._down = begin + self._copy_seconds(departure.num_bytes, "device", "host")
        self._gone[id(departure)] = self._down

    def hold_until_gone(self, departure: Departure) -> None:
        """Computation stands still until it has left."""
        self.now = max(self.now, self._gone[id(departure)])

    def update(self, update: Update, *, on_host: bool) -> None:
        """Update a bucket once what the update before has on its way is down."""
        self.now = max(self.now, self._down)
        self._leaves_down = update.leaves_down and not on_host
        if on_host:
            self._down = self.now + update.gradient_down
            self._host = max(self._host, self._down) + update.host
            self._updated[update.bucket.index] = self._host
            number = self._under_way[update.bucket.index] = self._next(update)
            self._new_seconds[number] = update.parameters_up
            heappush(self._asked, (self._host, _NEW, number, update.parameters_up))
        else:
            self.wait(update.states)
            self.now += update.computed
            self._down = self.now + update.states_down
        if not self.ahead:
            self.now = self._down

    def end(self, awaited: Iterable[int]) -> None:
        """End a step once all is down that has to be, and what the host updates of the buckets ``awaited`` is there."""
        self.now = self.now if self._leaves_down else max(self.now, self._down)
        for bucket in awaited:
            self.settle(bucket)
        while self._up < self.now and (self._ready or (self._asked and self._asked[0][0] < self.now)):
            self._copy_up()


_TRIED = 16  # numbers of updates on the host that are tried at first, before those around the best


@dataclass(frozen=True)
class Handed:
    """Room on the host for updates: ``levels`` have what buckets take of it already, ``spare_bytes`` what is left for
    gradients and new parameters."""

    levels: Mapping[Bucket, Level]
    spare_bytes: int

    def bytes_to_take(self, update: Update) -> int:
        """Bytes that an update on the host takes of what is left."""
        return 0 if self.levels[update.bucket].update == "host" else update.handed_bytes


def balance_updates(
    decisions: Sequence[Absence],
    updates: Sequence[Update],
    arrivals: Sequence[Arrival],
    run_seconds: Sequence[float],
    handed: Handed,
    machine: Machine,
    *,
    departures: Sequence[Departure] = (),
    ahead: bool,
) -> tuple[Absence, ...]:
    """``decisions``, with the side of each update that lets the step end the soonest.

    Args:
        decisions: where states are; those that are not of ``updates`` stay as they are.
        updates: those that may run on either side, in their order.
        arrivals: what else comes up from slower tiers.
        run_seconds: those of each run of the step.
        handed: what the host may be handed.
        machine: its links and its host.
        departures: what leaves the device for the host besides.
        ahead: whether copies overlap with computation.
    """
    if not updates:
        return tuple(decisions)
    needed = [handed.bytes_to_take(update) for update in updates]
    ends: dict[frozenset[int], float] = {}

    def end(on_host: frozenset[int]) -> float:
        if on_host not in ends:
            buckets = [updates[number].bucket.index for number in sorted(on_host)]
            fits = sum(needed[number] for number in on_host) <= handed.spare_bytes
            ends[on_host] = float("inf")
            if fits:
                paced = pace(arrivals, updates, buckets, run_seconds, machine, departures=departures, ahead=ahead)
                ends[on_host] = paced.end_seconds
        return ends[on_host]

    gap = max(1, len(updates) // _TRIED)
    best = min((way for most in range(0, len(updates) + 1, gap) for way in _ways(most, len(updates))), key=end)
    while gap := gap // 2:
        near = (most for most in (len(best) - gap, len(best) + gap) if 0 <= most <= len(updates))
        best = min([best, *(way for most in near for way in _ways(most, len(updates)))], key=end)
    exposed = max(0.0, end(best) - sum(run_seconds))
    why = f"{len(best)} of {len(updates)} are updated on the host, and {format_seconds(exposed)} exposed for all"
    sides: dict[int, Tier] = {
        update.bucket.index: "host" if n in best else "device" for n, update in enumerate(updates)
    }
    return tuple(
        replace(decision, update=side, reason=f"{decision.reason.partition(';')[0]}; updated on the {side}: {why}")
        if (side := sides.get(decision.bucket))
        else decision
        for decision in decisions
    )


def _ways(most: int, num: int) -> Iterator[frozenset[int]]:
    """Sets of ``most`` of ``num`` updates, in their order, to try on the host: the first ones, or spread evenly, with
    the last or the first among them."""
    yield frozenset(range(most))
    yield frozenset(i for i in range(num) if (i + 1) * most // num > i * most // num)
    yield frozenset(i for i in range(num) if -(i + 1) * most // num < -i * most // num)
