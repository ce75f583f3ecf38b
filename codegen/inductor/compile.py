"""Compile a region's Python function through Inductor.

The region is traced from the emitted source itself, so that an edited file compiles as it reads. Views of its inputs
(parameters in a gathered bucket, slots of a gradient buffer) are taken outside the compiled code: Inductor then sees
plain contiguous tensors, and a gradient is written where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from zerofx.codegen.cpu.rewrites import rewrite_for_cpu
from zerofx.codegen.inductor.cpp import preparation, without_damaged_libraries
from zerofx.codegen.inductor.decompositions import with_own
from zerofx.codegen.inductor.kernel_passes import KeepOrder, Overwrite
from zerofx.codegen.inductor.memory_record import memory_record
from zerofx.codegen.inductor.traced import call
from zerofx.codegen.kernels import attention, products
from zerofx.codegen.kernels.table import ATTENTION, PRODUCTS
from zerofx.codegen.parallel.beside import Beside
from zerofx.errors import CompilerError
from zerofx.ir import ops
from zerofx.ir.aliasing import mutated_inputs, storage_source
from zerofx.ir.facts import value
from zerofx.scheduler.cost.liveness import MemoryEvent
from zerofx.torch_private.capture import FakeTensorMode
from zerofx.torch_private.inductor import compile_graph, decompositions, set_up, shape_aware_mode, source_of

aten = torch.ops.aten
RegionFunction = Callable[[list[Any]], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class CompiledRegion:
    """A compiled region: takes its inputs in a list that it empties, like the function it was made from.

    ``memory`` is what it takes and frees on the way, its outputs included. ``beside``: what is being built for it.
    """

    name: str
    call: RegionFunction
    memory: tuple[MemoryEvent, ...]
    beside: Beside

    def finish(self) -> None:
        """Wait until all that it calls has been built.

        Raises:
            CompilerError: something could not be built; the message names the region.
        """
        error = self.beside.wait()
        if error is not None:
            raise _could_not_be_compiled(self.name, error) from error


def _could_not_be_compiled(name: str, error: BaseException) -> CompilerError:
    return CompilerError(
        f"region {name} could not be compiled: {type(error).__name__}: {error}\nUse backend='eager' to run it on ATen "
        f"kernels"
    )


def compile_region(
    function: RegionFunction, inputs: Sequence[Any], name: str, kernels: frozenset[str] = frozenset()
) -> CompiledRegion:
    """Compile ``function`` for inputs like ``inputs`` (fake tensors or scalars).

    ``kernels``: those of zerofx's own that it uses (``codegen/kernels/table.py``). Where one has to be built it may
    still be when this returns: see ``CompiledRegion.finish``.

    Raises:
        CompilerError: Inductor could not compile it; the message names the region.
    """
    return without_damaged_libraries(lambda: _compiled(function, inputs, name, kernels))


def _compiled(function: RegionFunction, inputs: Sequence[Any], name: str, kernels: frozenset[str]) -> CompiledRegion:
    devices = {one.device.type for one in inputs if isinstance(one, torch.Tensor)}
    for device_type in sorted(devices):
        preparation(device_type).wait()
    mode = shape_aware_mode()
    try:
        with mode:
            examples = list(map(_own_fake, inputs))
            plain = make_fx(lambda *args: function(list(args)), tracing_mode="real")(*examples)
            with set_up(KeepOrder(), Overwrite()):
                table = with_own(decompositions(), attention=ATTENTION in kernels)
                laid_out = _InPlannedStrides(plain).run
                traced = make_fx(laid_out, decomposition_table=table, tracing_mode="real")(*examples)
            rewrite_for_cpu(traced.graph, products=PRODUCTS in kernels)
            _keep_copies(traced.graph)
        beside = Beside("zerofx-kernels", _builds(traced.graph))
        beside.resume()
        views, inner = _hoist_views(traced)
        examples = [node.meta["val"] for node in inner.graph.find_nodes(op="placeholder")]
        with set_up(KeepOrder(), Overwrite()):
            compiled = compile_graph(inner, examples, mode)
    except Exception as error:
        raise _could_not_be_compiled(name, error) from error
    memory = memory_record(source_of(compiled), examples, [i for i, _ in views], mode)
    return CompiledRegion(name, _with_views(name, views, compiled), memory, beside)


def fake_like(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A fake tensor to compile for."""
    with FakeTensorMode():
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _own_fake(given: Any) -> Any:
    """A tensor like ``given`` that stands for one input only: a node and its copies share a fake value, and tracing
    tells inputs apart by identity."""
    if not isinstance(given, torch.Tensor):
        return given
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)


