"""Give what a step makes on the device places in one pool, its arena: sizes and lifetimes are known from its graph.

The emitted step is straight-line code, so that its allocations come in one order. Those of compiled regions and of the
runtime's buffers are followed here, from the line that makes each to the one that deletes its last name; the pool is
packed (``codegen/packing.py``), and as the step runs each allocation takes the place of its number
(``zerofx/runtime/arena.py``).

Outside of the pool stays what a step returns, which the caller keeps; what the host or a copy that is awaited nowhere
in the step may still read when the last name goes; what runs on into the next step, whose own places begin anew; what
the rounds of a loop hand on to one another, or to those of another, which takes several places at once; and what ATen's
operators and other libraries allocate themselves. That is counted, and named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from zerofx.codegen.packing import Block, pack
from zerofx.codegen.regions import Event, Instruction, Region
from zerofx.ir import ops
from zerofx.ir.aliasing import Storage, is_view, storage_source
from zerofx.ir.facts import origin
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import loop_numbers, loops_of
from zerofx.ir.streams import runs_on_host
from zerofx.ir.text import call_name
from zerofx.scheduler.cost.fusion import is_written
from zerofx.scheduler.cost.liveness import Liveness, MemoryEvent
from zerofx.scheduler.plan.facts import Arena
from zerofx.units import first_few

Take = tuple[int, int] | None
"""Offset and bytes of an allocation in the pool; None for one that stays outside."""

ALLOCATING = frozenset({ops.empty_gradients, ops.all_gather, ops.reload, ops.receive_value})
"""What the runtime allocates a buffer for that may lie in the pool."""


@dataclass(frozen=True)
class PlannedArena:
    """A step's pool, and the place in it of each allocation, in the order in which the step makes them."""

    use: Arena
    takes: tuple[Take, ...]


def plan_arena(
    step: StepGraph, instructions: Sequence[Instruction], live: Liveness, memory: Mapping[str, Sequence[MemoryEvent]]
) -> PlannedArena:
    """The arena of a step after all passes.

    Args:
        step: the graph.
        instructions: those that it is cut into.
        live: its live bytes, with compiled regions as in ``memory``.
        memory: what compiled regions take and give back, by key; other regions allocate outside.
    """
    walk = _Walk(step, live)
    loops, borders = loops_of(step), dict[fx.Node, int]()
    for instruction in instructions:
        if isinstance(instruction, Event) and instruction.node.target is ops.next_micro_batch:
            borders[instruction.node] = len(walk.takes)
        if isinstance(instruction, Region) and instruction.key in memory:
            walk.call_compiled(instruction, memory[instruction.key])
        else:
            walk.call(instruction)
    packing = pack(walk.blocks)
    taken = [None if number is None else (packing.offsets[number], walk.sizes[number]) for number in walk.takes]
    for loop in reversed(loops):  # what comes before another loop keeps its number
        first, last = borders[loop.begin], borders[loop.end]
        taken[first:last] = taken[first:last] * loop.num_rounds
    outside = {name: size for name, size in sorted(walk.outside.items(), key=lambda entry: -entry[1]) if size}
    return PlannedArena(Arena(packing.num_bytes, packing.least_bytes, walk.most_outside, outside), tuple(taken))


