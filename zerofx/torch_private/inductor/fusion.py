"""Dependencies that some versions of Inductor forget when fusing kernels, and the fusions prevented for that."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch._inductor import custom_graph_pass
from torch._inductor.choices import InductorChoices
from torch._inductor.dependencies import WeakDep
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.virtualized import V

from zerofx.torch_private.versions import TORCH


def scheduler_pass_class() -> Any:
    """The class of passes over kernels with which Inductor caches compiled graphs: to 2.12 that over graphs."""
    return custom_graph_pass.CustomSchedulerPass if TORCH >= (2, 13) else custom_graph_pass.CustomGraphPass


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
