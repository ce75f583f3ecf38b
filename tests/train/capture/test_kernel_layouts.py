"""What kernels lay out otherwise than torch's fake tensors say is laid out, in the graph, as the kernels do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from zerofx.capture.compat.strides import kernel_layouts
from zerofx.torch_private.versions import TORCH

aten = torch.ops.aten


def _in_memory_order(*order: int) -> Tensor:
    """Random values whose dimensions lie in memory in this order, the outermost first."""
    sizes = (3, 4, 6, 8, 5)[: len(order)]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return torch.randn([sizes[dim] for dim in order]).permute(inverse)


def _normalised(x: Tensor) -> tuple[Tensor, ...]:
    weight = torch.ones(x.shape[1])
    mean, variance = weight * 0, weight * 1
    return (
        aten.native_batch_norm(x, weight, None, mean, variance, True, 0.1, 1e-5)[0],
        aten._native_batch_norm_legit(x, weight, None, mean, variance, True, 0.1, 1e-5)[0],
        aten._native_batch_norm_legit.no_stats(x, weight, None, True, 0.1, 1e-5)[0],
        aten._native_batch_norm_legit_functional(x, weight, None, mean, variance, True, 0.1, 1e-5)[0],
        aten._native_batch_norm_legit_no_training(x, weight, None, mean, variance, 0.1, 1e-5)[0],
    )


def _normalised_backward(x: Tensor) -> tuple[Tensor, ...]:
    ones = torch.ones(x.shape[1])
    given = (ones, ones, ones, ones, ones, True, 1e-5, [True, False, False])
    in_order = x.contiguous()
    return aten.native_batch_norm_backward(x, in_order, *given)[0], aten.native_batch_norm_backward(
        in_order, x, *given
    )[0]


def _losses_backward(x: Tensor) -> tuple[Tensor, ...]:
    one, y = torch.ones(()), x.contiguous()
    return (
        aten.mse_loss_backward(one, x, y, 1),
        aten.smooth_l1_loss_backward(one, x, y, 1, 1.0),
        aten.huber_loss_backward(one, x, y, 1, 1.0),
    )


def _padded(x: Tensor) -> tuple[Tensor, ...]:
    backward = [aten.reflection_pad2d_backward, aten.replication_pad2d_backward]
    return tuple(one(x.contiguous(), x[..., 1:-1, 1:-1].clone(), [1] * 4) for one in backward)


def _padded_in_three_dimensions(x: Tensor) -> tuple[Tensor, ...]:
    forward = [aten.reflection_pad3d, aten.replication_pad3d]
    backward = [aten.reflection_pad3d_backward, aten.replication_pad3d_backward]
    inner = x[..., 1:-1, 1:-1, 1:-1].clone()
    return (*(one(x, [1] * 6) for one in forward), *(one(x.contiguous(), inner, [1] * 6) for one in backward))


def _unpooled(x: Tensor) -> tuple[Tensor, ...]:
    pooled, places = functional.max_pool2d(x, 2, return_indices=True)
    return (aten.max_unpool2d(pooled, places, [2 * size for size in pooled.shape[2:]]),)


def _shuffled(x: Tensor) -> tuple[Tensor, ...]:
    return (aten.channel_shuffle(x, 2),)


def _rolled(x: Tensor) -> tuple[Tensor, ...]:
    return aten.roll(x, [1, 2], [2, 3]), aten.roll(x, [1], [0])


def _of_two_orders(x: Tensor) -> tuple[Tensor, ...]:
    y = x.contiguous()
    ones = torch.ones(*y.shape[:-1], 1)
    likely, target = x.sigmoid(), y.sigmoid()
    return (
        aten.softplus_backward(y, x, 1.0, 20.0),
        aten.elu_backward(y, 1.0, 1.0, 1.0, False, x),
        aten.hardswish_backward(y, x),
        aten.hardsigmoid_backward(y, x),
        aten.hardtanh_backward(y, x, -1.0, 1.0),
        aten.logit_backward(y, likely, 1e-3),
        aten.rrelu_with_noise_backward(y, y, x, 0.1, 0.3, True, False),
        aten.binary_cross_entropy(target, likely, None, 0),
        aten.binary_cross_entropy_backward(y, likely, target, None, 0),
        aten.div.Tensor_mode(y, x, rounding_mode="floor"),
        aten.floor_divide(y, x),
        aten.copysign(y, x),
        aten.special_xlog1py(y, likely),
        aten.xlogy(y, likely),
        aten.native_layer_norm_backward(x, y, y.shape[-1:], ones, ones, None, None, [True, False, False])[0],
        aten._log_softmax_backward_data(x, y, -1, torch.float32),
        aten.pow(2.0, x),
    )


def _of_a_column(x: Tensor) -> tuple[Tensor, ...]:
    column = x[..., :1].contiguous()
    return (
        aten.threshold_backward(x, column.expand(x.shape), 0.0),
        aten.leaky_relu_backward(x, column.expand(x.shape), 0.1, False),
        aten.heaviside(column, x),
        aten.logaddexp(column, x),
        aten.logaddexp2(column, x),
        aten.logical_and(column, x),
        aten.logical_or(column, x),
        aten.logical_xor(column, x),
    )


CHANNELS_LAST = [(0, 2, 3, 1), (0, 2, 3, 4, 1)]
OTHERS = [(1, 0), (0, 2, 1), (1, 0, 2, 3), (0, 1, 3, 2)]


@pytest.mark.parametrize(
    ("function", "orders"),
    [
        (_normalised, OTHERS),
        (_normalised_backward, CHANNELS_LAST + OTHERS),
        (_losses_backward, CHANNELS_LAST + OTHERS),
        (_of_two_orders, CHANNELS_LAST + OTHERS),
        (_of_a_column, [(0, 2, 1), (0, 1, 3, 2)]),
        (_padded, CHANNELS_LAST[:1]),
        (_padded_in_three_dimensions, CHANNELS_LAST[1:]),
        (_unpooled, CHANNELS_LAST[:1]),
        (_shuffled, CHANNELS_LAST[:1]),
        (_rolled, CHANNELS_LAST),
    ],
)
def test_the_traced_strides_are_the_kernels(
    function: Callable[[Tensor], tuple[Tensor, ...]], orders: list[tuple[int, ...]]
) -> None:
    wrong_in_torch = set()
    for x in (_in_memory_order(*order) for order in orders):
        expected = function(x)
        strides = [one.stride() for one in expected]
        wrong_in_torch |= {i for i, fake in enumerate(_traced(function, x, {})[1]) if fake != strides[i]}
        traced, fakes = _traced(function, x, kernel_layouts(torch.device("cpu")))
        results = traced(x)
        assert fakes == strides == [one.stride() for one in results]
        assert all(torch.equal(result, one) for result, one in zip(results, expected, strict=True))
    right = {0} if function is _unpooled and TORCH >= (2, 14) else set()
    assert wrong_in_torch == set(range(len(strides))) - right, "torch's fakes have become right: no need to decompose"


def _traced(function: Callable[[Tensor], Any], x: Tensor, table: dict[Any, Any]) -> tuple[fx.GraphModule, list[Any]]:
    """The graph of a function, and the strides of its results' fakes."""
    traced = make_fx(function, decomposition_table=table, tracing_mode="fake")(x)
    results = traced.graph.output_node().all_input_nodes
    return traced, [one.meta["val"].stride() for one in results]


