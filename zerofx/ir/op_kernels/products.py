"""Matrix products in float32 on CPUs: which of them are taken from ATen's BLAS, and the memory that one holds.

MKL, which torch's builds for x86 have for a BLAS, uses AVX-512 on Intel's processors alone. oneDNN, which they have as
well, writes its loops for the instructions that a processor has: it computes layers and the gradients of their inputs.
A weight's gradient has its left operand transposed, of which torch would make a copy for oneDNN: a kernel of ours
(``codegen/cpu/products.cpp``) computes it, from blocks of ``DEPTH`` rows of both operands.
"""

from __future__ import annotations

import torch

KERNEL = "products"  # in ZEROFX_KERNELS
DEPTH, LEFT_COLUMNS, RIGHT_COLUMNS = 512, 120, 512
CONSTANTS = f"constexpr long DEPTH = {DEPTH}, LEFT_COLUMNS = {LEFT_COLUMNS}, RIGHT_COLUMNS = {RIGHT_COLUMNS};\n"
_FEWEST = 8  # rows, columns and what is summed: with fewer, reading dominates
_FEWEST_MULTIPLICATIONS = 1 << 23  # less is not worth what a call takes
LONGEST = 16_384  # longer sums over a right operand that lies row by row are mostly slower in oneDNN than in MKL
_SIZES_BYTES = 56  # what the kernel is told
# The most of the left operand that a thread copies in oneDNN's loops for AVX-512: rows, and columns in whole vectors.
_ONEDNN_ROWS, _ONEDNN_COLUMNS, _ONEDNN_WIDTH, _ONEDNN_REST_BYTES = 64, 1024, 16, 1024


def is_worth_it() -> bool:
    """True if that is faster than the BLAS on this machine's processor."""
    capabilities = torch.cpu.get_capabilities()
    is_slow = bool(capabilities.get("avx512_f")) and str(capabilities.get("cpu_name", "")).startswith("AMD")
    return is_slow and torch.backends.mkl.is_available() and can_multiply()


def can_multiply() -> bool:
    """True if torch has oneDNN here, and may use it."""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def has_kernel(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, *, into: bool = False) -> bool:
    """True if ``left @ right (+ bias)`` is taken: matrices of float32 on a CPU, of some size, that are dense and
    row-major; the right one may be column-major (it must be for sums over more than ``LONGEST``), and, where it is not
    and there is no bias, the left one. ``into``: whether it is written over a tensor, as oneDNN's are not."""
    sizes = (*left.shape, right.shape[1])
    return (
        all(
            operand is None or (operand.dtype == torch.float32 and operand.device.type == "cpu")
            for operand in (left, right, bias)
        )
        and ((not into and _is_for_onednn(left, right, bias)) or (bias is None and _is_transposed(left, right)))
        and min(sizes) >= _FEWEST
        and sizes[0] * sizes[1] * sizes[2] >= _FEWEST_MULTIPLICATIONS
    )


def _is_for_onednn(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return (
        left.is_contiguous()
        and (right.t().is_contiguous() or (right.is_contiguous() and right.shape[0] <= LONGEST))
        and (bias is None or (bias.shape == (right.shape[1],) and bias.is_contiguous()))
    )


def _is_transposed(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.t().is_contiguous() and right.is_contiguous()


def scratch_bytes(left: torch.Tensor) -> int:
    """Peak memory of a product with ``left``: of oneDNN, a block of it for each thread."""
    if not left.is_contiguous():
        return scratch_numel(left.shape[1]) * left.element_size() + _SIZES_BYTES
    columns = min(-(-left.shape[1] // _ONEDNN_WIDTH) * _ONEDNN_WIDTH, _ONEDNN_COLUMNS)
    return torch.get_num_threads() * (_ONEDNN_ROWS * columns * left.element_size() + _ONEDNN_REST_BYTES)


def scratch_numel(depth: int) -> int:
    """Elements that the kernel holds for a sum over ``depth`` rows: a block of the right operand, and for each thread
    one of the left."""
    return min(depth, DEPTH) * (RIGHT_COLUMNS + torch.get_num_threads() * LEFT_COLUMNS)


def empty_result(left: torch.Tensor, right: torch.Tensor, _bias: torch.Tensor | None) -> torch.Tensor:
    """Memory for the product."""
    return left.new_empty(left.shape[0], right.shape[1])
