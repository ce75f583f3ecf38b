"""Offload of activations: what it costs to have a value in a slower tier, and when it is copied out and back.

A copy overlaps with computation as long as the link is free; the rest of its time is exposed. So a layer's menu
(``entries``) prices the link: at price 0 a copy is free, at price 1 every second of it is exposed. For each price of
the link and of a byte a minimum cut says what to compute again; of the rest, as much is offloaded as some share of the
layer's own computation hides. Those on the lower convex hull of bytes against seconds are the menu. (The rule for
one tensor alone: offload it if the exposed part of its two copies is less than computing it again; compare POET,
2207.07697, and Capuchin.)

``place`` puts the copies on the timeline: out after the last reader in forward, first come first served; back as late
as they can be without keeping backward waiting, or as soon as they can be where that is no time at all. What is needed
again before it could be gone stays on the device.

Of values that all ranks of the model axis have, each may keep a part until backward instead (``spread_menu``): it is
cut where forward reads the value last, and gathered where backward reads it first, which waits for it. So the seconds
are those of the gather, whole, and of the cut. Of a layer's values the largest come first; those that are small next to
it would not be worth what a collective takes to start. What of them is computed again, or offloaded, in a plan is not
spread: each value has one fate.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from zerofx.ir.aliasing import storage_bytes, tensors_of
from zerofx.ir.edit import consumers
from zerofx.ir.facts import Phase, origin, piece_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import loop_numbers, loops_of
from zerofx.passes.activations.offload import refusal
from zerofx.passes.activations.spread import can_be_spread
from zerofx.scheduler.analysis.saved_values import saved_values, storage_size, value_node
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost
from zerofx.scheduler.cost.timeline import UnitPhase, UnitRun, earliest_ends, latest_starts, runs
from zerofx.scheduler.cost.transfers import copy_seconds
from zerofx.scheduler.decide.activations import Segment, cheapest, keep_all, levels_at_prices, menu
from zerofx.scheduler.decide.ledger import Ledger, Level
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.facts import Tier
from zerofx.units import format_seconds

_LINK_PRICES = (0.0, 0.25, 0.5, 1.0, float("inf"))  # seconds that a second of copying costs
_LINK_SHARES = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, float("inf"))  # seconds of copying out for one of the layer's forward
_NUM_BYTE_PRICES = 24  # how many prices of a byte are tried, between the cheapest and the dearest value
_BACKWARD = 2.0  # seconds of backward for one of forward: two matrix products for each


def entries(
    segment: Segment, machine: Machine, tier: Tier, num_layers: int, *, recompute: bool, hides: bool = True
) -> list[Level]:
    """Levels of a segment whose values may be offloaded to ``tier`` and, with ``recompute``, computed again.

    Their ``seconds`` are those of computing again and the exposed part of copying, if the segment's own run is all
    there is to hide it. Of ``num_layers`` such layers, one has its values back at any time of backward: that part of
    what is offloaded counts in ``num_bytes``. ``hides``: whether copies overlap with anything. The first level keeps
    all.
    """
    seconds = {node: node_cost(node, machine).seconds for node in segment.operators}
    links = _Links(segment, machine, tier, sum(seconds.values()), num_layers, hides=hides)
    levels = {keep_all(segment): None}
    if recompute:
        levels |= dict.fromkeys([*menu(segment, machine), *_cuts(segment, links, seconds)])
    return [links.offload(level, share) for level in levels for share in _LINK_SHARES]


def joint_menu(candidates: Sequence[Level], seconds_away: float) -> tuple[Level, ...]:
    """A menu of the entries whose values can be gone and back in ``seconds_away``.

    It goes from keeping all to keeping least, each level with fewer bytes than the one before, for more and more
    seconds a byte.
    """
    return _hull([level for level in candidates if level.copy_seconds <= seconds_away])


def seconds_away(segment: Segment, spans: Sequence[UnitRun]) -> float:
    """Seconds between the last run of the segment's layer in forward and its next in backward: little for the last."""
    if segment.piece:
        mine = [run for run in spans if piece_of(run.first) == segment.piece]
    else:
        mine = [run for run in spans if run.unit == segment.unit]
    gone = next((run for run in mine if run.first <= segment.operators[-1] <= run.last), None)
    if gone is None:  # a run of several layers, whose micro-batches are not apart
        return 0.0
    back = next((run for run in mine if run.phase is Phase.BACKWARD and run.first > gone.last), gone)
    return max(0.0, back.start_seconds - gone.end_seconds)