class _Walk:
    """The allocations of a step up to one of its instructions: ``takes`` has a block's number for each of them, or None
    for what stays outside; ``sizes`` the bytes of blocks. ``most_outside`` bytes were outside at once, ``outside`` says
    whose they were."""

    def __init__(self, step: StepGraph, live: Liveness) -> None:
        self.takes: list[int | None] = []
        self.sizes: list[int] = []
        self.most_outside = 0
        self.outside: dict[str, int] = {}
        self._live = live
        self._stays_out = _storages_in_use(step, live)
        self._dying: dict[fx.Node, list[Storage]] = {}
        for storage, reader in live.last_use.items():
            self._dying.setdefault(reader, []).append(storage)
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._at: dict[Storage, int] = {}  # the block that a storage lies in
        self._others = {storage: live.sizes[storage] for storage in live.running_on}  # bytes of what lies outside
        self._held: set[int] = set()  # blocks that are live
        self._clock = 0
        self._after = live.persistent_bytes + sum(self._others.values())

    @property
    def blocks(self) -> list[Block]:
        """All blocks, with their lifetimes."""
        ends = (self._clock + 1 if number in self._held else end for number, end in enumerate(self._ends))
        return [Block(*lifetime) for lifetime in zip(self.sizes, self._starts, ends, strict=True)]

    def call(self, instruction: Instruction) -> None:
        """An event, or a region whose operators allocate for themselves."""
        nodes = (instruction.node,) if isinstance(instruction, Event) else instruction.own
        node = nodes[0]
        if node.target in ALLOCATING and (node, 0) in self._live.sizes:
            size = self._live.sizes[node, 0]
            block = None if not self._can_lie_inside((node, 0)) else self._begin(size)
            self.takes.append(block)
            if block is not None:
                self._at[node, 0] = block
        largest = max(nodes, key=self._live.during.__getitem__)
        self._count(self._live.during[largest] - self._live.persistent_bytes - self._live_bytes(), call_name(largest))
        self._leave(nodes)

    def call_compiled(self, region: Region, events: Sequence[MemoryEvent]) -> None:
        """A compiled region."""
        outputs = {e.output: e.block for e in events if e.output is not None and e.block is not None}
        storages = {number: storage_source(region.outputs[number]) for number in outputs}
        out = {outputs[number] for number, storage in storages.items() if not self._can_lie_inside(storage)}
        members, here = set(region.own), dict[int, int]()
        outside = self._after - self._live.persistent_bytes - self._live_bytes()
        freed = set[Storage]()
        name = _allocator_names(region)
        for event in events:
            self._clock += 1
            if event.freed is not None:
                storage = storage_source(region.inputs[event.freed])
                if self._live.last_use.get(storage) in members and storage not in freed:
                    freed.add(storage)
                    outside -= 0 if storage in self._at else self._live.sizes[storage]
                    self._finish(storage)
            elif event.output is not None:
                continue
            elif event.block is None or event.block in out:
                if event.block is not None and event.num_bytes >= 0:
                    self.takes.append(None)
                outside += event.num_bytes
                self._count(outside, name)
            elif event.block not in here:
                here[event.block] = self._begin(event.num_bytes)
                self.takes.append(here[event.block])
            else:
                self._end(here[event.block])
        for number, storage in storages.items():
            if outputs[number] in here:
                self._at[storage] = here[outputs[number]]
        lying = set(self._at.values())
        self._clock += 1
        for block in here.values():
            if block in self._held and block not in lying:
                self._end(block)
        self._leave(region.own)

    def _can_lie_inside(self, storage: Storage) -> bool:
        return storage in self._live.last_use and storage not in self._stays_out

    def _begin(self, num_bytes: int) -> int:
        self._clock += 1
        self.sizes.append(num_bytes)
        self._starts.append(self._clock)
        self._ends.append(0)
        self._held.add(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def _end(self, block: int) -> None:
        self._clock += 1
        self._ends[block] = self._clock
        self._held.discard(block)

    def _finish(self, storage: Storage) -> None:
        """Nothing reads ``storage`` any more."""
        self._others.pop(storage, None)
        block = self._at.pop(storage, None)
        if block is not None and block not in self._at.values():  # several may lie in one
            self._end(block)

    def _live_bytes(self) -> int:
        return sum(self.sizes[block] for block in self._held)

    def _count(self, outside: int, name: str) -> None:
        if outside <= self.most_outside:
            return
        self.most_outside, self.outside = outside, {}
        for (node, _), size in self._others.items():
            owner = call_name(node)
            self.outside[owner] = self.outside.get(owner, 0) + size
        rest = outside - sum(self.outside.values())
        self.outside[name] = self.outside.get(name, 0) + rest

    def _leave(self, nodes: Sequence[fx.Node]) -> None:
        """After an instruction: what it has read for the last time is over."""
        for node in nodes:
            for storage in self._dying.get(node, ()):
                self._finish(storage)
        last, members = nodes[-1], set(nodes)
        for node in nodes:
            index = 0
            while (node, index) in self._live.sizes:
                storage = (node, index)
                if storage not in self._at and self._live.last_use.get(storage) not in members:
                    self._others[storage] = self._live.sizes[storage]
                index += 1
        self._after = self._live.after[last]


def _allocator_names(region: Region) -> str:
    """The operators of a compiled region that allocate for themselves, and where they are."""
    names = dict.fromkeys(call_name(node) for node in region.own if not is_view(node) and not is_written(node))
    last = origin(region.nodes[-1])
    return f"{first_few(names) if names else 'results'} in {last.phase} of {region.unit or last.layer or 'the model'}"


def _storages_in_use(step: StepGraph, live: Liveness) -> set[Storage]:
    """Storages that are in use after the last line that names them, or are carried from round to round."""
    out = {storage_source(node) for node in step.output.all_input_nodes} | set(live.running_on)
    for node in step.calls():
        if not runs_on_host(node) and node.target not in (*ops.TRANSFERS, *ops.COLLECTIVES):
            continue
        waits = [user for user in node.users if user.target is ops.wait]
        for storage in map(storage_source, (node, *node.all_input_nodes)):
            last = live.last_use.get(storage)
            if last is None or not waits or any(last < wait for wait in waits):
                out.add(storage)
    loops = loops_of(step)
    loop_of_node = loop_numbers(loops)
    for loop in loops:
        out |= {storage_source(node) for pair in loop.carries for node in pair}
    for storage, last in live.last_use.items():
        # What is read in each round is live until the last is over; what is handed on to other loops is there for all.
        if loop_of_node.get(last) != loop_of_node.get(storage[0]):
            out.add(storage)
    return out
