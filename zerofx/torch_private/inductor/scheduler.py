"""Inductor's scheduler, as seen by passes over its kernels, and the fusions it must not make for what it forgets."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch._inductor import custom_graph_pass
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.wrapper import can_match_buffer_size as can_match_buffer_size
from torch._inductor.dependencies import WeakDep as WeakDep
from torch._inductor.ir import Layout, MutationLayoutSHOULDREMOVE
from torch._inductor.scheduler import BaseSchedulerNode as BaseSchedulerNode
from torch._inductor.scheduler import FusedSchedulerNode as FusedSchedulerNode
from torch._inductor.scheduler import SchedulerBuffer as SchedulerBuffer
from torch._inductor.virtualized import V

from zerofx.torch_private.versions import TORCH


def has_memory(buffer: SchedulerBuffer) -> bool:
    """True if the buffer is neither a write into another buffer nor a tuple."""
    layout = buffer.node.get_output_spec()
    return isinstance(layout, Layout) and not isinstance(layout, MutationLayoutSHOULDREMOVE)


def scheduler_pass_class() -> Any:
    """The class of passes over kernels with which Inductor caches compiled graphs: to 2.12 that over graphs."""
    return custom_graph_pass.CustomSchedulerPass if TORCH >= (2, 13) else custom_graph_pass.CustomGraphPass


if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass as CustomSchedulerPass
else:
    CustomSchedulerPass = scheduler_pass_class()


def forgets_dependencies() -> bool:
    """True if Inductor, when it matches the loops of two kernels, forgets dependencies that no loop shows.

    It does in torch 2.11: ``recompute_size_and_body`` takes all of them from the loops again.
    """
    return TORCH == (2, 11)


class _LeavesApart(InductorChoices):
    """Refuses fusions that match loops if a kernel has a dependency that no loop shows."""

    @staticmethod
    def can_fuse(scheduler: Any, node1: BaseSchedulerNode, node2: BaseSchedulerNode, shared_data_score: int) -> bool:
        are_fitted = node1.group != node2.group and not (node1.is_reduction() or node2.is_reduction())
        if are_fitted and any(map(_has_dependency_that_no_loop_shows, (node1, node2))):
            return False
        return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)


def _has_dependency_that_no_loop_shows(kernel: BaseSchedulerNode) -> bool:
    return any(isinstance(dep, WeakDep) for loop in kernel.get_nodes() for dep in loop.read_writes.reads)


def keep_dependencies() -> AbstractContextManager[Any]:
    """While open, Inductor keeps the dependencies that no loop shows, by fusing less if it would forget them."""
    if not forgets_dependencies():
        return contextlib.nullcontext()
    context: AbstractContextManager[Any] = V.set_choices_handler(_LeavesApart())
    return context
