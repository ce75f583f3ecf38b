"""Memory that an operator takes and gives back while it runs, beyond its outputs: what the profiler's allocations show.

Eager kernels on CPU keep such buffers where one would not look: convolutions copy images, filters and results into
another layout; a mean of squares has all of them; a number among tensors becomes one. So each call is made and looked
at (``scheduler/cost/cpu/kernel_memory.py``), but for views, which hold nothing, and for what the table of operators has
a formula for (``zerofx/ir/operators/own.py``), with the reason.

Not covered: oneDNN's scratchpads of some KiB, and CUDA, where cuBLAS and cuDNN keep workspaces of their own.
``is_unknown`` says of which operators on CPU nothing is known: those that are not ATen's, and those that cannot be
called on values that are made up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import is_view, storage_bytes, tensors_of
from zerofx.ir.facts import argument_value, value
from zerofx.ir.operators.table import facts_of
from zerofx.scheduler.cost.cpu.calls import KernelMemory, call_of
from zerofx.scheduler.cost.cpu.kernel_memory import call_memories, kernel_memories
from zerofx.torch_private.operators import OpOverload
from zerofx.torch_private.tensors import suggest_memory_format

_NOTHING = KernelMemory(0, ())


def memories(nodes: Iterable[fx.Node]) -> dict[fx.Node, KernelMemory | None]:
    """Memory of each node's call; None for an operator on CPU tensors whose memory is not known."""
    known: dict[fx.Node, KernelMemory | None] = {}
    asked = []
    for node in nodes:
        inside = facts_of(node.target).inside
        if inside is not None:
            args, kwargs = fx.map_arg((node.args, node.kwargs), value)
            known[node] = KernelMemory(inside(*args, **kwargs), ()) if _is_on_cpu(node) else _NOTHING
        elif not isinstance(node.target, OpOverload) or node.target in ops.EVENTS or is_view(node):
            known[node] = _NOTHING
        else:
            asked.append(node)
    for node, taken in kernel_memories(asked).items():
        known[node] = _NOTHING if taken is None and not _is_on_cpu(node) else taken
    return known


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that ``node`` holds at its worst moment beyond inputs and outputs; 0 on other devices than CPUs."""
    taken = memories([node])[node]
    return 0 if taken is None else taken.inside


def inductor_workspace_bytes(node: fx.Node, kernels: Collection[str]) -> int:
    """``workspace_bytes`` of an operator that Inductor leaves to a kernel, of ATen's or one of ``kernels``, which are
    zerofx's own (``codegen/kernels/table.py``) in a compiled region."""
    own = facts_of(node.target).own_kernel
    if own is not None and own.name in kernels and _is_on_cpu(node):
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        inside = own.inside(*args, **kwargs)
        if inside is not None:
            return inside
    return min([workspace_bytes(node), *_image_copy_bytes(node)])


def is_unknown(node: fx.Node) -> bool:
    """True if an operator on CPU tensors may hold bytes that ``workspace_bytes`` does not count."""
    return memories([node])[node] is None


def _is_on_cpu(node: fx.Node) -> bool:
    values = (*tensors_of(node), *(value for source in node.all_input_nodes for value in tensors_of(source)))
    return bool(values) and all(value.device.type == "cpu" for value in values)


def _image_copy_bytes(node: fx.Node) -> Iterable[int]:
    """Bytes held if Inductor copies channels-last images, channel by channel, which is known once the region is
    compiled; empty where it does not copy, or nothing is known."""
    places, call = facts_of(node.target).copied_by_inductor, call_of(node)
    if not places or call is None or suggest_memory_format(argument_value(node, places[-1])) is torch.contiguous_format:
        return
    args, kwargs = call.substitute(lambda like: like)
    for place in places:
        args[place] = args[place].make_contiguous()
    copied = call.replace_arguments(args, kwargs)
    taken = call_memories([copied]).get(copied)
    if taken is not None:
        yield storage_bytes(argument_value(node, places[-1])) + taken.inside
