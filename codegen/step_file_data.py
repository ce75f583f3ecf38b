"""An emitted file as data, written to and read from JSON.

A file that is kept for the next run is kept as this data, never as text. What is read can say no more than what is
written here: call operators of torch and of zerofx, methods of the runtime and the file's own regions, on values that
the function has and on plain ones. Each name, operator, value and note is checked where it is read; titles, which say
what layers are called, may be any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from typing import Any

import torch

from zerofx.codegen.step_file import ITEM, RESERVED, RUNTIME, CallLine, Line, RegionCall, RegionText, Repeated, StepFile
from zerofx.ir import ops
from zerofx.ir.serialise import NAMESPACES, Name, decode, encode, find_operator

# The methods of the runtime that a file may call.
EVENTS = frozenset(RUNTIME + str(getattr(event, "__name__")).partition(".")[0] for event in ops.EVENTS)  # noqa: B009
_NOTHING = "_"  # what no line reads
_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.layout, torch.memory_format, torch.device)
# Types of values, with the role of what is taken; bytes live, and the stream.
_NOTE = re.compile(r"[\w\[\](), ]*|(release  # |[\w., ]+ \| )?live [\w., -]+ \| [\w, ]+", re.ASCII)


def to_data(file: StepFile) -> list[Any]:
    """A file as JSON has it.

    Raises:
        NotStorableError: an argument has no text.
    """
    regions = [
        [key, region.name, region.num_inputs, list(map(_call_data, region.calls)), region.outputs]
        for key, region in file.regions.items()
    ]
    return [file.header, regions, file.state, file.batch, list(map(_line_data, file.body)), file.outputs]


def step_file_of(data: list[Any]) -> StepFile:
    """The file that ``to_data`` has written.

    Raises:
        ValueError: there is a name that is none, or an operator that no step calls.
    """
    header, regions, state, batch, body, outputs = data
    read = {
        _key(key): RegionText(_name(name), int(count), tuple(map(_call_of, calls)), _names(outputs))
        for key, name, count, calls, outputs in regions
    }
    functions = frozenset(region.name for region in read.values())
    if len(functions) != len(read):
        raise ValueError("regions of one name")
    for region in read.values():
        if any(call.function in EVENTS for call in region.calls):
            raise ValueError(f"expected a region that calls operators, found {region}")
        _check_names(region.calls, {f"x{i}" for i in range(region.num_inputs)}, region.outputs)
    file = StepFile(
        _text(header), read, _parameters(state), _parameters(batch),
        tuple(_line_of(line, functions) for line in body), _names(outputs),
    )  # fmt: skip
    _check_names(file.body, {name for name, _, _ in (*file.state, *file.batch)}, file.outputs)
    return file


def _check_names(lines: Iterable[Line], given: set[str], outputs: Iterable[str]) -> None:
    """Check that a function reads its own values alone, and no name from outside, such as a builtin's.

    In which order does not matter: what is assigned anywhere in a function is its own from its first line.
    """
    own, read = {*given}, {*outputs}
    for line in _flatten_lines(lines):
        match line:
            case CallLine():
                own.update(line.targets)
                read.update(line.dead, _names_in((*line.args, *(value for _, value in line.keywords))))
            case RegionCall():
                own.update(line.outputs)
                read.update(line.dead, line.inputs)
            case Repeated():
                own.update(name for name, *_ in (*line.batch, *line.lists, *line.carried))
                own.update(name for _, name in (*line.reads, *line.takes))
                read.update(line.dead, (listed for listed, _ in (*line.reads, *line.takes)))
                read.update(value for _, value in (*line.lists, *line.carried))
    if not read <= own:
        raise ValueError(f"expected a function that reads its own values, found {sorted(read - own)}")


def _flatten_lines(lines: Iterable[Line]) -> Iterator[Line]:
    for line in lines:
        yield line
        if isinstance(line, Repeated):
            yield from line.body


def _names_in(arguments: Iterable[Any]) -> Iterator[str]:
    """The names in arguments, which have nothing besides plain values, and lists and tuples of them."""
    for argument in arguments:
        if isinstance(argument, Name):
            yield argument.text
        elif isinstance(argument, list | tuple):
            yield from _names_in(argument)
        elif not isinstance(argument, _VALUES):
            raise ValueError(f"expected a plain value, found {argument!r}")


def _call_data(call: CallLine) -> list[Any]:
    args = [encode(argument) for argument in call.args]
    keywords = [[key, encode(argument)] for key, argument in call.keywords]
    return [call.function, args, keywords, call.targets, call.unpacks, call.dead, call.note]


def _line_data(line: Line) -> list[Any] | str:
    match line:
        case CallLine():
            return ["call", *_call_data(line)]
        case RegionCall():
            return ["region", *astuple(line)]
        case Repeated():
            body = list(map(_line_data, line.body))
            pairs = [line.reads, line.takes, line.lists, line.carried]
            return ["loop", line.num_rounds, line.batch, body, *pairs, line.dead]
    return line


def _line_of(data: list[Any] | str, functions: frozenset[str]) -> Line:
    if isinstance(data, str):
        return data  # a title
    kind, *rest = data
    if kind == "call":
        return _call_of(rest)
    if kind == "loop":
        num_rounds, batch, body, reads, takes, lists, carried, dead = rest
        return Repeated(
            int(num_rounds), _parameters(batch), _pairs(reads), _pairs(takes),
            tuple(_line_of_round(line, functions) for line in body), _pairs(lists), _pairs(carried), _names(dead),
        )  # fmt: skip
    region, inputs, outputs, dead, bucket, note = rest
    if region not in functions or type(bucket) not in (int, type(None)):
        raise ValueError(f"expected a call of a region, found {data!r}")
    return RegionCall(region, _names(inputs), _names(outputs), _names(dead), bucket, _note(note))


def _line_of_round(data: list[Any] | str, functions: frozenset[str]) -> CallLine | RegionCall | str:
    line = _line_of(data, functions)
    if isinstance(line, Repeated):
        raise ValueError("expected one loop, found one inside another")
    return line


def _call_of(data: list[Any]) -> CallLine:
    function, args, keywords, targets, unpacks, dead, note = data
    if (function == ITEM and len(args) != 2) or (not function and (args or keywords or targets)):
        raise ValueError(f"expected a call, found {data!r}")
    if function and function != ITEM and function not in EVENTS:
        find_operator(function, NAMESPACES)
    arguments = tuple((Name(key).text, decode(argument)) for key, argument in keywords)
    return CallLine(
        function, tuple(map(decode, args)), arguments, _names(targets), bool(unpacks), _names(dead), _note(note)
    )


def _parameters(data: list[list[str]]) -> tuple[tuple[str, str, str], ...]:
    return tuple((_name(name), _text(key), _note(comment)) for name, key, comment in data)


def _pairs(data: Iterable[Any]) -> tuple[tuple[str, str], ...]:
    return tuple((_name(first), _name(second)) for first, second in data)


def _names(data: Iterable[Any]) -> tuple[str, ...]:
    return tuple(map(_name, data))


def _name(data: Any) -> str:
    text = Name(data).text
    if text in RESERVED and text != _NOTHING:
        raise ValueError(f"expected a name of the step's own, found {text!r}")
    return text


def _note(data: Any) -> str:
    text = _text(data)
    if not _NOTE.fullmatch(text):
        raise ValueError(f"expected a note that is written to a step, found {text!r}")
    return text


def _text(data: Any) -> str:
    if not isinstance(data, str):
        raise ValueError(f"expected a text, found {data!r}")
    return data


def _key(text: Any) -> str:
    if not isinstance(text, str) or not re.fullmatch(r"[0-9a-f]+", text):
        raise ValueError(f"expected the key of a region, found {text!r}")
    return text
