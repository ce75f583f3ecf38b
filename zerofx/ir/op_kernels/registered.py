"""What runs for the operators of ``zerofx/ir/ops.py``: kernels for those that compute, and fakes for all of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from zerofx.ir.op_kernels import quantise as _quantise
from zerofx.ir.op_kernels import softmax as _softmax
from zerofx.ir.op_kernels.attention import empty_results as _empty_results
from zerofx.ir.op_kernels.norms import largest as _largest
from zerofx.ir.op_kernels.norms import square_sum as _square_sum
from zerofx.ir.op_kernels.products import empty_result as _empty_product
from zerofx.ir.op_kernels.value_gradients import masked_sum as _masked_sum
from zerofx.ir.op_kernels.value_gradients import prod_gradient as _prod_gradient


def _all_gather(
    shard: torch.Tensor, bucket: int, num_ranks: int, more: int = 0, *, in_place: bool = False, over: str = "shard"
) -> torch.Tensor:
    return shard.new_empty(shard.numel() * num_ranks)


def _first(given: torch.Tensor, *_args: object, **_options: object) -> torch.Tensor:
    return given


def _reduce_scatter(gradients: torch.Tensor, bucket: int, num_ranks: int, *, over: str = "shard") -> torch.Tensor:
    return gradients.new_empty(gradients.numel() // num_ranks)


def _reduce_scatter_into(gradients: torch.Tensor, bucket: int, num_ranks: int, *, over: str = "shard") -> torch.Tensor:
    return gradients.narrow(0, 0, gradients.numel() // num_ranks)


def _nothing(*_args: object) -> None:
    return None


def _empty_gradients(bucket: int, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _copy_of(value: torch.Tensor, *_args: object) -> torch.Tensor:
    return value.clone()


def _like(given: torch.Tensor, *_args: object, **_options: object) -> torch.Tensor:
    return given.new_empty_strided(given.shape, given.stride())


def _empty_stored(numel: int, dtype: torch.dtype, tier: str, *, device: torch.device) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _part(whole: torch.Tensor, size: list[int], stride: list[int], offset: int) -> torch.Tensor:
    return whole.as_strided(size, stride, whole.storage_offset() + offset)


def _mm_into(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    torch.mm(a, b, out=into)


def _bernoulli_into(into: torch.Tensor, chances: torch.Tensor | None, p: float) -> None:
    into.bernoulli_(p if chances is None else chances)


def _checked(value: torch.Tensor, info: torch.Tensor, name: str, is_matrix: bool) -> torch.Tensor:
    torch.ops.aten._linalg_check_errors(info, name, is_matrix=is_matrix)
    return value.clone()


def _asserted(value: torch.Tensor, holds: torch.Tensor, text: str) -> torch.Tensor:
    if not holds:
        raise RuntimeError(text)
    return value.clone()


def _empty_sum(values: torch.Tensor, mask: torch.Tensor, size: list[int]) -> torch.Tensor:
    return values.new_empty(size)


def _empty_prod_gradient(
    gradient: torch.Tensor, x: torch.Tensor, result: torch.Tensor, dim: int | None, keepdim: bool
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _embedding_gradient(grad: torch.Tensor, *args: Any) -> torch.Tensor:
    gradient: torch.Tensor = torch.ops.aten.embedding_dense_backward(grad, *args)
    return gradient


def _empty_embedding_gradient(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, *_args: object
) -> torch.Tensor:
    return grad.new_empty(num_weights, grad.shape[-1])


def _packed(values: torch.Tensor, num_parts: int, encoding: str, interleave: int = 1) -> torch.Tensor:
    return values.new_empty(
        num_parts * _quantise.packed_bytes(values.numel() // num_parts, encoding), dtype=torch.uint8
    )


def _unpacked(packed: torch.Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty(num_parts * _quantise.unpacked_numel(packed.numel() // num_parts, encoding), dtype=dtype)


def _unpacked_sum(packed: torch.Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty(_quantise.unpacked_numel(packed.numel() // num_parts, encoding), dtype=dtype)


def _stats(logits: torch.Tensor, target: torch.Tensor, first_class: int, stats: torch.Tensor | None) -> torch.Tensor:
    return logits.new_empty(3, logits.shape[0], dtype=torch.float32)


def _kernel_of(module: str, name: str) -> Callable[..., Any]:
    """A kernel's launch; what it takes to build kernels is imported with the first."""

    def launch(*args: Any) -> Any:
        return getattr(import_module(f"zerofx.codegen.{module}"), name)(*args)

    return launch