class _InPlannedStrides(fx.Interpreter):
    """Runs a graph so that every value has the strides recorded for it.

    A decomposition may lay its result out unlike the operator does (``cat`` of one tensor that is not empty keeps that
    tensor's strides): the views that follow, and the regions that read the result, were made for the operator's.
    """

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        planned = n.meta.get("val")
        if isinstance(found, list | tuple) and isinstance(planned, list | tuple):
            return tuple(map(_with_strides, found, planned))
        return _with_strides(found, planned)


def _with_strides(found: Any, planned: Any) -> Any:
    """``found`` laid out like ``planned``, where both are tensors that fill their memory."""
    if not isinstance(found, torch.Tensor) or not isinstance(planned, torch.Tensor):
        return found
    differ = any(
        one != other for size, one, other in zip(found.shape, found.stride(), planned.stride(), strict=True) if size > 1
    )
    if not differ:
        return found
    order = sorted(range(planned.dim()), key=lambda dim: (-planned.stride()[dim], -planned.shape[dim], dim))
    return found.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])


_ATTENTION = frozenset({ops.attention, ops.attention_backward})
_PRODUCTS = frozenset({ops.product, ops.product_into})


def _builds(graph: fx.Graph) -> list[Callable[[], object]]:
    """What builds the kernels of ours that ``graph`` calls."""
    targets = {node.target for node in graph.nodes}
    uses = {attention.build: _ATTENTION, products.build: _PRODUCTS}
    return [build for build, operators in uses.items() if targets & operators]


# Which argument is what they copy.
_COPIES = {aten.clone.default: 0, aten.copy.default: 1}


def _keep_copies(graph: fx.Graph) -> None:
    """Have copies of what is written into made of a product with one: Inductor reads what was copied in their place.

    before = clone(a)         |   kept = a * 1
    copy_(a, b)               |   before = clone(kept)
    copy_(b, before)          |   copy_(a, b); copy_(b, before)
    """
    written = {storage_source(one) for node in graph.nodes for one in mutated_inputs(node)}
    for node in [one for one in graph.nodes if one.target in _COPIES]:
        source = node.args[_COPIES[node.target]]
        if storage_source(source) in written:
            same, by = (aten.bitwise_or.Scalar, False) if value(source).dtype is torch.bool else (aten.mul.Scalar, 1)
            with graph.inserting_before(node):
                node.replace_input_with(source, call(graph, same, (source, by)))


def _hoist_views(traced: fx.GraphModule) -> tuple[list[tuple[int, tuple[Any, ...]]], fx.GraphModule]:
    """Turn ``as_strided`` views of placeholders into placeholders.

    Returns what to pass to the rest, in order: ``(input index, as_strided arguments)``, or ``(input index, ())`` for
    the input itself.
    """
    graph = traced.graph
    placeholders = list(graph.find_nodes(op="placeholder"))
    passed: list[tuple[int, tuple[Any, ...]]] = []
    last = placeholders[-1]
    for index, original in enumerate(placeholders):
        for user in list(original.users):
            if user.target is torch.ops.aten.as_strided.default:
                with graph.inserting_after(last):
                    last = graph.placeholder(f"view_{len(passed)}")
                last.meta["val"] = user.meta["val"]
                user.replace_all_uses_with(last)
                passed.append((index, tuple(user.args[1:])))
                graph.erase_node(user)
    own = [(index, ()) for index, node in enumerate(placeholders) if node.users]
    for node in placeholders:
        if not node.users:
            graph.erase_node(node)
    graph.lint()
    traced.recompile()
    return [*own, *passed], traced


def _names_strides(error: AssertionError) -> bool:
    """Whether Inductor's check of a tensor's strides raised ``error``; a user's operator may raise others."""
    return str(error).startswith("expected size ")


def _with_views(name: str, views: list[tuple[int, tuple[Any, ...]]], compiled: Any) -> RegionFunction:
    def call(inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        given = [inputs[i].as_strided(*args) if args else inputs[i] for i, args in views]
        inputs.clear()
        try:
            return tuple(compiled(given))
        except AssertionError as error:
            if not _names_strides(error):
                raise
            raise CompilerError(
                f"region {name} expected an operator's result in the strides of its fake tensor, found others: "
                f"{error}\nUse backend='eager' to run it on ATen kernels"
            ) from error

    return call
