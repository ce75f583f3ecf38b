"""Kernels for CPUs in float32, compared with ATen's: attention, and the products that are not left to its BLAS."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.groups import Group
from zerofx.ir import ops
from zerofx.ir.op_kernels.products import has_kernel

# Samples, heads, tokens, dim: the benchmarks' GPT, a longer context, and wider heads.
ATTENTION_SHAPES = ((2, 8, 256, 64), (1, 8, 2048, 64), (1, 4, 1000, 128))
# Rows, inputs and outputs of a layer: those of the benchmarks' GPTs and Llama, and the output layer of GPT-2.
LAYERS = (
    (512, 512, 512), (512, 512, 2048), (512, 2048, 512), (512, 512, 8192), (512, 512, 1408), (512, 1408, 512),
    (512, 768, 2304), (512, 768, 3072), (512, 3072, 768), (512, 768, 50_257), (2048, 1024, 4096),
)  # fmt: skip
CACHED_BYTES = 128 << 20  # more than a processor's caches hold
_aten = torch.ops.aten


def groups() -> dict[str, tuple[Callable[[], Group], ...]]:
    """Of all shapes, by kernel; each with its tensors once it is called."""
    attention = (
        partial(attention_group, *shape, seen=seen, backward=backward)
        for shape in ATTENTION_SHAPES
        for seen in ("causal", "mask", "all")
        for backward in (False, True)
    )
    products = (partial(products_group, *layer, kind=kind) for layer in LAYERS for kind in ("layer", "input", "weight"))
    return {"attention": tuple(attention), "products": tuple(products)}


def attention_group(samples: int, heads: int, tokens: int, dim: int, *, seen: str, backward: bool) -> Group:
    """Attention, or its gradients, by ATen and by the kernel, of views of one product as models have them.

    ``seen``: "all", "causal", or "mask" for a causal mask that is given as a tensor, one for each sample.
    """
    packed = torch.randn(samples, tokens, 3 * heads * dim)
    query, key, value = (
        projected.unflatten(-1, (heads, dim)).transpose(1, 2) for projected in packed.split(heads * dim, -1)
    )
    is_causal = seen == "causal"
    mask = torch.full((samples, 1, tokens, tokens), -math.inf).triu(1) if seen == "mask" else None
    forward = partial(_aten._scaled_dot_product_flash_attention_for_cpu, attn_mask=mask)
    results = forward(query, key, value, 0.0, is_causal)
    grad, saved = torch.randn_like(results[0]), (query, key, value, *results)
    contenders: dict[str, Callable[[], object]] = {
        "torch": partial(forward, query, key, value, 0.0, is_causal),
        "kernel": partial(ops.attention, query, key, value, mask, is_causal, None),
    }
    if backward:
        theirs = partial(_aten._scaled_dot_product_flash_attention_for_cpu_backward, attn_mask=mask)
        contenders = {
            "torch": partial(theirs, grad, *saved, 0.0, is_causal),
            "kernel": partial(ops.attention_backward, grad, *saved, mask, is_causal, None),
        }
    name = f"attention {samples}x{heads}x{tokens}x{dim}"
    return Group(f"{name}{'' if seen == 'all' else f', {seen}'}{', backward' if backward else ''}", contenders)


def products_group(rows: int, num_inputs: int, num_outputs: int, *, kind: str) -> Group:
    """A layer's product (``kind`` "layer"), or that of its input's or weight's gradient, by ATen and as it is taken.

    Where it is left to ATen, the second is what it is not taken for.
    """
    each = 4 * (rows * num_inputs + rows * num_outputs + num_inputs * num_outputs)
    inputs = itertools.cycle(
        [
            (torch.randn(rows, num_inputs), torch.randn(num_outputs, num_inputs), torch.randn(rows, num_outputs))
            for _ in range(max(2, CACHED_BYTES // each))
        ]
    )

    def operands() -> tuple[Tensor, Tensor]:
        x, weight, grad = next(inputs)
        return {"layer": (x, weight.t()), "input": (grad, weight), "weight": (grad.t(), x)}[kind]

    into = torch.empty(num_outputs, num_inputs)
    name = "taken" if has_kernel(*operands(), None) else "not taken"
    contenders: dict[str, Callable[[], object]] = {
        "torch": lambda: torch.mm(*operands()),
        name: lambda: ops.product(*operands(), None),
    }
    if kind == "weight":  # written into its place, as in a bucket
        contenders = {
            "torch": lambda: torch.mm(*operands(), out=into),
            name: lambda: ops.product_into(into, *operands()),
        }
    of = {"layer": "", "input": ", gradient of the input", "weight": ", gradient of the weight"}[kind]
    return Group(f"layer {rows}x{num_inputs}x{num_outputs}{of}", contenders)
