"""zerofx's own operators (``zerofx/ir/ops.py``).

What they hold on a CPU is a formula where measuring would not do: kernels of attention and of products are compiled
after it is decided that a step uses them; of what is on the wire, a call of each size of bucket would take long; and
the sum of squares goes through large values in blocks, of which smaller calls do not tell.
"""

from __future__ import annotations

from torch import Tensor

from zerofx.ir.op_kernels import attention, fp8_slices, norms, products, quantise, saved
from zerofx.ir.operators.operator import Inductor, Operator


def _product_inside(left: Tensor, _right: Tensor, _bias: Tensor | None) -> int:
    return products.scratch_bytes(left)


def _product_into_inside(_into: Tensor, left: Tensor, _right: Tensor) -> int:
    return products.scratch_bytes(left)


def _square_sum_inside(values: Tensor) -> int:
    return norms.square_sum_workspace_bytes(values.numel(), values.dtype)


OPERATORS: dict[str, Operator] = {
    "zerofx::attention": Operator(inside=attention.forward_bytes),
    "zerofx::attention_backward": Operator(inside=attention.backward_bytes),
    "zerofx::product": Operator(inside=_product_inside),
    "zerofx::product_into": Operator(inside=_product_into_inside),
    "zerofx::quantise": Operator(inside=quantise.quantise_inside),
    "zerofx::dequantise": Operator(inside=quantise.dequantise_inside),
    "zerofx::dequantise_sum": Operator(inside=quantise.dequantise_sum_inside),
    "zerofx::quantise_saved": Operator(per_element=5, inside=saved.quantise_saved_inside),  # as fp8's, and the scale
    "zerofx::restore_saved": Operator(per_element=2, inside=saved.restore_saved_inside, inductor=Inductor.LOOP),
    "zerofx::square_sum": Operator(inside=_square_sum_inside, per_element=2),  # multiply, add
    "zerofx::softmax_chunk": Operator(per_element=5),  # max, subtract, exp, sum, compare
    "zerofx::softmax_gradient": Operator(per_element=4),  # subtract, exp, subtract, multiply
    **dict.fromkeys(  # magnitude, compare
        ("zerofx::fp8_largest", "zerofx::fp8_scale"), Operator(per_element=2, inductor=Inductor.REDUCTION)
    ),
    "zerofx::fp8_slice_largest": Operator(per_element=2, inside=lambda *_, **__: 0),
    "zerofx::fp8_slice_cast": Operator(per_element=3, inside=fp8_slices.cast_inside),
    "zerofx::fp8_cast": Operator(per_element=3, inductor=Inductor.LOOP),  # multiply, two bounds
    "zerofx::fp8_unscale": Operator(per_element=2, inductor=Inductor.LOOP),
    **dict.fromkeys(("zerofx::own_rows", "zerofx::whole_rows", "zerofx::own_ends"), Operator(per_element=0)),
    "zerofx::reduce_scatter": Operator(per_element=0),
}
