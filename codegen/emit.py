"""Emit a step as one readable Python file.

The file holds a function for each *distinct* region, and ``step``, which is a line an instruction: a region's call, or
a call on the runtime. Every line says what is live on the device after it, on which stream it runs, and where it came
from. A name is deleted with its last use, which frees its memory: what the comments say is what happens.

Regions take their inputs in a list that they empty, so that a value whose last reader is a region dies inside it.
The same file runs on ATen kernels as it stands, or with its region functions compiled. What is made here is the file as
data; ``step_file.py`` writes its text.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import fx

from zerofx.codegen.regions import Event, Instruction, Region, is_free_view
from zerofx.codegen.step_file import (
    ITEM,
    RESERVED,
    RUNTIME,
    CallLine,
    Line,
    RegionCall,
    RegionText,
    Repeated,
    StepFile,
    region_text,
)
from zerofx.ir import ops
from zerofx.ir.facts import Role, host_bucket, origin, placeholder, value
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import body_after, loop_numbers, loops_of, times_held
from zerofx.ir.serialise import Name, normal_name
from zerofx.ir.streams import stream_of
from zerofx.ir.text import type_text
from zerofx.scheduler.cost.liveness import Liveness
from zerofx.torch_private.operators import OpOverload
from zerofx.units import format_bytes, tiers_text


@dataclass(frozen=True)
class EmittedStep:
    """The source of a step, and the file as data; an edited ``source`` is not what ``file`` says."""

    source: str
    file: StepFile = field(repr=False)

    @property
    def functions(self) -> dict[str, str]:
        """The names of region functions by region key."""
        return self.file.functions


def emit(
    step: StepGraph,
    instructions: Sequence[Instruction],
    live: Liveness,
    header: str,
    scalars: Mapping[int, Sequence[str]] = MappingProxyType({}),
) -> EmittedStep:
    """The text of the step's file, and what it needs to run.

    Args:
        step: the graph after all passes.
        instructions: its regions and events in order (``zerofx.codegen.regions.cut``).
        live: live bytes by node.
        header: text for the head of the file: what was planned.
        scalars: which arguments of its update's operators each bucket's hyperparameters are.
    """
    functions, definitions = _name_regions(instructions)
    names = _local_names(step, functions.values())
    state = [n for n in step.placeholders() if placeholder(n).role is not Role.INPUT]
    batch = [node for node in step.placeholders(Role.INPUT) if times_held(step, node) == 1]
    body, outputs = _body(step, instructions, live, functions, names, scalars)
    file = StepFile(
        header,
        {key: _region(functions[key], region) for key, region in definitions.items()},
        _parameters(state, names),
        _parameters(batch, names),
        body,
        outputs,
    )
    return EmittedStep(file.text, file)


def _name_regions(instructions: Sequence[Instruction]) -> tuple[dict[str, str], dict[str, Region]]:
    """A readable name for each distinct region, made from its layer and phase, and the first region of each."""
    names: dict[str, str] = {}
    first: dict[str, Region] = {}
    used = set(RESERVED)
    for region in instructions:
        if not isinstance(region, Region) or region.key in names:
            continue
        layer = normal_name(region.unit or region.origin.layer)
        words = [word for word in re.split(r"\W+", layer) if word.isidentifier()]
        stem = "_".join([*words[:2], str(region.origin.phase)])
        number, name = 1, stem
        while name in used:
            number, name = number + 1, f"{stem}_{number + 1}"
        used.add(name)
        names[region.key], first[region.key] = name, region
    return names, first


def _local_names(step: StepGraph, functions: Iterable[str]) -> dict[fx.Node, str]:
    """The names of the step's values in its source: those of their nodes, unless they are taken."""
    used = {node.name for node in step.graph.nodes}
    taken = {*RESERVED, *functions}
    names: dict[fx.Node, str] = {}
    for node in step.graph.nodes:
        name = node.name
        while name in taken or (name is not node.name and name in used):
            name += "_"
        names[node] = name
        taken.add(name)
    return names


