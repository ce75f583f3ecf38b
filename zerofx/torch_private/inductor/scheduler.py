"""Inductor's scheduler, as seen by passes over its kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._inductor.codegen.wrapper import can_match_buffer_size as can_match_buffer_size
from torch._inductor.dependencies import WeakDep as WeakDep
from torch._inductor.ir import Layout, MutationLayoutSHOULDREMOVE
from torch._inductor.scheduler import BaseSchedulerNode as BaseSchedulerNode
from torch._inductor.scheduler import FusedSchedulerNode as FusedSchedulerNode
from torch._inductor.scheduler import SchedulerBuffer as SchedulerBuffer

from zerofx.torch_private.inductor.fusion import scheduler_pass_class

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass as CustomSchedulerPass
else:
    CustomSchedulerPass = scheduler_pass_class()


def has_memory(buffer: SchedulerBuffer) -> bool:
    """True if the buffer is neither a write into another buffer nor a tuple."""
    layout = buffer.node.get_output_spec()
    return isinstance(layout, Layout) and not isinstance(layout, MutationLayoutSHOULDREMOVE)
