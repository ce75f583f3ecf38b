"""An optimizer's update of one bucket as one Triton kernel, made from the operators of its region.

    grad_0.div_(num_ranks)           one launch, in which each element of the gradient, the master, the states and the
    cast = grad_0.to(float32)        parameter in its compute dtype is read and written at most once, and what lies
    fused_adamw(master, cast, ...)   between them is in registers: 28 bytes for each parameter of an AdamW in bfloat16
    shard_0.copy_(master)            with float32 masters, where the four ATen kernels move 44 and hold a copy

The region's function is traced from its source, as Inductor's are, so that an edited step runs as it reads. What a
region does besides elementwise arithmetic on tensors of one length has no kernel, and a reason.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from zerofx.codegen.kernels.current_device import device_guard
from zerofx.codegen.kernels.update_operators import write_operator
from zerofx.codegen.kernels.update_writer import COMPUTED, HOST_FUNCTIONS, Buffer, HostScalar, NoKernelError, Writer
from zerofx.codegen.region_facts import trace_region

BLOCK = 512  # elements of a program: 4 of a thread, so that float32 is moved 16 bytes at a time
# Products are rounded with the sums they go into, as Triton 3.9 does by default and 3.10 does not.
LAUNCH = MappingProxyType({"num_warps": 4, "enable_fp_fusion": True})


@dataclass(frozen=True)
class UpdateKernel:
    """A kernel and how to launch it; called like the region that it was made from, with inputs that it empties.

    ``source`` is the kernel's text. ``pointers`` are the numbers of the inputs that are its first arguments, then come
    the number of elements and ``scalars``. ``written`` are the numbers of the inputs that it stores to. ``singles`` are
    operators on 0-dim tensors, such as a count of steps, which run on ATen before it.
    """

    source: str
    pointers: tuple[int, ...]
    written: tuple[int, ...]
    scalars: tuple[HostScalar, ...]
    singles: tuple[fx.Node, ...]
    numel: int

    def __call__(self, inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        given = list(inputs)
        inputs.clear()
        for node in self.singles:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: given[source.meta["number"]])
            assert callable(node.target)
            node.target(*args, **kwargs)
        tensors = [given[number] for number in self.pointers]
        values = [HOST_FUNCTIONS[scalar.function](float(given[scalar.source][scalar.index])) for scalar in self.scalars]
        with device_guard(tensors[0].device):
            grid = (-(-self.numel // BLOCK),)
            load_kernel(self.source)[grid](*tensors, self.numel, *values, BLOCK=BLOCK, **LAUNCH)
        # A step that fails tells by these counts which buckets had been updated; torch cannot see Triton write.
        torch.autograd.graph.increment_version([given[number] for number in self.written])
        return ()


def make_update_kernel(
    function: Callable[[list[Any]], object], inputs: Sequence[Any], dying: Collection[int] = ()
) -> UpdateKernel:
    """The kernel that does what ``function``, an update region of an emitted step, does in place.

    Args:
        function: takes its inputs in a list.
        inputs: tensors, fake ones will do, and tuples of numbers, like those that it will be called with.
        dying: numbers of the inputs that nothing reads afterwards: what is written to them need not be stored.

    Raises:
        NoKernelError: the region does something else than elementwise arithmetic in place; says what.
    """
    graph, result = trace_region(function, len(inputs))
    if result != ():
        raise NoKernelError("a value that it makes is read later")
    writer = Writer()
    numel = _add_inputs(writer, graph, inputs)
    singles = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            source, index = node.args
            if source.meta["number"] is None or not isinstance(inputs[source.meta["number"]], tuple | list):
                raise NoKernelError(f"{node.name} is an element of a tensor")
            writer.hypers[node] = (source.meta["number"], index)
        elif all(source in writer.buffers and writer.buffers[source].is_single for source in node.all_input_nodes):
            if any(writer.buffers[source].variable for source in node.all_input_nodes):
                raise NoKernelError(f"{node.name} changes what the update has read")
            singles.append(node)
        else:
            write_operator(writer, node)
    used = sorted({b.number for b in writer.buffers.values() if b.number is not None and (b.variable or b.is_written)})
    distinct = {id(b): b for b in writer.buffers.values()}.values()  # an operator in place has the one it writes to
    stored = [b for b in distinct if b.is_written and b.number is not None and b.number not in dying]
    if not stored:
        raise NoKernelError("it changes nothing of the bucket's size")
    written = tuple(buffer.number for buffer in stored if buffer.number is not None)
    source = _source(writer, used, stored)
    return UpdateKernel(source, tuple(used), written, tuple(writer.scalars), tuple(singles), numel)


def _add_inputs(writer: Writer, graph: fx.Graph, inputs: Sequence[Any]) -> int:
    """Enter the tensors among the inputs as buffers; returns the number of elements of each."""
    sizes: set[int] = set()
    for node, example in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        if not isinstance(example, torch.Tensor):
            continue
        if example.dtype not in COMPUTED:
            raise NoKernelError(f"a tensor is {example.dtype}, and kernels compute in float32")
        if example.dim() > 1 or (example.dim() == 1 and example.stride(0) != 1):
            raise NoKernelError("a tensor is not flat")
        writer.buffers[node] = Buffer(example.dtype, node.meta["number"], is_single=example.dim() == 0)
        if example.dim() == 1:
            sizes.add(example.numel())
    if len(sizes) != 1 or 0 in sizes:
        raise NoKernelError(f"tensors have {sorted(sizes)} elements, where one number of them was expected")
    return sizes.pop()


def _source(writer: Writer, used: Sequence[int], stored: Sequence[Buffer]) -> str:
    arguments = [*(f"x{number}" for number in used), "numel", *writer.scalars.values(), "BLOCK: tl.constexpr"]
    body = [
        # After 2**31 elements a 32-bit offset would wrap around.
        "at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "inside = at < numel",
        *writer.lines,
        *(f"tl.store(x{buffer.number} + at, {buffer.variable}, mask=inside)" for buffer in stored),
    ]
    head = ["import triton", "import triton.language as tl", "", "", "@triton.jit"]
    return "\n".join([*head, f"def update({', '.join(arguments)}):", *(f"    {line}" for line in body), ""])


@functools.cache
def load_kernel(source: str) -> Any:
    """The Triton function of a kernel's text; tracebacks and Triton itself find its lines."""
    filename = f"<zerofx update kernel {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": "zerofx_update_kernel"}
    exec(compile(source, filename, "exec"), namespace)
    return namespace["update"]
