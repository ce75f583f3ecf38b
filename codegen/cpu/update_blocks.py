"""A bucket's update on the host in one pass over its memory: the region's own ATen operators, on a block at a time.

    whole                                                by blocks of B elements
    cast = _to_copy(grad, float32)       6 n bytes       cast = B elements of float32, kept from update to update
    _fused_adamw_(master, cast, ...)    28 n             for each block, whose operators run one after the other:
    copy_(low, master)                   6 n                 copy_(cast, grad[block])
                                                             _fused_adamw_(master[block], cast, ...)
                                                             copy_(low[block], master[block])

What lies between the operators of a block stays in the caches, so that memory gives and takes what the update reads and
writes alone: 28 bytes for each parameter of an AdamW in bfloat16 with float32 masters, where whole tensors move 40. No
value of the bucket's size is made, whose pages the system would have to make each time.

Bits are those of the whole region: operators are elementwise, blocks are a multiple of every vector's length, and only
the last has the end that the whole has. A block has as many elements for each of torch's threads, which share each
operator's elements in the same way: what a thread writes is in its own cache when it reads it.

Does not handle: regions that do anything else than elementwise arithmetic in place on tensors of one length; they run
as they are.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zerofx.codegen.region_facts import RegionFunction, trace_region
from zerofx.ir.aliasing import mutated_inputs
from zerofx.optimizers.blocks import blocks
from zerofx.optimizers.elementwise import elementwise_obstacle, is_creation
from zerofx.torch_private.operators import OpOverload, base_name, is_out, schema_of


class NoBlocksError(Exception):
    """An update cannot run block by block; the message is the reason."""


@dataclass(frozen=True)
class _Call:
    """An operator of the region: with values by the number of the node that makes them, which this is the ``result``.

    ``out``: the overload that writes to a tensor what ``target`` makes, None where it makes nothing, or there is none.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int
    out: Callable[..., Any] | None

    def run(self, values: list[Any], into: torch.Tensor | None) -> Any:
        """Its result; ``into``: a tensor like it, to write to."""
        args = [_substitute(arg, values) for arg in self.args]
        if into is not None and self.out is not None:
            if self.out is torch.ops.aten.copy_.default:
                return self.out(into, args[0])
            return self.out(*args, **{key: _substitute(arg, values) for key, arg in self.kwargs.items()}, out=into)
        return self.target(*args, **{key: _substitute(arg, values) for key, arg in self.kwargs.items()})


@dataclass(frozen=True)
class _Value:
    """An argument: the value with this number."""

    number: int


def _substitute(arg: Any, values: list[Any]) -> Any:
    if type(arg) is _Value:
        return values[arg.number]
    if type(arg) is list:
        return [_substitute(item, values) for item in arg]
    return arg


class _Scratch(threading.local):
    """Results of a block's calls, by number: the next block's are written over them.

    Each thread has its own: buckets on the device and buckets on the host share a region where both are one machine's
    memory, and are updated at the same time.
    """

    def __init__(self) -> None:
        self.of_call: dict[int, torch.Tensor] = {}


@dataclass(frozen=True)
class BlockUpdate:
    """Called like the region that it was made from, with inputs that it empties.

    ``once`` are calls on numbers and 0-dim tensors, such as a count of steps, which run before the first block;
    ``each`` run for every block. ``flat`` are the numbers of the inputs that have ``numel`` elements.
    """

    whole: RegionFunction
    once: tuple[_Call, ...]
    each: tuple[_Call, ...]
    flat: tuple[int, ...]
    num_values: int
    numel: int
    scratch: _Scratch = field(default_factory=_Scratch, compare=False)

    def __call__(self, inputs: list[Any]) -> Any:
        if not all(inputs[number].is_cpu for number in self.flat):
            return self.whole(inputs)  # an equal region, which runs on a device
        values = [*inputs, *[None] * (self.num_values - len(inputs))]
        inputs.clear()
        for call in self.once:
            values[call.result] = call.run(values, None)
        whole = [(number, values[number]) for number in self.flat]
        scratch = self.scratch.of_call
        for begin, end in blocks(self.numel, torch.get_num_threads()):
            for number, tensor in whole:
                values[number] = tensor[begin:end]
            for call in self.each:
                into = scratch.get(call.result) if call.out is not None else None
                if into is not None and len(into) < end - begin:
                    into = None
                value = call.run(values, None if into is None else into[: end - begin])
                if call.out is not None and into is None:
                    scratch[call.result] = value
                values[call.result] = value
        return ()


