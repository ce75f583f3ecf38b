"""Checks in a traced joint graph, and refusals of unsupported nodes."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.capture.normalise.joint import Joint
from zerofx.errors import CaptureError
from zerofx.ir import ops
from zerofx.ir.facts import origin, placeholder, source_line, value
from zerofx.ir.operators.operator import OperatorKind
from zerofx.ir.operators.table import facts_of
from zerofx.ir.text import type_name
from zerofx.torch_private.operators import HigherOrderOperator, OpOverload


@dataclass(frozen=True)
class CheckResults:
    """Put results of linear algebra after their checks, instead of tokens.

        inverse, info = linalg_inv_ex(a)                             inverse, info = linalg_inv_ex(a)
        token = with_effects(token, _linalg_check_errors, info)  ->  checked = zerofx.checked(inverse, info)
        y = inverse @ x                                              y = checked @ x

    Torch orders checks by tokens, since nothing reads their results.

    Does not handle: other operators with tokens, which stay as they are and are refused (``NameInputs``).
    """

    name: str = "check_results"

    def run(self, joint: Joint) -> None:
        graph = joint.graph
        output = graph.output_node()
        for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
            token, target, *about = node.args
            assert isinstance(token, fx.Node)
            is_check = target is torch.ops.aten._linalg_check_errors.default
            if not is_check or not _check_result(graph, *about, **node.kwargs):
                continue
            for following in list(node.users):
                following.replace_all_uses_with(token)
                graph.erase_node(following)
            graph.erase_node(node)
            if token.op == "placeholder" and set(token.users) == {output}:
                output.args = ([None if argument is token else argument for argument in output.args[0]],)  # type: ignore[union-attr]
                graph.erase_node(token)


def _check_result(graph: fx.Graph, info: fx.Node, name: str, *, is_matrix: bool = True) -> bool:
    """Put a result of the operator that gave ``info`` after a check; False if no result is read."""
    call = info.args[0] if info.target is operator.getitem else None
    results = [entry for entry in call.users if entry is not info and entry.users] if isinstance(call, fx.Node) else []
    if not results:
        return False
    result = min(results, key=lambda output: output.args[1])  # type: ignore[arg-type,return-value]  # its place
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = max(result, info, key=order.__getitem__)
    with graph.inserting_after(last):
        checked = graph.call_function(ops.checked, (result, info, name, is_matrix))
    checked.meta = dict(result.meta)
    result.replace_all_uses_with(checked, lambda reader: reader is not checked and order[reader] > order[last])
    return True


_FP8_COLUMNS = 16  # which divides the number of columns of a product in fp8
_FP8_FROM = (8, 9)  # the compute capability
_FP8_OF_GROUPS = (9, 10)  # the first number of it


@dataclass(frozen=True)
class Refuse:
    """Refuse graphs that tracing accepts but no step can run.

        auto_functionalized_v2(mine::scale_, ...)   ->     CaptureError: expected a forward of operators that ...
        embedding(weight, ids, -1, False, True)     ->     CaptureError: expected dense gradients, ...
        mm(float64, float32)                        ->     CaptureError: expected the factors ... to have one dtype, ...
        _scaled_mm(float8_e5m2, float8_e5m2, ...)   ->     CaptureError: expected an fp8 product that a GPU has, ...

    Fake tensors have results for all of them. The bytes of a sparse tensor depend on its values. Nothing is rewritten.

    Does not handle: other operators whose kernels refuse what their fakes accept; a step fails where it calls those.
    """

    name: str = "refuse"

    def run(self, joint: Joint) -> None:
        _refuse_wrapped(joint.graph)
        _refuse_sparse(joint.graph)
        _refuse_sparse_values(joint)
        _refuse_mixed_products(joint.graph)
        _refuse_fp8_products(joint.graph, joint.capability)


def _refuse_wrapped(graph: fx.Graph) -> None:
    """Raise a ``CaptureError`` for higher-order operators around others, as torch uses for custom ones that write."""
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            wrapped = next((str(argument) for argument in node.args if isinstance(argument, OpOverload)), None)
            raise CaptureError(
                f"expected a forward of operators that only give new tensors, found {wrapped or node.target}, which "
                f"{'changes its arguments in place' if wrapped else 'calls others'}, in "
                f"{origin(node).layer or 'the model'}: have it return a new tensor in place of writing to one "
                f"(mutates_args=()), or take that part out of the training step"
            )


def _refuse_sparse(graph: fx.Graph) -> None:
    """Raise a ``CaptureError`` for an embedding whose gradient would be sparse."""
    aten = torch.ops.aten
    places = {aten.embedding.default: 4, aten._embedding_bag.default: 5}  # of the argument "sparse"
    for node in graph.nodes:
        place = places.get(node.target)
        if place is not None and len(node.args) > place and node.args[place]:
            raise CaptureError(
                f"expected dense gradients, found an embedding with sparse=True in "
                f"{origin(node).layer or 'the model'}: call it with sparse=False; gradients are reduced as flat buffers"
            )


def _refuse_sparse_values(joint: Joint) -> None:
    """Raise a ``CaptureError`` for a tensor that is not dense: a constant, or the result of an operator."""
    constants = joint.step.constants
    for node in joint.graph.nodes:
        held = constants.get(placeholder(node).name) if node.op == "placeholder" else node.meta.get("val")
        if isinstance(held, torch.Tensor) and held.layout is not torch.strided:
            reader = next(iter(node.users), node) if node.op == "placeholder" else node
            raise CaptureError(
                f"expected dense tensors, found one of layout {held.layout} in {origin(reader).layer or 'the model'}: "
                f"how many bytes it takes depends on its values, and a plan counts all. Call to_dense(), or keep its "
                f"indices and values as two buffers, and add up products with torch.Tensor.index_add"
            )


def _refuse_mixed_products(graph: fx.Graph) -> None:
    """Raise a ``CaptureError`` for a matrix product of several dtypes, which fake tensors have a result for."""
    for node in graph.nodes:
        is_product = facts_of(node.target).kind is OperatorKind.PRODUCT
        if is_product and len({value(source).dtype for source in node.all_input_nodes}) > 1:
            raise CaptureError(
                f"expected the factors of a matrix product to have one dtype, found "
                f"{', '.join(map(type_name, node.all_input_nodes))} in {origin(node).layer or 'the model'}: convert "
                f"the batch (x.float()), or what the layer is given, to the dtype of its weight"
            )


def _refuse_fp8_products(graph: fx.Graph, capability: tuple[int, int] | None) -> None:
    """Raise a ``CaptureError`` for a product in fp8 that fake tensors and CPUs have, and no GPU.

    Sizes and layouts are checked by torch's fakes, but for the columns of products of groups: rows of these begin at
    multiples of 16 bytes. Source: ``_scaled_mm``, ``_scaled_grouped_mm`` and ``_scaled_mm_allowed_device`` in
    ``aten/src/ATen/native/cuda/``. ``capability``: of the NVIDIA GPU, if any.
    """
    aten = torch.ops.aten
    of_groups = graph.find_nodes(op="call_function", target=aten._scaled_grouped_mm.default)
    for node in (*graph.find_nodes(op="call_function", target=aten._scaled_mm.default), *of_groups):
        left, right, scale = (value(source) for source in node.all_input_nodes[:3])
        obstacle, is_grouped = "", node.target == aten._scaled_grouped_mm.default
        if is_grouped and left.device.type == "cpu":
            obstacle = "groups on a CPU, which has no such kernel (plan it for a GPU: zerofx.plan(machine=...))"
        elif capability is not None and is_grouped and capability[0] not in _FP8_OF_GROUPS:
            obstacle = f"groups on a GPU of compute capability {_text(capability)} (9.x or 10.x: an H100, a B200)"
        elif capability is not None and capability < _FP8_FROM:
            obstacle = (
                f"a GPU of compute capability {_text(capability)} ({_text(_FP8_FROM)} or more: an RTX 4090, an H100)"
            )
        elif is_grouped and right.shape[-1] % _FP8_COLUMNS:
            obstacle = f"groups and {right.shape[-1]} columns (a multiple of {_FP8_COLUMNS})"
        elif left.dtype == right.dtype == torch.float8_e5m2:
            obstacle = "two factors in float8_e5m2 (give one of them in float8_e4m3fn)"
        elif scale.numel() > 1 and value(node).dtype == torch.float32:
            obstacle = "a scale for each row and a result in float32 (out_dtype=torch.bfloat16)"
        if obstacle and (is_grouped or left.device.type == "cuda"):
            raise CaptureError(
                f"expected an fp8 product that a GPU has, found one with {obstacle}, at\n"
                f"  {source_line(node) or origin(node).layer or 'the model'}"
            )


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