def _one_number(values: torch.Tensor) -> torch.Tensor:
    return values.new_empty(1, dtype=torch.float64)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_args: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_results(query)


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_args: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def implement(library: torch.library.Library) -> None:
    """Register kernels and fakes with the library that has defined the operators."""
    for module, name, kernel in (
        ("wire", "quantise", _quantise.quantise),
        ("wire", "dequantise", _quantise.dequantise),
        ("wire", "dequantise_sum", _quantise.dequantise_sum),
        ("norms", "square_sum", _square_sum),
    ):
        for key in ("CPU", "CUDA"):
            library.impl(name, kernel, key)
        library.impl(f"launch_{name}", kernel, "CPU")
        library.impl(f"launch_{name}", _kernel_of(f"kernels.{module}", name), "CUDA")

    for name, reference in (
        ("softmax_chunk", _softmax.softmax_chunk),
        ("softmax_gradient", _softmax.softmax_gradient),
    ):
        library.impl(name, reference, "CPU")
        library.impl(name, _kernel_of("kernels.softmax", name), "CUDA")

    for name in ("attention", "attention_backward"):
        library.impl(name, _kernel_of("cpu.attention", name), "CPU")

    for name in ("product", "product_into"):
        library.impl(name, _kernel_of("cpu.products", name), "CPU")

    library.impl("mm_into", _mm_into, "CompositeExplicitAutograd")
    library.impl("bernoulli_into", _bernoulli_into, "CompositeExplicitAutograd")
    library.impl("checked", _checked, "CompositeExplicitAutograd")
    library.impl("asserted", _asserted, "CompositeExplicitAutograd")
    library.impl("largest", _largest, "CompositeExplicitAutograd")
    library.impl("masked_sum", _masked_sum, "CompositeExplicitAutograd")
    library.impl("prod_gradient", _prod_gradient, "CompositeExplicitAutograd")
    library.impl("embedding_gradient", _embedding_gradient, "CompositeExplicitAutograd")
    library.impl("part", _part, "CompositeExplicitAutograd")  # a view is the same on any device

    for name, fake in (
        ("all_gather", _all_gather),
        ("all_gather_into", _first),
        ("reduce_scatter", _reduce_scatter),
        ("reduce_scatter_into", _reduce_scatter_into),
        ("wait", _first),
        ("release", _nothing),
        ("settle", _nothing),
        ("check_finite", _nothing),
        ("next_micro_batch", _nothing),
        ("check_gradients", _nothing),
        ("empty_gradients", _empty_gradients),
        ("broadcast", _nothing),
        ("offload", _like),
        ("reload", _like),
        ("copy_into", _first),
        ("empty_stored", _empty_stored),
        ("bernoulli_into", _nothing),
        ("checked", _copy_of),
        ("asserted", _copy_of),
        ("mm_into", _nothing),
        ("masked_sum", _empty_sum),
        ("prod_gradient", _empty_prod_gradient),
        ("embedding_gradient", _empty_embedding_gradient),
        ("product", _empty_product),
        ("product_into", _nothing),
        ("quantise", _packed),
        ("dequantise", _unpacked),
        ("dequantise_sum", _unpacked_sum),
        ("launch_quantise", _packed),
        ("launch_dequantise", _unpacked),
        ("launch_dequantise_sum", _unpacked_sum),
        ("softmax_chunk", _stats),
        ("softmax_gradient", _nothing),
        ("gather_on_node", _all_gather),
        ("exchange", _like),
        ("second_shard", _reduce_scatter),
        ("square_sum", _one_number),
        ("largest", _one_number),
        ("attention", _attention),
        ("attention_backward", _attention_backward),
        ("launch_square_sum", _one_number),
    ):
        library.impl(name, fake, "Meta")