def make_block_update(function: RegionFunction, inputs: Sequence[Any]) -> BlockUpdate:
    """Make a function that runs ``function``, an update region of an emitted step, block by block.

    Args:
        function: takes its inputs in a list.
        inputs: tensors, fake ones will do, and tuples of numbers, like those that it will be called with.

    Raises:
        NoBlocksError: the region does something else than elementwise arithmetic in place; says what.
    """
    graph, result = trace_region(function, len(inputs))
    if result != ():
        raise NoBlocksError("a value that it makes is read later")
    flat, numel = _flat_inputs(inputs)
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    # Nodes of the bucket's length, and what each in place has the memory of.
    is_flat = {node: numbers[node] in flat for node in graph.find_nodes(op="placeholder")}
    owner: dict[fx.Node, fx.Node] = {}
    once, each, read = [], [], set[fx.Node]()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        written = [owner.get(source, source) for source in mutated_inputs(node)]
        if written:
            owner[node] = written[0]
        is_flat[node] = any(is_flat[source] for source in node.all_input_nodes)
        if not is_flat[node]:
            if not node.all_input_nodes:
                raise NoBlocksError(f"{node.name} makes a tensor of its own")
            if not read.isdisjoint(written):
                raise NoBlocksError(f"{node.name} changes what the update has read")
            once.append(_call(node, numbers, None))
            continue
        reason = _obstacle(node)
        if reason is not None:
            raise NoBlocksError(f"{node.name} {reason}")
        if not all(is_flat[source] for source in written) and not _reads_steps(node):
            raise NoBlocksError(f"{node.name} writes for all elements at once")
        read.update(owner.get(source, source) for source in node.all_input_nodes)
        each.append(_call(node, numbers, None if written else _out_overload(node)))
    if not each:
        raise NoBlocksError("it changes nothing of the bucket's size")
    return BlockUpdate(function, tuple(once), tuple(each), tuple(sorted(flat)), len(numbers), numel)


def _flat_inputs(inputs: Sequence[Any]) -> tuple[set[int], int]:
    """The numbers of the inputs that have the bucket's length, and that length."""
    flat, sizes = set(), set[int]()
    for number, example in enumerate(inputs):
        if not isinstance(example, torch.Tensor) or example.dim() == 0:
            continue
        if example.dim() > 1 or example.stride(0) != 1:
            raise NoBlocksError("a tensor is not flat")
        flat.add(number)
        sizes.add(example.numel())
    if len(sizes) != 1 or 0 in sizes:
        raise NoBlocksError(f"tensors have {sorted(sizes)} elements, where one number of them was expected")
    return flat, sizes.pop()


def _obstacle(node: fx.Node) -> str | None:
    if node.target is operator.getitem:
        return "is an element of a tensor"
    assert isinstance(node.target, OpOverload), node
    if is_creation(node.target) and base_name(node.target).endswith("_like"):
        return None
    return elementwise_obstacle(node.target, fused=True)


def _reads_steps(node: fx.Node) -> bool:
    """True for a fused kernel that leaves the count of steps alone, whatever its schema says: it is given no
    ``found_inf``."""
    assert isinstance(node.target, OpOverload), node
    names = {argument.name for argument in schema_of(node.target).arguments}
    return "found_inf" in names and node.kwargs.get("found_inf") is None


def _call(node: fx.Node, numbers: dict[fx.Node, int], out: Callable[..., Any] | None) -> _Call:
    def value_of(source: fx.Node) -> Any:
        return _Value(numbers[source])

    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    assert callable(node.target)
    return _Call(node.target, tuple(map(_plain, args)), {k: _plain(v) for k, v in kwargs.items()}, numbers[node], out)


def _plain(arg: Any) -> Any:
    """Lists of a graph's arguments as lists, which operators take as such."""
    return [_plain(item) for item in arg] if isinstance(arg, list | tuple) else arg


def _out_overload(node: fx.Node) -> Callable[..., Any] | None:
    """The overload that writes to ``out`` what ``node`` makes; None where there is none."""
    target = node.target
    assert isinstance(target, OpOverload), node
    schema = schema_of(target)
    if base_name(target) == "_to_copy":
        return torch.ops.aten.copy_.default
    if len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor":
        return None
    wanted = [(a.name, str(a.type)) for a in schema.arguments]
    packet = target.overloadpacket
    for name in packet.overloads():
        overload: OpOverload[..., Any] = getattr(packet, name)
        arguments = schema_of(overload).arguments
        if is_out(overload) and [(a.name, str(a.type)) for a in arguments if not a.is_out] == wanted:
            return overload if [a.name for a in arguments if a.is_out] == ["out"] else None
    return None
