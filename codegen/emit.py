"""Emit a step as one readable Python file.

The file holds a function for each *distinct* region, and ``step``, which is a line an instruction: a region's call, or
a call on the runtime. Every line says what is live on the device behind it, on which stream it runs, and where it came
from. A name is deleted with its last use, which frees its memory: what the comments say is what happens.

Regions take their inputs in a list that they empty, so that a value whose last reader is a region dies inside it.
The same file runs on ATen kernels as it stands, or with its region functions compiled.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerofx import ops
from zerofx.codegen.kernels.table import launches_of
from zerofx.codegen.regions import Event, Instruction, Region, is_free_view
from zerofx.graph import StepGraph
from zerofx.node_facts import Role, delayed_bucket, origin, placeholder, value
from zerofx.report.units import format_bytes, on_tiers
from zerofx.scheduler.liveness import Liveness
from zerofx.scheduler.streams import runs_on_host, stream_of

_WIDTH = 100


@dataclass(frozen=True)
class EmittedStep:
    """The source of a step, and the names of its region functions by region key."""

    source: str
    functions: dict[str, str]


def emit(
    step: StepGraph,
    instructions: Sequence[Instruction],
    live: Liveness,
    header: str,
    host_functions: Iterable[str],
    kernels: frozenset[str] = frozenset(),
) -> EmittedStep:
    """Write the file.

    Args:
        step: the graph after all passes.
        instructions: its regions and events in order (``zerofx.codegen.regions.cut``).
        live: live bytes by node.
        header: text for the head of the file: what was planned.
        host_functions: sources of the functions that compute hyperparameters on the host.
        kernels: those of zerofx's own that the step uses: the file says which operators are launches of them.
    """
    functions, definitions = _name_regions(instructions)
    state = [n for n in step.placeholders() if placeholder(n).role is not Role.INPUT]
    inputs = list(step.placeholders(Role.INPUT))
    body = _step_body(step, instructions, live, functions, state, inputs)
    parts = [_comment(header), "import torch", "", "aten = torch.ops.aten", ""]
    for text in dict.fromkeys(host_functions):
        parts += ["", text.rstrip(), ""]
    for region_key, region in definitions.items():
        parts += ["", region_source(functions[region_key], region, kernels), ""]
    parts += ["", *body, ""]
    return EmittedStep("\n".join(parts), functions)


def _comment(text: str) -> str:
    return "\n".join(f"# {line}".rstrip() for line in text.splitlines())


def _name_regions(instructions: Sequence[Instruction]) -> tuple[dict[str, str], dict[str, Region]]:
    """A readable name for each distinct region, made from its layer and phase, and the first region of each."""
    names: dict[str, str] = {}
    first: dict[str, Region] = {}
    taken: set[str] = set()
    for region in instructions:
        if not isinstance(region, Region) or region.key in names:
            continue
        words = [word for word in re.split(r"\W+", region.unit or region.origin.layer) if word and not word.isdigit()]
        stem = "_".join([*words[:2], str(region.origin.phase)]) or "region"
        number, name = 1, stem
        while name in taken:
            number, name = number + 1, f"{stem}_{number + 1}"
        taken.add(name)
        names[region.key], first[region.key] = name, region
    return names, first


@dataclass(frozen=True)
class _Statement:
    """One line of a region: what it assigns (``_`` for an output that nothing reads), and the node it calls."""

    node: fx.Node
    targets: tuple[fx.Node | None, ...]
    unpacks: bool


def region_source(name: str, region: Region, kernels: frozenset[str] = frozenset()) -> str:
    """The function that does what ``region`` does, with launches of ``kernels`` where there are some."""
    launches = launches_of(kernels)
    statements = _statements(region)
    local = {node: f"x{i}" for i, node in enumerate(region.inputs)}
    lines = [f"def {name}(inputs):"]
    if region.inputs:
        lines += _wrapped(f"    {_tuple(local.values())} = inputs")
    lines.append("    inputs.clear()")
    dying = _dying(region, statements)
    counts: dict[str, int] = {}
    for index, statement in enumerate(statements):
        call = _call(statement.node, local, launches)
        for target in statement.targets:
            if target is not None:
                local[target] = _fresh(target, counts)
        left = ", ".join(local[t] if t is not None else "_" for t in statement.targets)
        if statement.unpacks and len(statement.targets) == 1:
            left += ","
        dead = [local[n] for n in dying.get(index, ())] + (["_"] if None in statement.targets else [])
        text = (f"{left} = " if left else "") + call + (f"; del {', '.join(dead)}" if dead else "")
        lines.append(f"    {text}  # {_type(value(statement.node))}" if left else f"    {text}")
    lines += _wrapped(f"    return {_tuple(local[node] for node in region.outputs)}")
    return "\n".join(lines)


def _statements(region: Region) -> list[_Statement]:
    """The region's lines; an operator with several outputs and the getitems that name them are one."""
    members = set(region.nodes)
    read = {source for node in region.nodes for source in node.all_input_nodes} | set(region.outputs)
    found = []
    for node in region.nodes:
        fake = value(node)
        if node.target is operator.getitem and not is_free_view(node):
            continue
        if isinstance(fake, list | tuple) and not is_free_view(node):
            names: list[fx.Node | None] = [None] * len(fake)
            for user in node.users:
                if user in members and isinstance(user.args[1], int):
                    names[user.args[1]] = user
            found.append(_Statement(node, tuple(names), unpacks=True))
        else:
            found.append(_Statement(node, (node,) if node in read else (), unpacks=False))
    return found