class _Links:
    """Times of copying a segment's values; ``forward`` are the seconds of its own run in forward."""

    def __init__(
        self, segment: Segment, machine: Machine, tier: Tier, forward: float, num_layers: int, *, hides: bool
    ) -> None:
        computed = set(segment.operators)
        self.forward, self.num_layers, self.hides = forward, num_layers, hides
        self.sizes, self.whole = segment.sizes, [storage_size(storage) for storage in segment.values]
        self.down = [copy_seconds(size, "device", tier, machine) for size in self.whole]
        self.up = [copy_seconds(size, tier, "device", machine) for size in self.whole]
        # What takes longer to order than to move stays.
        shortest = copy_seconds(0, "device", tier, machine) + machine.device.launch_latency
        self.movable = [i for i, (node, _) in enumerate(segment.values) if node in computed and self.down[i] > shortest]

    def offload(self, level: Level, share: float) -> Level:
        """``level`` with its largest values offloaded, as long as copying them out takes ``share`` of the forward."""
        left, out = share * self.forward, []
        for i in sorted(level.saved.intersection(self.movable), key=lambda i: (-self.sizes[i], i)):
            if self.down[i] <= left:
                left -= self.down[i]
                out.append(i)
        down, up = sum(self.down[i] for i in out), sum(self.up[i] for i in out)
        hidden_down, hidden_up = (self.forward, _BACKWARD * self.forward + level.seconds) if self.hides else (0.0, 0.0)
        exposed = max(0.0, down - hidden_down) + max(0.0, up - hidden_up)
        stays = (
            sum(self.sizes[i] for i in level.saved.difference(out)) + sum(self.whole[i] for i in out) // self.num_layers
        )
        return replace(
            level, num_bytes=stays, seconds=level.seconds + exposed, offloaded=frozenset(out), copy_seconds=down + up
        )


def _cuts(segment: Segment, links: _Links, seconds: Mapping[fx.Node, float]) -> Iterator[Level]:
    """Levels that keep values, on whatever tier, for each price of a byte and of the link."""
    busy = [s for s in seconds.values() if s]
    if not busy or not links.movable:
        return
    high = 2 * max(links.sizes) / min(busy)
    low = min(size for size in links.sizes if size) / sum(busy)
    prices = [high * (low / high) ** (number / (_NUM_BYTE_PRICES - 1)) for number in range(_NUM_BYTE_PRICES)]
    for link_price in _LINK_PRICES:

        def cut(price: float, link_price: float = link_price) -> Level:
            weights: list[float] = list(links.sizes)
            for i in links.movable:
                weights[i] = min(weights[i], price * link_price * (links.down[i] + links.up[i]))
            return replace(cheapest(segment, weights, seconds, price), num_bytes=0)

        yield from levels_at_prices(prices, cut)


def _hull(levels: Sequence[Level]) -> tuple[Level, ...]:
    """The lower convex hull of bytes against seconds after the first level, from the most bytes to the least."""
    hull = [levels[0]]
    for level in sorted(levels[1:], key=lambda level: (level.seconds, level.num_bytes)):
        if level.num_bytes >= hull[-1].num_bytes:
            continue
        while len(hull) > 1 and _rate(hull[-2], hull[-1]) <= _rate(hull[-1], level):
            hull.pop()
        hull.append(level)
    return tuple(hull)


