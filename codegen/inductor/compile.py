"""Compile a region's Python function through Inductor.

The region is traced from the emitted source itself, so that an edited file compiles as it reads, and rewritten
(``phase.py``) before Inductor compiles it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from zerofx.codegen.cpu import attention, products
from zerofx.codegen.cpu.extras import ATTENTION
from zerofx.codegen.inductor.background import Background
from zerofx.codegen.inductor.cpp import preparation, retry_damaged_libraries
from zerofx.codegen.inductor.decompositions import merge_decompositions
from zerofx.codegen.inductor.kernel_library import loading
from zerofx.codegen.inductor.kernel_passes import KERNEL_PASSES
from zerofx.codegen.inductor.memory_record import memory_record
from zerofx.codegen.inductor.phase import REGION_REWRITES
from zerofx.codegen.inductor.region_rewrites import RegionRewrite, TracedRegion
from zerofx.codegen.inductor.shared_kernels import FileKernels, shared_kernels
from zerofx.errors import CompilerError
from zerofx.ir import ops
from zerofx.scheduler.cost.liveness import MemoryEvent
from zerofx.torch_private.inductor.compile import (
    compile_graph,
    inductor_decompositions,
    make_kernels_with,
    replace_allocator,
    set_up,
    shape_aware_mode,
    source_of,
)

RegionFunction = Callable[[list[Any]], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class CompiledRegion:
    """A compiled region: takes its inputs in a list that it empties, like the function it was made from.

    ``memory`` is what it takes and frees on the way, its outputs included. ``background``: what is being built for it.
    ``replace_allocator`` makes the same function of one that gives it its tensors, by size, stride and dtype.
    """

    name: str
    call: RegionFunction
    memory: tuple[MemoryEvent, ...]
    background: Background
    replace_allocator: Callable[[Callable[..., torch.Tensor]], RegionFunction] | None = None

    def finish(self) -> None:
        """Wait until all that it calls has been built.

        Raises:
            CompilerError: something could not be built; the message names the region.
        """
        error = self.background.wait()
        if error is not None:
            raise _could_not_be_compiled(self.name, error) from error


def _could_not_be_compiled(name: str, error: BaseException) -> CompilerError:
    return CompilerError(
        f"region {name} could not be compiled: {type(error).__name__}: {error}\nUse backend='eager' to run it on ATen "
        f"kernels"
    )


def compile_region(
    function: RegionFunction,
    inputs: Sequence[Any],
    name: str,
    kernels: frozenset[str] = frozenset(),
    *,
    shared: bool = False,
) -> CompiledRegion:
    """Compile ``function`` for inputs like ``inputs`` (fake tensors or scalars).

    Kernels for CPUs may still be built when this returns: see ``CompiledRegion.finish``.

    ``kernels``: those of zerofx's own that it uses (``codegen/kernels/table.py``). ``shared``: whether kernels for CPUs
    are shared with those of other sizes, and built by ``finish_shared`` or where they are called first.

    Raises:
        CompilerError: Inductor could not compile it; the message names the region.
    """
    with shared_kernels().share_loaded() if shared else contextlib.nullcontext():
        return retry_damaged_libraries(lambda: _compile(function, inputs, name, kernels))


def finish_shared() -> None:
    """Build the kernels of all regions that were compiled as ``shared``.

    Raises:
        CompilerError: one could not be built.
    """
    try:
        shared_kernels().finish()
    except Exception as error:
        raise _could_not_be_compiled("kernels of regions", error) from error


def _compile(function: RegionFunction, inputs: Sequence[Any], name: str, kernels: frozenset[str]) -> CompiledRegion:
    devices = {entry.device.type for entry in inputs if isinstance(entry, torch.Tensor)}
    for device_type in sorted(devices):
        preparation(device_type).wait()
    try:
        region = trace_and_rewrite(function, inputs, kernels)
        background = Background("zerofx-kernels", _builds(region.graph))
        background.resume()
        examples = [node.meta["val"] for node in region.graph.find_nodes(op="placeholder")]
        with set_up(*KERNEL_PASSES), make_kernels_with(FileKernels), loading().libraries() as libraries:
            compiled = compile_graph(region.module, examples, region.mode)
        for library in libraries:
            background.append(library.finish)
    except Exception as error:
        raise _could_not_be_compiled(name, error) from error
    memory = memory_record(source_of(compiled), examples, [i for i, _ in region.views], region.mode)
    call = _call_on_views(name, region.views, compiled)
    if replace_allocator(compiled, torch.empty_strided) is None:
        return CompiledRegion(name, call, tuple(replace(event, block=None) for event in memory), background)
    return CompiledRegion(
        name, call, memory, background,
        lambda allocate: _call_on_views(name, region.views, replace_allocator(compiled, allocate)),
    )  # fmt: skip


def trace_and_rewrite(
    function: RegionFunction,
    inputs: Sequence[Any],
    kernels: frozenset[str],
    rewrites: Sequence[RegionRewrite] = REGION_REWRITES,
) -> TracedRegion:
    """Trace ``function`` for inputs like ``inputs``, as for ``compile_region``, and rewrite it."""
    mode = shape_aware_mode()
    with mode:
        examples = list(map(_own_fake, inputs))
        plain = make_fx(lambda *args: function(list(args)), tracing_mode="real")(*examples)

        def retrace(run: Callable[..., Any]) -> fx.GraphModule:
            with set_up(*KERNEL_PASSES):
                table = merge_decompositions(inductor_decompositions(), attention=ATTENTION in kernels)
                return make_fx(run, decomposition_table=table, tracing_mode="real")(*examples)

        region = TracedRegion(plain, mode, retrace, kernels)
        for rewrite in rewrites:
            rewrite.run(region)
    return region


def _own_fake(given: Any) -> Any:
    """A tensor like ``given`` that stands for one input only: a node and its copies share a fake value, and tracing
    tells inputs apart by identity."""
    if not isinstance(given, torch.Tensor):
        return given
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)


_ATTENTION = frozenset({ops.attention, ops.attention_backward})
_PRODUCTS = frozenset({ops.product, ops.product_into})


def _builds(graph: fx.Graph) -> list[Callable[[], object]]:
    """The functions that build the zerofx kernels which ``graph`` calls."""
    targets = {node.target for node in graph.nodes}
    uses = {attention.build: _ATTENTION, products.build: _PRODUCTS}
    return [build for build, operators in uses.items() if targets & operators]


def _call_on_views(name: str, views: list[tuple[int, tuple[Any, ...]]], compiled: Any) -> RegionFunction:
    def call(inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        given = [inputs[i].as_strided(*args) if args else inputs[i] for i, args in views]
        inputs.clear()
        try:
            return tuple(compiled(given))
        except AssertionError as error:
            if not str(error).startswith("expected size "):  # of a user's operator, not Inductor's check of strides
                raise
            raise CompilerError(
                f"region {name} expected an operator's result in the strides of its fake tensor, found others: "
                f"{error}\nUse backend='eager' to run it on ATen kernels"
            ) from error

    return call