def _dying(region: Region, statements: Sequence[_Statement]) -> dict[int, list[fx.Node]]:
    """The values to delete behind each statement: those it reads last, and those it makes that nothing reads."""
    last: dict[fx.Node, int] = {}
    for index, statement in enumerate(statements):
        last.update(dict.fromkeys((t for t in statement.targets if t is not None), index))
        last.update(dict.fromkeys(statement.node.all_input_nodes, index))
    dying: dict[int, list[fx.Node]] = {}
    for node, index in last.items():
        if node not in region.outputs:
            dying.setdefault(index, []).append(node)
    return dying


def _step_body(
    step: StepGraph,
    instructions: Sequence[Instruction],
    live: Liveness,
    functions: Mapping[str, str],
    state: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
) -> list[str]:
    names = {node: node.name for node in step.graph.nodes}
    lines = ["def step(runtime, state, batch):"]
    for owners, container in ((state, "state"), (inputs, "batch")):
        lines += [
            f"    {node.name} = {container}[{node.name!r}]  # {_type(value(node))} {placeholder(node).role}"
            for node in owners
            if node.users
        ]
    last = _last_instruction(step, instructions)
    place = ""
    for index, instruction in enumerate(instructions):
        node = instruction.node if isinstance(instruction, Event) else instruction.nodes[-1]
        here = (
            f"{origin(node).phase} {step.cut_piece_of(node) or step.unit_of(node) or origin(node).layer or '(model)'}"
        )
        if here != place:
            place = here
            lines += ["", f"    # {here}"]
        dead = [names[n] for n in last.get(index, ())]
        note = f"# live {_live(live, node)} | {stream_of(node)}"
        if isinstance(instruction, Event):
            text = _event(node, names, dead)
        else:
            left = f"{_tuple(names[n] for n in instruction.outputs)} = " if instruction.outputs else ""
            # The list is made first so that a name can go before the call that reads its value last.
            given = f"x = [{', '.join(names[n] for n in instruction.inputs)}]"
            text = given + (f"; del {', '.join(dead)}" if dead else "")
            lines += _wrapped(f"    {text}")
            function = functions[instruction.key]
            text = left + _region_call(function, node)
        lines += _wrapped(f"    {text}  {note}")
    lines += ["", f"    return {', '.join(names[node] for node in step.output.all_input_nodes)}"]
    return lines


def _region_call(function: str, node: fx.Node) -> str:
    """The call of a region that ends in ``node``."""
    if not runs_on_host(node):
        return f"{function}(x)"
    bucket = delayed_bucket(node)
    return f"runtime.host({function}, x)" if bucket is None else f"runtime.host_later({function}, x, {bucket})"


def _live(live: Liveness, node: fx.Node) -> str:
    """Bytes behind a node: on the device, and on each slower tier that the step uses."""
    return format_bytes(live.after[node]) + on_tiers({tier: use.after[node] for tier, use in live.slower.items()})