def _rate(before: Level, after: Level) -> float:
    spent = after.seconds - before.seconds
    return (before.num_bytes - after.num_bytes) / spent if spent > 0 else float("inf")


@dataclass(frozen=True)
class _Copy:
    reason: str
    node: fx.Node
    num_bytes: int
    tier: Tier
    computed_in: int  # index of the run after which it is copied out
    needed: int  # index of the run that reads it again


def place(
    step: StepGraph,
    requests: Mapping[str, str],
    seconds: Mapping[UnitPhase, float],
    machine: Machine,
    ledger: Ledger,
) -> tuple[Absence, ...]:
    """When each value goes out and comes back, on links that carry one copy at a time.

    Args:
        step: the captured graph with recomputation carried out.
        requests: the values to offload, with reasons. What would be needed again as soon as it is gone is left out.
        seconds: computation by unit and phase (``scheduler.cost.timeline.seconds_by_place``).
        machine: its links.
        ledger: what they may take.
    """
    spans = runs(step, seconds)
    ledger = ledger.copy()
    copies = _copies(step, spans, requests, ledger)
    ways = _place_on_lanes(copies, spans, machine)
    decisions = []
    passing = [ledger.left["host"]] * len(spans)
    rounds = _places_in_rounds(step, copies)
    for copy in copies:
        freed, reload = ways[copy.node]
        if freed + 1 >= reload:
            # With only one run in between it would not be gone at all: backward waits for it.
            reload = copy.needed
        if freed + 1 >= reload:
            continue
        if copy.tier == "nvme":
            under_way = [*range(copy.computed_in, freed + 1), *range(reload, copy.needed + 1)]
            if any(passing[run] < copy.num_bytes for run in under_way):
                continue
            for run in under_way:
                passing[run] -= copy.num_bytes
        down = copy_seconds(copy.num_bytes, "device", copy.tier, machine)
        up = copy_seconds(copy.num_bytes, copy.tier, "device", machine)
        decisions.append(
            Absence(
                kind="offloads",
                value=copy.node.name,
                tier=copy.tier,
                num_bytes=copy.num_bytes,
                free_after=(rounds.get(copy.node, (spans[freed].last.name, ""))[0],),
                reload_before=(rounds.get(copy.node, ("", spans[reload].first.name))[1],),
                reason=f"{copy.reason}; {format_seconds(down)} out, {format_seconds(up)} back",
                layer=origin(copy.node).layer,
            )
        )
    return tuple(decisions)


def _places_in_rounds(step: StepGraph, copies: Sequence[_Copy]) -> dict[fx.Node, tuple[str, str]]:
    """The last reader of forward and the first of backward of each value that loops of layers have: what a round starts
    is done in it."""
    if not (step.by_layer and step.has_loop):
        return {}
    order, in_loop = step.positions(), loop_numbers(loops_of(step))
    places = {}
    for node in (copy.node for copy in copies if copy.node in in_loop):
        readers = sorted((node, *consumers(node)), key=order.__getitem__)
        forward = [reader for reader in readers if origin(reader).phase is Phase.FORWARD]
        places[node] = forward[-1].name, next(reader for reader in readers if reader not in forward).name
    return places


