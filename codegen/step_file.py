"""An emitted file: what stands in it, and its Python text.

A line of code is broken where it is longer than a person reads, between words that are outside of texts. Its comment is
put after that, and never broken: whatever it says, it ends where its line does.
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerofx.errors import PlanError
from zerofx.ir.serialise import Name

ITEM = "getitem"  # the function of a call that takes one value out of several
RUNTIME = "runtime."  # begins the function of a call on the runtime
_WIDTH = 100  # columns of a line of code, beyond which it is broken
_TEXT = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""  # as repr writes one
_WORD = re.compile(rf"""(?:{_TEXT}|[^ '"])+""")
# What the emitted functions call or are given: no value of the step may be called so.
RESERVED = frozenset(
    {"aten", "batch", "float", "inputs", "range", "runtime", "state", "step", "torch", "turn", "x", "_"}
)
_TURN = "turn"  # the number of a loop's round


@dataclass(frozen=True)
class CallLine:
    """One line: ``targets = function(*args, **keywords); del dead  # note``.

    ``function`` is an operator (``aten.mm.default``), ``runtime.<event>``, or ``ITEM``; empty where names are deleted
    and nothing is called. ``_`` is the target for an output that nothing reads. ``unpacks``: whether what is returned
    is a tuple even where there is one target.
    """

    function: str
    args: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()
    targets: tuple[str, ...] = ()
    unpacks: bool = False
    dead: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class RegionCall:
    """A call of one of the file's regions: ``x = [inputs]; del dead`` and ``outputs = region(x)  # note``.

    ``host_bucket``: the bucket whose update it is, where the host runs it; None for what runs on the device.
    """

    region: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dead: tuple[str, ...]
    host_bucket: int | None
    note: str


@dataclass(frozen=True)
class Repeated:
    """The lines of a loop: ``for turn in range(num_rounds):``, over the micro-batches between the first and the last.

    ``batch``: what each round takes from the step's arguments, as in ``StepFile``, from under the key with the round's
    number. ``reads`` and ``takes``: values that each round finds in lists that another loop has made, by the list's
    name; those of ``takes`` leave it. ``lists``: what each round appends to a list of its own, by the list's name.
    ``carried``: each round ends with ``before = after; del after``, which the next one begins with, in this order: what
    an earlier round has made moves up by one. ``dead``: what no
    line of the round has deleted.
    """

    num_rounds: int
    batch: tuple[tuple[str, str, str], ...]
    reads: tuple[tuple[str, str], ...]
    takes: tuple[tuple[str, str], ...]
    body: tuple[CallLine | RegionCall | str, ...]
    lists: tuple[tuple[str, str], ...]
    carried: tuple[tuple[str, str], ...]
    dead: tuple[str, ...] = ()


Line = CallLine | RegionCall | Repeated | str


@dataclass(frozen=True)
class RegionText:
    """The function of a region, which takes its inputs, ``x0``, ``x1`` ..., in a list that it empties."""

    name: str
    num_inputs: int
    calls: tuple[CallLine, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class StepFile:
    """All of an emitted file.

    ``regions`` by their keys. ``state`` and ``batch``: what the step takes from its arguments, each with its name, its
    key there, and a comment. ``body``: calls, between them titles, and the loop if there is one.
    """

    header: str
    regions: Mapping[str, RegionText]
    state: tuple[tuple[str, str, str], ...]
    batch: tuple[tuple[str, str, str], ...]
    body: tuple[Line, ...]
    outputs: tuple[str, ...]

    @property
    def functions(self) -> dict[str, str]:
        """The names of region functions by region key."""
        return {key: region.name for key, region in self.regions.items()}

    @property
    def text(self) -> str:
        """The file."""
        head = "\n".join(f"# {_line(line)}".rstrip() for line in self.header.splitlines())
        parts = [head, "import torch", "", "aten = torch.ops.aten", ""]
        for region in self.regions.values():
            parts += ["", region_text(region), ""]
        return "\n".join([*parts, "", *self._step(), ""])

    def _step(self) -> Iterator[str]:
        yield "def step(runtime, state, batch):"
        for names, container in ((self.state, "state"), (self.batch, "batch")):
            for name, key, comment in names:
                yield f"    {name} = {container}[{key!r}]  # {_line(comment)}"
        yield from _lines(self.body, "    ")
        yield ""
        yield f"    return {', '.join(self.outputs)}"


def region_text(region: RegionText) -> str:
    """The source of a region's function."""
    lines = [f"def {region.name}(inputs):"]
    if region.num_inputs:
        lines += wrap_line(f"    {_tuple([f'x{i}' for i in range(region.num_inputs)])} = inputs")
    lines.append("    inputs.clear()")
    lines += [f"    {_call_text(call)}{_comment(call.note)}" for call in region.calls]
    lines += wrap_line(f"    return {_tuple(region.outputs)}")
    return "\n".join(lines)


def _call_text(call: CallLine) -> str:
    args = list(map(literal, call.args))
    if call.function == ITEM:
        text = f"{args[0]}[{args[1]}]"
    elif call.function:
        args += [f"{key}={literal(argument)}" for key, argument in call.keywords]
        owned = call.function.startswith(("aten.", RUNTIME))
        text = f"{'' if owned else 'torch.ops.'}{call.function}({', '.join(args)})"
    else:
        text = ""
    left = ", ".join(call.targets) + ("," if call.unpacks and len(call.targets) == 1 else "")
    statements = [f"{left} = {text}" if left else text] if text else []
    if call.dead:
        statements.append(f"del {', '.join(call.dead)}")
    return "; ".join(statements)


def _lines(body: Iterable[Line], indent: str) -> Iterator[str]:
    for call in body:
        match call:
            case str():
                yield ""
                yield f"{indent}# {_line(call)}"
            case CallLine():
                yield from wrap_line(f"{indent}{_call_text(call)}", call.note)
            case RegionCall():
                yield from _region_call(call, indent)
            case Repeated():
                yield from _loop(call, indent)


def _loop(loop: Repeated, indent: str) -> Iterator[str]:
    yield from (f"{indent}{name} = []" for name, _ in loop.lists)
    yield f"{indent}for {_TURN} in range({loop.num_rounds}):"
    inside = indent + "    "
    for name, key, comment in loop.batch:
        # The key's own braces are no part of what is formatted.
        text = repr(key).replace("{", "{{").replace("}", "}}")
        yield f"{inside}{name} = batch[f{text[:-1]}[{{{_TURN}}}]{text[-1]}]  # {_line(comment)}"
    yield from (f"{inside}{name} = {listed}[{_TURN}]" for listed, name in loop.reads)
    yield from (f"{inside}{name} = {listed}.pop(0)" for listed, name in loop.takes)
    yield from _lines(loop.body, inside)
    if loop.lists or loop.carried or loop.dead:
        yield ""
        yield f"{inside}# the next micro-batch"
    yield from (f"{inside}{name}.append({value})" for name, value in loop.lists)
    yield from (f"{inside}{before} = {after}" for before, after in loop.carried)
    given = {before for before, _ in loop.carried}
    dead = dict.fromkeys([*(after for _, after in loop.carried if after not in given), *loop.dead])
    if dead:
        yield from wrap_line(f"{inside}del {', '.join(dead)}")


def _region_call(call: RegionCall, indent: str) -> Iterator[str]:
    # The list is made first so that a name can go before the call that reads its value last.
    inputs = f"x = [{', '.join(call.inputs)}]" + (f"; del {', '.join(call.dead)}" if call.dead else "")
    yield from wrap_line(f"{indent}{inputs}")
    left = f"{_tuple(call.outputs)} = " if call.outputs else ""
    text = f"{call.region}(x)" if call.host_bucket is None else f"runtime.host({call.region}, x, {call.host_bucket})"
    yield from wrap_line(f"{indent}{left}{text}", call.note)


def literal(argument: Any) -> str:
    """Source text that evaluates to ``argument``."""
    match argument:
        case Name():
            return argument.text
        case list() | tuple():
            items = ", ".join(map(literal, argument))
            if isinstance(argument, list):
                return f"[{items}]"
            return f"({items},)" if len(argument) == 1 else f"({items})"
        case float() if math.isinf(argument) or math.isnan(argument):
            return f'float("{argument}")'
        case torch.device():
            return f'torch.device("{argument.type}")'
        case _:
            return repr(argument)


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _line(comment: str) -> str:
    """A comment that ends where its line does, whatever a layer is called."""
    return comment if comment.isprintable() else ascii(comment)


def _comment(note: str) -> str:
    return f"  # {_line(note)}" if note else ""


def wrap_line(code: str, note: str = "") -> list[str]:
    """A line of code with its comment; where it is long, broken at blanks inside its brackets, but not inside texts."""
    if len(code) <= _WIDTH:
        return [code + _comment(note)]
    indent = len(code) - len(code.lstrip())
    lines, depth, current = [], 0, " " * indent
    for word in _WORD.findall(code):
        if depth > 0 and len(current) + len(word) > _WIDTH:
            lines.append(current.rstrip())
            current = " " * (indent + 4)
        current += word + " "
        brackets = re.sub(_TEXT, "", word)
        depth += sum(map(brackets.count, "([")) - sum(map(brackets.count, ")]"))
    return [*lines, current.rstrip() + _comment(note)]


def load_source(source: str, filename: str) -> dict[str, Any]:
    """Execute an emitted file; tracebacks and debuggers show its lines under ``filename``.

    Raises:
        PlanError: the text does not run, or has no function ``step``.
    """
    namespace: dict[str, Any] = {"__name__": "zerofx_generated", "__file__": filename}
    try:
        exec(compile(source, filename, "exec"), namespace)
    except Exception as error:
        raise PlanError(f"expected an emitted step that Python can load, found {error!r} in {filename}") from error
    if not callable(namespace.get("step")):
        raise PlanError(f"expected a function step(runtime, state, batch) in {filename}, found none")
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    return namespace
