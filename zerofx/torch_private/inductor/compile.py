"""Inductor's compiler of graphs: how it is called, and what it is set to meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen.common import device_codegens, init_backend_registration
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import make_fallback

from zerofx.torch_private.capture import FakeTensorMode
from zerofx.torch_private.inductor.fusion import keeping_dependencies
from zerofx.torch_private.inductor.scheduler import CustomSchedulerPass
from zerofx.torch_private.versions import TORCH


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """What Inductor takes operators apart into, inside ``set_up``."""
    table = select_decomp_table()
    drawing = drawing_otherwise()
    return {op: function for op, function in table.items() if getattr(op, "overloadpacket", None) not in drawing}


def drawing_otherwise() -> frozenset[Any]:
    """Operators that Inductor takes apart into other draws than eager mode's where draws are ATen's.

    Torch 2.11 makes draws like a tensor row by row and permutes them; 2.11 and 2.12 draw one by one for leaky units.
    """
    aten = torch.ops.aten
    likes = {aten.rand_like, aten.randn_like, aten.randint_like} if TORCH == (2, 11) else set()
    leaky = {aten.rrelu_with_noise_functional} if TORCH < (2, 13) else set()
    return frozenset(likes | leaky)


def misshapes_reductions() -> bool:
    """Whether Inductor loses dimensions of length 1 of a reduction that it runs with one over the other dimension.

    It does before torch 2.13 (pull request 177782); such reductions are kernels of their own then.
    """
    return TORCH < (2, 13)


def shape_aware_mode() -> FakeTensorMode:
    """A fake mode for a region: Inductor caches on disk only what has a shape environment, be it an empty one."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def compile_graph(graph: fx.GraphModule, examples: Sequence[Any], mode: FakeTensorMode) -> Any:
    """What calls ``graph``, compiled for inputs like ``examples``, of ``mode``, with a list that it empties."""
    # Strides of results are those asked for, of each of them.
    output = graph.graph.output_node()
    results = output.args[0]
    assert isinstance(results, list | tuple)
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    for operator in drawing_otherwise():
        make_fallback(operator, warn=False, override_decomp=True)  # what Inductor's later versions do of themselves
    with tracing(TracingContext(mode)):
        return compile_fx_inner(graph, examples)


def source_of(compiled: Any) -> str:
    """The file that Inductor generated for what ``compile_graph`` gave."""
    source: str = compiled.source_code
    return source


@contextlib.contextmanager
def set_up(before_fusion: CustomSchedulerPass, after_fusion: CustomSchedulerPass) -> Iterator[None]:
    """What regions are traced and compiled with; the passes are over Inductor's kernels.

    Strides are checked: what a kernel of ATen lays out otherwise than its fake tensor says would be misread without a
    word. Where memory begins is ours to see to. Random numbers are ATen's, as in eager mode: those of Inductor need a
    pass over graphs that a region does not go through. A kernel's order of summation is not chosen by timing.

    torch is to be deterministic meanwhile: several threads of Inductor's loops add to one place in whatever order they
    come. Sums by index are ATen's kernels then, as in eager mode, and have one order wherever it has.
    """
    options = {
        "size_asserts": True,
        "alignment_asserts": False,
        "nan_asserts": False,
        "fallback_random": True,
        "deterministic": True,
        "triton.mix_order_reduction": config.triton.mix_order_reduction and not misshapes_reductions(),
        "_pre_fusion_custom_pass": before_fusion,
        "_post_fusion_custom_pass": after_fusion,
    }
    enabled = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False
    try:
        with config.patch(options), keeping_dependencies():
            yield
    finally:
        settings.fill_uninitialized_memory = fills
        torch._C._set_deterministic_algorithms(enabled, warn_only=only_warns)


@contextlib.contextmanager
def making_kernels_with(maker: type[AsyncCompile]) -> Iterator[None]:
    """While open, files that are generated for CPUs make their kernels with ``maker``, which can be imported; unless
    another backend than Inductor's own is registered for CPUs."""

    class Wrapper(PythonWrapperCodegen):
        @staticmethod
        def create(is_subgraph: bool, *rest: Any) -> PythonWrapperCodegen:
            if is_subgraph:
                part: PythonWrapperCodegen = PythonWrapperCodegen.create(is_subgraph, *rest)
                return part
            return Wrapper()  # type: ignore[no-untyped-call]  # torch's

        def write_header(self) -> None:
            super().write_header()
            self.header.writeline(f"from {maker.__module__} import {maker.__name__}")
            self.header.writeline(f"async_compile = {maker.__name__}()")

    init_backend_registration()
    before = device_codegens["cpu"]
    if before.wrapper_codegen is PythonWrapperCodegen:
        device_codegens["cpu"] = dataclasses.replace(before, wrapper_codegen=Wrapper)
    try:
        yield
    finally:
        device_codegens["cpu"] = before