def _copies(step: StepGraph, spans: Sequence[UnitRun], requests: Mapping[str, str], ledger: Ledger) -> list[_Copy]:
    order = step.positions()
    starts = [order[run.first] for run in spans]
    by_name = step.nodes_by_name()
    sizes = [storage_bytes(tensors_of(by_name[value])[0]) for value in requests]
    on_host, reserve = ledger.left["host"], 0
    if {"host", "nvme"} <= {*ledger.tiers} and sum(sizes) > on_host:
        reserve = min(2 * max(sizes), on_host // 2)  # for those on their way to nvme, and back
    copies = []
    for node in sorted(map(by_name.__getitem__, requests), key=order.__getitem__):
        num_bytes = storage_bytes(tensors_of(node)[0])
        readers = [order[reader] for reader in consumers(node) if origin(reader).phase is Phase.FORWARD]
        again = [order[reader] for reader in consumers(node) if origin(reader).phase is not Phase.FORWARD]
        tier = ledger.first(num_bytes, reserve)
        # A buffer is read by the next micro-batch's forward: after its reload it would be needed twice.
        needed_twice = bool(again) and max(readers, default=0) > min(again)
        if tier is None or not again or needed_twice or refusal(node) is not None:
            continue
        ledger.take(tier, num_bytes)
        made_in = bisect_right(starts, max([order[node], *readers])) - 1
        copies.append(_Copy(requests[node.name], node, num_bytes, tier, made_in, bisect_right(starts, min(again)) - 1))
    return copies


def _place_on_lanes(
    copies: Sequence[_Copy], spans: Sequence[UnitRun], machine: Machine
) -> dict[fx.Node, tuple[int, int]]:
    """The run after which each value has been copied out, or else the last one of forward; and the run before which its
    copy back starts to be there in time, or else the first one of backward."""
    starts, ends = [run.start_seconds for run in spans], [run.end_seconds for run in spans]
    ways = {}
    for tier in dict.fromkeys(copy.tier for copy in copies):
        mine = sorted((copy for copy in copies if copy.tier == tier), key=lambda copy: copy.computed_in)
        down, up = (
            [copy_seconds(copy.num_bytes, *link, machine) for copy in mine]
            for link in (("device", tier), (tier, "device"))
        )
        gone = earliest_ends([ends[copy.computed_in] for copy in mine], down)
        ranks = [(copy.needed, copy.computed_in, -number) for number, copy in enumerate(mine)]
        back = latest_starts([starts[copy.needed] for copy in mine], up, ranks)
        for copy, end, begin in zip(mine, gone, back, strict=True):
            last_forward = next(i for i in range(copy.needed - 1, -1, -1) if spans[i].phase is Phase.FORWARD)
            first_backward = next(i for i in range(copy.computed_in, len(spans)) if spans[i].phase is not Phase.FORWARD)
            reload = min(max(bisect_right(starts, begin) - 1, first_backward), copy.needed)
            ways[copy.node] = min(bisect_left(ends, end, lo=copy.computed_in), last_forward), reload
    return ways


_LEAST = 1 / 8  # of the largest value of a layer


def spread_menu(segment: Segment, num_parts: int, seconds: Callable[[int], float]) -> tuple[Level, ...]:
    """A segment's levels: none of its values in parts, the largest, the two largest, and so on.

    ``seconds``: what it takes to cut and gather so many bytes.
    """
    makers = set(segment.operators)
    own = [i for i in sorted(segment.needed | segment.fixed) if segment.values[i][0] in makers]
    sizes = {i: storage_size(segment.values[i]) for i in own if can_be_spread(value_node(segment.values[i]), num_parts)}
    least = _LEAST * max(sizes.values(), default=0)
    levels = [Level(sum(segment.sizes[i] for i in sizes), 0.0)]
    for i, size in sorted(sizes.items(), key=lambda entry: -entry[1]):
        if size >= least and size // num_parts < segment.sizes[i]:
            before = levels[-1]
            left = before.num_bytes - segment.sizes[i] + size // num_parts
            levels.append(Level(left, before.seconds + seconds(size), spread=before.spread | {i}))
    return tuple(levels)


def spreads_of(
    step: StepGraph, reasons: Mapping[str, str], num_parts: int, without: Collection[str]
) -> tuple[Absence, ...]:
    """Values of ``reasons``, by name, that ``step``, whose other decisions are carried out, keeps for backward;
    ``without`` those that are elsewhere meanwhile."""
    return tuple(
        Absence(
            kind="spreads",
            value=node.name,
            num_bytes=storage_bytes(tensors_of(node)[0]),
            reason=reasons[node.name],
            layer=origin(node).layer,
        )
        for node in saved_values(step)
        if node.name in reasons and node.name not in without and can_be_spread(node, num_parts)
    )