@dataclass(frozen=True)
class _Statement:
    """One line of a region: what it assigns (``_`` for an output that nothing reads), and the node it calls."""

    node: fx.Node
    targets: tuple[fx.Node | None, ...]
    unpacks: bool


def update_source(region: Region) -> str:
    """The function ``update`` that does what ``region`` does."""
    return region_text(_region("update", region))


def _region(name: str, region: Region) -> RegionText:
    statements = _statements(region)
    local = {node: f"x{i}" for i, node in enumerate(region.inputs)}
    calls = []
    dying = _deletions(region, statements)
    counts: dict[str, int] = {}
    for index, statement in enumerate(statements):
        node = statement.node
        args, keywords = _arguments(node, local)
        for target in statement.targets:
            if target is not None:
                local[target] = _fresh(target, counts)
        targets = tuple(local[t] if t is not None else "_" for t in statement.targets)
        dead = [local[n] for n in dying.get(index, ())] + (["_"] if None in statement.targets else [])
        note = _type(value(node)) if targets else ""
        calls.append(CallLine(_function(node), args, keywords, targets, statement.unpacks, tuple(dead), note))
    return RegionText(name, len(region.inputs), tuple(calls), tuple(local[node] for node in region.outputs))


def _statements(region: Region) -> list[_Statement]:
    """The region's lines; an operator with several outputs and the getitems that name them are one."""
    members = set(region.nodes)
    read = {source for node in region.nodes for source in node.all_input_nodes} | set(region.outputs)
    statements = []
    for node in region.nodes:
        fake = value(node)
        if node.target is operator.getitem and not is_free_view(node):
            continue
        if isinstance(fake, list | tuple) and not is_free_view(node):
            names: list[fx.Node | None] = [None] * len(fake)
            for user in node.users:
                if user in members and isinstance(user.args[1], int):
                    names[user.args[1]] = user
            statements.append(_Statement(node, tuple(names), unpacks=True))
        else:
            statements.append(_Statement(node, (node,) if node in read else (), unpacks=False))
    return statements


def _deletions(region: Region, statements: Sequence[_Statement]) -> dict[int, list[fx.Node]]:
    """The values to delete after each statement: those it reads last, and those it makes that nothing reads."""
    last: dict[fx.Node, int] = {}
    for index, statement in enumerate(statements):
        last.update(dict.fromkeys((t for t in statement.targets if t is not None), index))
        last.update(dict.fromkeys(statement.node.all_input_nodes, index))
    dying: dict[int, list[fx.Node]] = {}
    for node, index in last.items():
        if node not in region.outputs:
            dying.setdefault(index, []).append(node)
    return dying


def _parameters(nodes: Iterable[fx.Node], names: Mapping[fx.Node, str]) -> tuple[tuple[str, str, str], ...]:
    return tuple((names[n], n.name, f"{_type(value(n))} {placeholder(n).role}") for n in nodes if n.users)