@pytest.mark.parametrize(("shifts", "dims"), [([0, 1], [2, 3]), ([1, 6], [1, 2]), ([1], [])])
def test_what_is_rolled_by_nothing_is_laid_out_in_order(shifts: list[int], dims: list[int]) -> None:
    x = _in_memory_order(*CHANNELS_LAST[0])
    expected = aten.roll(x, shifts, dims)
    traced, fakes = _traced(lambda x: (aten.roll(x, shifts, dims),), x, kernel_layouts(torch.device("cpu")))
    assert fakes == [expected.stride()] == [one.stride() for one in traced(x)]


def test_a_number_has_no_order() -> None:
    def halved(x: Tensor) -> tuple[Tensor, ...]:
        return x // 2, aten.binary_cross_entropy(x.sigmoid(), x.sigmoid().contiguous())

    x = _in_memory_order(0, 2, 1)
    traced, fakes = _traced(halved, x, kernel_layouts(torch.device("cpu")))
    assert fakes == [x.stride(), ()] == [one.stride() for one in traced(x)]


def test_nothing_can_be_rolled() -> None:
    traced, _ = _traced(_rolled, _in_memory_order(*CHANNELS_LAST[0])[:0], kernel_layouts(torch.device("cpu")))
    assert not traced.graph.find_nodes(op="call_function", target=aten.clone.default)


def test_what_a_kernel_lays_out_as_its_fake_is_not_copied() -> None:
    for x in (torch.randn(3, 4, 6), torch.randn(3, 4, 6, 8).to(memory_format=torch.channels_last)):
        traced, _ = _traced(_normalised, x, kernel_layouts(torch.device("cpu")))
        assert not traced.graph.find_nodes(op="call_function", target=aten.clone.default)
