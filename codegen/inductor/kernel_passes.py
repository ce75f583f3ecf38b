"""Passes over Inductor's kernels: what keeps reads after writes, and what lets results be written over operands."""

from __future__ import annotations

import torch

from zerofx.scheduler.cost.fusion import find_last_reads, order_for_reuse
from zerofx.torch_private.inductor.scheduler import (
    BaseSchedulerNode,
    CustomSchedulerPass,
    FusedSchedulerNode,
    SchedulerBuffer,
    WeakDep,
    can_match_buffer_size,
    has_memory,
)
from zerofx.torch_private.operators import OpOverload


class KeepOrder(CustomSchedulerPass):
    """Reads of a buffer that an operator has written into (dropout's mask, max pooling's gradient) stay after
    that, and operators that draw random numbers stay in their order.

    Where Inductor of torch 2.13 fits the loops of two kernels to each other, it takes their reads from the loops anew
    and forgets which writes they follow, unless they have a dependency that no loop shows
    (https://github.com/pytorch/pytorch/issues/185509). The one given here repeats what the scheduler knows already.
    Of draws it knows nothing: one comes before another where that holds less memory.
    """

    name = "keep_order"

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        drawn: BaseSchedulerNode | None = None
        for node in [entry for each in nodes for entry in each.get_nodes()]:
            read = {dep.name for dep in node.read_writes.reads}
            for name in sorted(read & set(node.mutation_renames.values())):
                _keep_after(node, name)
            if _draws(node):
                if drawn is not None:
                    _keep_after(node, drawn.get_outputs()[0].get_name())
                drawn = node
        return nodes

    def uuid(self) -> str:
        return "zerofx: reads follow the writes before them, and draws one another; FileKernels makes kernels"


def _keep_after(node: BaseSchedulerNode, buffer: str) -> None:
    node.add_fake_dep(WeakDep(buffer, mutating_buf=node.get_name(), is_fake=True))


def _draws(node: BaseSchedulerNode) -> bool:
    operator = getattr(node.node, "op_overload", None)
    return isinstance(operator, OpOverload) and torch.Tag.nondeterministic_seeded in operator.tags


class Overwrite(CustomSchedulerPass):
    """Loops of one kernel write their results over the values that they are the last to read.

        h = f(gate, up)                    |   h = f(gate, up)            # memory of its own
        dup = g(dh, gate)                  |   dgate = p(dh, gate, up)    # over up
        dgate = p(dh, gate, up)            |   dup = g(dh, gate)          # over dh

    Inductor does so for a loop whose result needs those of all other loops that read the value: it takes loops that
    merely stand before it for readers to come, and here has six values in memory instead of four. Which accesses of a
    value are to the same element in all loops, and who else holds its memory, is still for Inductor to see.

    Does not handle: kernels with reductions, whose loops Inductor divides otherwise where one needs another; what comes
    into a region, of which the region cannot know who holds it.
    """

    name = "overwrite"

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        for kernel in nodes:
            if type(kernel) is FusedSchedulerNode and not any(loop.is_reduction() for loop in kernel.get_nodes()):
                _overwrite(kernel)
        return nodes

    def uuid(self) -> str:
        return "zerofx: loops write over what they are the last to read"


def _overwrite(kernel: FusedSchedulerNode) -> None:
    loops = {loop.get_name(): loop for loop in kernel.get_nodes()}
    own = kernel.get_buffer_names()
    ends: dict[str, set[str]] = {name: set() for name in loops}
    readers: dict[str, set[str]] = {}
    for value, buffer in kernel.scheduler.name_to_buf.items():
        users = {user.node.get_name() for user in buffer.users}
        if value in own or not users or not users <= loops.keys() or not has_memory(buffer):
            continue
        if all(_fits(loops[entry], buffer) for entry in users):
            readers[value] = users
            for reader in sorted(users):
                ends[reader].add(value)
    order = order_for_reuse(list(loops), ends, {name: loop.ancestors for name, loop in loops.items()})
    kernel.snodes = [loops[name] for name in order]
    for name, values in find_last_reads(order, ends).items():
        for value in values:
            loops[name].ancestors.update(readers[value] - {name})


def _fits(loop: BaseSchedulerNode, read: SchedulerBuffer) -> bool:
    """True if a result of ``loop`` can take the memory of ``read``."""
    results = (result.node for result in loop.get_outputs() if has_memory(result))
    return any(can_match_buffer_size(read.node, result) for result in results)


# Before Inductor fuses its kernels, and after.
KERNEL_PASSES = (KeepOrder(), Overwrite())