def _body(
    step: StepGraph,
    instructions: Sequence[Instruction],
    live: Liveness,
    functions: Mapping[str, str],
    names: Mapping[fx.Node, str],
    scalars: Mapping[int, Sequence[str]],
) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """The lines of a step, and what it returns."""
    last, loops = _last_instruction(step, instructions), loops_of(step)
    returned: Any = step.output.args[0]
    numbered, now = list(enumerate(instructions)), dict(names)
    at = {each.node: number for number, each in numbered if isinstance(each, Event)}
    loop_of_node = loop_numbers(loops)
    read_in = [
        dict.fromkeys(node for each in instructions[at[loop.begin] + 1 : at[loop.end]] for node in _inputs(each))
        for loop in loops
    ]
    parts = [node for node in step.placeholders(Role.INPUT) if times_held(step, node) > 1]
    # The values of all rounds that leave their loop, and the last loop that reads each.
    leaving = dict.fromkeys(node for node in returned if node in loop_of_node or node in parts)
    taken_in = dict[fx.Node, int]()
    for number, read in enumerate(read_in):
        taken_in |= {node: number for node in read if loop_of_node.get(node, number) != number}
    leaving |= dict.fromkeys(taken_in)
    list_names = {node: _unique_name(f"{names[node]}_of_each", names.values()) for node in leaving}
    lines, begin = list[Line](), 0
    for number, loop in enumerate(loops):
        first, end, inside = at[loop.begin], at[loop.end], {*loop.body()}
        given = {before for before, _ in loop.carries}
        for index in range(first, end):
            # What all rounds read is held until the last is over; what each is given, the one before has made for it.
            held = [
                node
                for node in last.get(index, ())
                if node not in loop_of_node and (node not in given or index == first)
            ]
            last[index] = [node for node in last.get(index, ()) if node not in held]
            last.setdefault(end, []).extend(held)
        arriving = [node for node in read_in[number] if node in taken_in and node not in inside]
        takes = [node for node in arriving if taken_in[node] == number and node not in returned]
        handed_out = [node for node in leaving if node in inside or (node in parts and number == 0)]
        needed = [*handed_out, *(after for _, after in loop.carries)]
        inner = now | {node: names[node] for node in arriving}
        repeated = Repeated(
            loop.num_rounds,
            _parameters([node for node in parts if node in read_in[number] or node in needed], names),
            tuple((list_names[node], names[node]) for node in arriving if node not in takes),
            tuple((list_names[node], names[node]) for node in takes),
            tuple(_lines(step, numbered[first + 1 : end], live, functions, inner, last, scalars)),
            tuple((list_names[node], names[node]) for node in handed_out),
            tuple((names[before], names[after]) for before, after in loop.carries),
            tuple(names[node] for node in (*handed_out, *arriving) if node in taken_in and node not in takes),
        )
        lines += [
            *_lines(step, numbered[begin:first], live, functions, now, last, scalars),
            _title(step, step.num_before, loop.num_rounds), repeated, _title(step, step.num_before + 1),
        ]  # fmt: skip
        now |= {after: names[before] for before, after in loop.carries}
        over = tuple(now[node] for node in last.get(end, ()))
        lines += [CallLine("", dead=over)] if over else []
        now |= {node: list_names[node] for node in handed_out}  # what ends a step early gives what it would have given
        begin = end + 1
    lines += _lines(step, numbered[begin:], live, functions, now, last, scalars)
    return tuple(lines), tuple(now[node] for node in returned)


def _title(step: StepGraph, number: int, num_rounds: int = 1) -> str:
    """The words above a body, or a turn; of a loop with the number of its rounds."""
    single, several = ("turn", "turns") if step.takes_turns else ("micro-batch", "micro-batches")
    first = number + 1 + (step.num_micro_batches - step.num_bodies if number > step.num_before else 0)
    return f"{several} {first} to {first + num_rounds - 1}" if num_rounds > 1 else f"{single} {first}"


def _inputs(instruction: Instruction) -> Sequence[fx.Node]:
    """The values that an instruction reads."""
    return instruction.node.all_input_nodes if isinstance(instruction, Event) else instruction.inputs


def _unique_name(name: str, taken: Collection[str]) -> str:
    """``name``, or one like it that is not ``taken``."""
    while name in taken:
        name += "_"
    return name