def _last_instruction(step: StepGraph, instructions: Sequence[Instruction]) -> dict[int, list[fx.Node]]:
    """The named values whose last reader is each instruction; placeholders are the caller's and are kept."""
    last: dict[fx.Node, int] = {}
    for index, instruction in enumerate(instructions):
        if isinstance(instruction, Event):
            made, read = [instruction.node], instruction.node.all_input_nodes
            if value(instruction.node) is None:
                made = []
        else:
            made, read = list(instruction.outputs), list(instruction.inputs)
        last.update(dict.fromkeys((n for n in (*made, *read) if n.op != "placeholder"), index))
    for node in step.output.all_input_nodes:
        last.pop(node, None)
    found: dict[int, list[fx.Node]] = {}
    for node, index in last.items():
        found.setdefault(index, []).append(node)
    return found


def _event(node: fx.Node, names: Mapping[fx.Node, str], dead: Sequence[str]) -> str:
    args = [_literal(arg, names) for arg in node.args]
    left = "" if value(node) is None else f"{names[node]} = "
    if node.target is ops.release:
        return f"del {', '.join(dead)}  # release"
    if node.target is ops.hyperparameters:
        args = args[:1]
    if node.target is ops.empty_gradients:
        args = args[:1]
    if node.kwargs.get("in_place"):
        args.append("in_place=True")
    op = node.target.__name__.partition(".")[0] if callable(node.target) else str(node.target)
    text = f"{left}runtime.{op}({', '.join(args)})"
    return text + (f"; del {', '.join(dead)}" if dead else "")


def _call(node: fx.Node, local: Mapping[fx.Node, str], launches: Mapping[Any, Any]) -> str:
    args = [_literal(arg, local) for arg in node.args]
    if node.target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    args += [f"{key}={_literal(arg, local)}" for key, arg in node.kwargs.items()]
    if isinstance(node.target, torch._ops.OpOverload):
        name = str(launches.get(node.target, node.target))
        name = name if name.startswith("aten.") else f"torch.ops.{name}"
    else:
        name = f"torch.{node.target.__name__}" if callable(node.target) else str(node.target)
    return f"{name}({', '.join(args)})"


def _literal(arg: Any, local: Mapping[fx.Node, str]) -> str:
    """Source text that evaluates to ``arg``."""
    match arg:
        case fx.Node():
            return local[arg]
        case list() | tuple():
            items = ", ".join(_literal(item, local) for item in arg)
            if isinstance(arg, list):
                return f"[{items}]"
            return f"({items},)" if len(arg) == 1 else f"({items})"
        case float() if math.isinf(arg) or math.isnan(arg):
            return f'float("{arg}")'
        case torch.device():
            return f'torch.device("{arg.type}")'
        case _:
            return repr(arg)


def _fresh(node: fx.Node, counts: dict[str, int]) -> str:
    """A local name made from the operator, the same for the same place in equal regions."""
    stem = re.sub(r"\W", "_", getattr(node.target, "__name__", "value").partition(".")[0]).strip("_")
    stem = "out" if node.target is operator.getitem else stem
    counts[stem] = counts.get(stem, 0) + 1
    return f"{stem}_{counts[stem]}"


def _tuple(names: Iterable[str]) -> str:
    listed = list(names)
    return f"({', '.join(listed)}{',' if len(listed) == 1 else ''})"


def _type(fake: Any) -> str:
    if isinstance(fake, torch.Tensor):
        return f"{str(fake.dtype).removeprefix('torch.')}{list(fake.shape)}"
    if isinstance(fake, list | tuple):
        return ", ".join(_type(item) for item in fake)
    return type(fake).__name__


def _wrapped(line: str) -> list[str]:
    """A long line broken behind commas inside its brackets, so that it stays readable and stays one statement."""
    if len(line) <= _WIDTH or ("(" not in line and "[" not in line):
        return [line]
    indent = len(line) - len(line.lstrip())
    words, lines, depth = line.strip().split(" "), [], 0
    current = " " * indent
    for word in words:
        comment = word.startswith("#")
        if depth > 0 and not comment and len(current) + len(word) > _WIDTH:
            lines.append(current.rstrip())
            current = " " * (indent + 4)
        current += word + " "
        depth += sum(word.count(c) for c in "([") - sum(word.count(c) for c in ")]")
    return [*lines, current.rstrip()]
