"""Inductor's compiler of graphs: calling it, and its settings meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, FunctionType, MethodType
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
from zerofx.torch_private.inductor.scheduler import CustomSchedulerPass, keep_dependencies
from zerofx.torch_private.inductor.wrapper import ALLOCATORS
from zerofx.torch_private.versions import TORCH


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions that Inductor applies inside ``set_up``."""
    table = select_decomp_table()
    drawing = operators_with_other_draws()
    return {op: function for op, function in table.items() if getattr(op, "overloadpacket", None) not in drawing}


def operators_with_other_draws() -> frozenset[Any]:
    """Operators whose Inductor decompositions draw differently from eager mode, if draws are ATen's.

    Torch 2.11 makes draws like a tensor row by row and permutes them; 2.11 and 2.12 draw one by one for leaky units.
    """
    aten = torch.ops.aten
    likes = {aten.rand_like, aten.randn_like, aten.randint_like} if TORCH == (2, 11) else set()
    leaky = {aten.rrelu_with_noise_functional} if TORCH < (2, 13) else set()
    return frozenset(likes | leaky)


def misshapes_reductions() -> bool:
    """True if Inductor drops dimensions of length 1 of a reduction fused with one over the other dimension.

    It does so before torch 2.13 (pull request 177782); such reductions are kernels of their own then.
    """
    return TORCH < (2, 13)


def shape_aware_mode() -> FakeTensorMode:
    """A fake mode for a region: Inductor caches on disk only graphs with a shape environment, even an empty one."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def compile_graph(graph: fx.GraphModule, examples: Sequence[Any], mode: FakeTensorMode) -> Any:
    """Compile ``graph`` for inputs like ``examples``, of ``mode``; the result takes a list of them and empties it."""
    # Strides of results are those asked for, of each of them.
    output = graph.graph.output_node()
    results = output.args[0]
    assert isinstance(results, list | tuple)
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    for operator in operators_with_other_draws():
        make_fallback(operator, warn=False, override_decomp=True)  # what Inductor's later versions do of themselves
    with tracing(TracingContext(mode)):
        return compile_fx_inner(graph, examples)


def source_of(compiled: Any) -> str:
    """The file that Inductor generated for the result of ``compile_graph``."""
    source: str = compiled.source_code
    return source


def replace_allocator(compiled: Any, allocate: Callable[..., torch.Tensor]) -> Any:
    """The result of ``compile_graph``, but with tensors on its device from ``allocate``, which is given size, stride
    and dtype; None where what Inductor has put around the function that it generated is not known."""
    return _replace_names(compiled.current_callable, dict.fromkeys(ALLOCATORS, allocate))


def _replace_names(call: Any, replaced: Mapping[str, Any]) -> Any:
    """A generated function that reads other things under these names."""
    if isinstance(call, MethodType) and isinstance(call.__func__, FunctionType):
        function = call.__func__
        names = {**function.__globals__, **replaced}
        return MethodType(FunctionType(function.__code__, names, function.__name__), call.__self__)
    if not isinstance(call, FunctionType) or _GENERATED not in call.__code__.co_freevars:
        return None
    # What has it called with aligned copies of the inputs that it writes into.
    cells = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True))
    generated = _replace_names(cells[_GENERATED].cell_contents, replaced)
    if generated is None:
        return None
    closure = tuple((cells | {_GENERATED: CellType(generated)}).values())
    return FunctionType(call.__code__, call.__globals__, call.__name__, call.__defaults__, closure)


_GENERATED = "model"  # what the closure of ``align_inputs_from_check_idxs`` calls the generated function


@contextlib.contextmanager
def set_up(before_fusion: CustomSchedulerPass, after_fusion: CustomSchedulerPass) -> Iterator[None]:
    """Settings for tracing and compiling regions; the passes are over Inductor's kernels.

    Strides are checked: a result of an ATen kernel whose layout differs from its fake tensor's would be misread
    silently. The alignment of memory is ours to ensure. Random numbers are ATen's, as in eager mode: Inductor's need a
    pass over graphs that a region does not go through. A kernel's order of summation is not chosen by timing.

    torch is set to deterministic meanwhile: several threads of Inductor's loops add to one element in arbitrary order.
    Sums by index are then ATen's kernels, as in eager mode, and have one order where these do.
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
        with config.patch(options), keep_dependencies():
            yield
    finally:
        settings.fill_uninitialized_memory = fills
        torch._C._set_deterministic_algorithms(enabled, warn_only=only_warns)


@contextlib.contextmanager
def make_kernels_with(maker: type[AsyncCompile]) -> Iterator[None]:
    """While open, files generated for CPUs make their kernels with ``maker``, which can be imported; unless another
    backend than Inductor's own is registered for CPUs."""

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
