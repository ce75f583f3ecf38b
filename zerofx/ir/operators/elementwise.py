"""Operators of one element at a time, and their gradients: what torch's tags do not say."""

from __future__ import annotations

from zerofx.ir.operators.operator import Inductor, Operator, ResultLayout, Traffic

_IN_ORDER = Operator(layout=ResultLayout.IN_ORDER)
_LISTS_OVERWRITTEN = Operator(of_lists=True, per_element=0, traffic=Traffic.OVERWRITES)


_FIRST_EXACTLY = Operator(reads_exactly=(0,))
_BOTH_EXACTLY = Operator(reads_exactly=(0, 1))


def _elementwise(*arguments: int, is_pointwise: bool = False, exactly: tuple[int, ...] = ()) -> Operator:
    return Operator(
        layout=ResultLayout.OF_OPERANDS, layout_arguments=arguments, is_pointwise=is_pointwise, reads_exactly=exactly
    )


def _image_elementwise(*arguments: int, exactly: tuple[int, ...] = ()) -> Operator:
    """Fakes of images have the strides of a memory format, kernels those of the operands' order. They differ only in
    dimensions of size 1, not in memory; but from these strides later tensors take their memory format."""
    return Operator(layout=ResultLayout.OF_IMAGES, layout_arguments=arguments, reads_exactly=exactly)


OPERATORS: dict[str, Operator] = {
    "_to_copy": Operator(is_pointwise=True, per_element=0),
    "masked_fill.Tensor": Operator(is_pointwise=True),
    "native_dropout": Operator(per_element=2, inductor=Inductor.LOOP, draws_by_shape=True),
    "native_dropout_backward": Operator(is_pointwise=True),
    "threshold_backward": Operator(inductor=Inductor.LOOP, layout=ResultLayout.OF_OPERANDS, layout_arguments=(1, 0)),
    # Gradients, and losses, which torch does not all tag as pointwise.
    "mse_loss_backward": _IN_ORDER,
    "smooth_l1_loss_backward": _IN_ORDER,
    "huber_loss_backward": _IN_ORDER,
    "log_sigmoid_backward": Operator(is_pointwise=True),
    "softplus_backward": _elementwise(0, 1, is_pointwise=True),
    "elu_backward": _elementwise(0, 5, is_pointwise=True),
    "hardswish_backward": _elementwise(0, 1, is_pointwise=True),
    "hardsigmoid_backward": _elementwise(0, 1),
    "hardtanh_backward": _elementwise(0, 1, is_pointwise=True),
    "logit_backward": _elementwise(0, 1),
    "leaky_relu_backward": _elementwise(1, 0, is_pointwise=True),
    "rrelu_with_noise_backward": _elementwise(2, 0),
    "binary_cross_entropy": _elementwise(0),
    "binary_cross_entropy_backward": _elementwise(1, exactly=(1,)),
    # Of two operands.
    "pow.Scalar": Operator(layout=ResultLayout.IN_ORDER, reads_exactly=(1,)),
    "div.Tensor_mode": _elementwise(0, 1, exactly=(1,)),
    "floor_divide": _elementwise(0, 1, exactly=(0, 1)),
    "copysign.Tensor": _elementwise(0, 1),
    "heaviside": _elementwise(0, 1),
    "logaddexp": _elementwise(0, 1),
    "logaddexp2": _elementwise(0, 1),
    "logical_and": _elementwise(0, 1),
    "logical_or": _elementwise(0, 1),
    "logical_xor": _elementwise(0, 1),
    "special_xlog1py": _elementwise(0, 1),
    "xlogy.Tensor": _elementwise(0, 1),
    "add.Tensor": _image_elementwise(0, 1),
    "sub.Tensor": _image_elementwise(0, 1),
    "mul.Tensor": _image_elementwise(0, 1),
    "div.Tensor": _image_elementwise(0, 1, exactly=(1,)),
    "rsub.Scalar": _image_elementwise(0, 1),
    "fmod.Scalar": _image_elementwise(0, 1),
    "remainder.Scalar": _image_elementwise(0, 1),
    "where.self": _image_elementwise(0, 1, 2),
    "clamp.Tensor": _image_elementwise(0, 1, 2),
    "hardtanh": _image_elementwise(0, 1),
    "eq.Scalar": _image_elementwise(0, 1, exactly=(0,)),
    "ne.Scalar": _image_elementwise(0, 1, exactly=(0,)),
    "lt.Scalar": _image_elementwise(0, 1, exactly=(0,)),
    "le.Scalar": _image_elementwise(0, 1, exactly=(0,)),
    "gt.Scalar": _image_elementwise(0, 1, exactly=(0,)),
    "ge.Scalar": _image_elementwise(0, 1, exactly=(0,)),
    # Of which a gradient may be far off where what they read is a little.
    **{f"{name}.Tensor": _BOTH_EXACTLY for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "reciprocal", "rsqrt"), _FIRST_EXACTLY),
    **dict.fromkeys(("sign", "sgn"), _FIRST_EXACTLY),
    "pow.Tensor_Tensor": _BOTH_EXACTLY,
    # Values that are drawn over others.
    "bernoulli": Operator(per_element=0),
    "bernoulli.p": Operator(per_element=0, draws_by_shape=True),
    "uniform": Operator(draws_by_shape=True),
    "normal_functional": Operator(draws_by_shape=True),
    "bernoulli_": Operator(traffic=Traffic.OVERWRITES),
    "cauchy_": Operator(traffic=Traffic.OVERWRITES),
    "exponential_": Operator(traffic=Traffic.OVERWRITES),
    "geometric_": Operator(traffic=Traffic.OVERWRITES),
    "log_normal_": Operator(traffic=Traffic.OVERWRITES),
    "normal_": Operator(traffic=Traffic.OVERWRITES),
    "random_": Operator(traffic=Traffic.OVERWRITES),
    "uniform_": Operator(traffic=Traffic.OVERWRITES),
    # The same to each tensor of a list: updates of many parameters
    "_foreach_copy_": _LISTS_OVERWRITTEN,
    "_foreach_zero_": _LISTS_OVERWRITTEN,
    "_foreach_*": Operator(of_lists=True),
    # Two moments (6), bias corrections (2), root, add, divide, step; decay (2).
    "_fused_adam_": Operator(of_lists=True, per_element=14),
    "_fused_adamw_": Operator(of_lists=True, per_element=14),
    "_fused_sgd_": Operator(of_lists=True, per_element=5),
    "_fused_adagrad_": Operator(of_lists=True, per_element=7),
}