def _lines(
    step: StepGraph,
    instructions: Iterable[tuple[int, Instruction]],
    live: Liveness,
    functions: Mapping[str, str],
    names: Mapping[fx.Node, str],
    last: Mapping[int, Sequence[fx.Node]],
    scalars: Mapping[int, Sequence[str]],
) -> Iterator[CallLine | RegionCall | str]:
    """The lines of some numbered instructions; ``last`` are the values to delete with each."""
    place = ""
    for index, instruction in instructions:
        node = instruction.node if isinstance(instruction, Event) else instruction.nodes[-1]
        if node.target is ops.next_micro_batch:
            yield _title(step, body_after(node)) + ("" if step.takes_turns else f" of {step.num_micro_batches}")
            place = ""
            continue
        layer = step.cut_piece_of(node) or step.unit_of(node) or origin(node).layer or "(model)"
        here = f"{origin(node).phase} {layer}"
        if here != place:
            place = here
            yield here
        dead = tuple(names[n] for n in last.get(index, ()))
        note = f"live {_live(live, node)} | {stream_of(node)}"
        if node.target is ops.hyperparameters:
            note = " | ".join([*filter(None, [", ".join(scalars.get(int(str(node.args[0])), ()))]), note])
        if isinstance(instruction, Event):
            yield _event(node, names, dead, note)
        else:
            yield RegionCall(
                functions[instruction.key], tuple(names[n] for n in instruction.inputs),
                tuple(names[n] for n in instruction.outputs), dead, host_bucket(node), note,
            )  # fmt: skip


def _live(live: Liveness, node: fx.Node) -> str:
    """Bytes after a node: on the device, and on each slower tier that the step uses."""
    return format_bytes(live.after[node]) + tiers_text({tier: use.after[node] for tier, use in live.slower.items()})


def _last_instruction(step: StepGraph, instructions: Sequence[Instruction]) -> dict[int, list[fx.Node]]:
    """The named values whose last reader is each instruction; placeholders are the caller's and are kept."""
    last: dict[fx.Node, int] = {}
    for index, instruction in enumerate(instructions):
        if isinstance(instruction, Event):
            outputs = [] if value(instruction.node) is None else [instruction.node]
        else:
            outputs = list(instruction.outputs)
        read = _inputs(instruction)
        last.update(dict.fromkeys((n for n in (*outputs, *read) if n.op != "placeholder"), index))
    for node in step.output.all_input_nodes:
        last.pop(node, None)
    dying: dict[int, list[fx.Node]] = {}
    for node, index in last.items():
        dying.setdefault(index, []).append(node)
    return dying


def _event(node: fx.Node, names: Mapping[fx.Node, str], dead: tuple[str, ...], note: str) -> CallLine:
    if node.target is ops.release:
        return CallLine("", dead=dead, note=f"release  # {note}")
    args, _ = _arguments(node, names)
    if node.target is ops.hyperparameters or node.target is ops.empty_gradients:
        args = args[:1]
    how = tuple((name, node.kwargs[name]) for name in ("in_place", "over", "back") if node.kwargs.get(name))
    assert callable(node.target)
    function = RUNTIME + node.target.__name__.partition(".")[0]
    targets = () if value(node) is None else (names[node],)
    return CallLine(function, args, how, targets, dead=dead, note=note)


def _function(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return ITEM
    assert isinstance(node.target, OpOverload), f"no operator: {node.target}"
    return str(node.target)


def _arguments(node: fx.Node, local: Mapping[fx.Node, str]) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """The arguments of a node, with names in the place of nodes."""

    def to_name(source: fx.Node) -> Any:
        return Name(local[source])

    args, kwargs = fx.map_arg((node.args, node.kwargs), to_name)
    return args, tuple(kwargs.items())


def _fresh(node: fx.Node, counts: dict[str, int]) -> str:
    """A local name made from the operator, the same for the same place in equal regions."""
    stem = re.sub(r"\W", "_", getattr(node.target, "__name__", "value").partition(".")[0]).strip("_")
    stem = "out" if node.target is operator.getitem else stem
    counts[stem] = counts.get(stem, 0) + 1
    return f"{stem}_{counts[stem]}"


def _type(fake: Any) -> str:
    return ", ".join(map(type_text, fake)) if isinstance(fake, list | tuple) else type_text(fake)
