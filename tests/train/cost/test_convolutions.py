"""What a CPU's convolutions take, of any layout, and where they are too large to be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.cost.test_workspace import call
from zerofx.scheduler.cost.cpu import calls
from zerofx.scheduler.cost.cpu.peaks import CpuPeak
from zerofx.scheduler.cost.cpu.workspace import inductor_workspace_bytes, workspace_bytes

aten = torch.ops.aten
TOLERANCE_BYTES = 1024


def channel_by_channel(images: Tensor) -> Tensor:
    return images


def channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def half_of_channels_last(images: Tensor) -> Tensor:
    """As a model makes it that computes with channels last and takes some of them."""
    return channels_last(torch.cat([images, images], dim=1))[:, : images.shape[1]]


def half_of_channels(images: Tensor) -> Tensor:
    return torch.cat([images, images], dim=1)[:, : images.shape[1]]


def one_value(images: Tensor) -> Tensor:
    return images[:, :, :1, :1].contiguous().expand(images.shape)


LAYOUTS = [channel_by_channel, channels_last, half_of_channels_last, half_of_channels, one_value]


def forward(layout: Callable[[Tensor], Tensor], size: int, *, depthwise: bool, batch: int = 2) -> tuple[Any, ...]:
    images = layout(torch.rand(batch, 48, size, size))
    filters = torch.rand(48, 1, 7, 7) if depthwise else torch.rand(24, 48, 3, 3)
    padding = filters.shape[2] // 2
    return images, filters, None, [1, 1], [padding, padding], [1, 1], False, [0, 0], 48 if depthwise else 1


def backward(layout: Callable[[Tensor], Tensor], size: int, *, depthwise: bool, batch: int = 2) -> tuple[Any, ...]:
    images, filters, bias, *how = forward(layout, size, depthwise=depthwise, batch=batch)
    grad = torch.rand_like(aten.convolution.default(images, filters, bias, *how))
    return grad, images, filters, [0], *how, [True, True, False]


def taken(target: Any, args: tuple[Any, ...]) -> int:
    target(*args)
    with CpuPeak() as peak:
        made = target(*args)
    outputs = [one for one in (made if isinstance(made, tuple) else (made,)) if one is not None]
    return peak.num_bytes - sum(int(one.untyped_storage().nbytes()) for one in outputs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize("depthwise", [False, True])
def test_a_convolution_holds_what_is_predicted_whatever_the_layout(
    layout: Callable[[Tensor], Tensor], size: int, depthwise: bool
) -> None:
    for target, make in ((aten.convolution.default, forward), (aten.convolution_backward.default, backward)):
        args = make(layout, size, depthwise=depthwise)
        assert workspace_bytes(call(target, args)) == pytest.approx(taken(target, args), abs=TOLERANCE_BYTES)


# Of 32 images half are tried first, of two fewer rows.
@pytest.mark.sweep(5)
@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [2, 32])
@pytest.mark.parametrize("depthwise", [False, True])
def test_one_that_is_too_large_to_be_called_is_told_from_smaller_ones(
    monkeypatch: pytest.MonkeyPatch, layout: Callable[[Tensor], Tensor], batch: int, depthwise: bool
) -> None:
    for target, make in ((aten.convolution.default, forward), (aten.convolution_backward.default, backward)):
        args = make(layout, 64, depthwise=depthwise, batch=batch)
        given = sum(arg.numel() * arg.element_size() for arg in args if isinstance(arg, Tensor))
        monkeypatch.setattr(calls, "QUICK_BYTES", 0)
        monkeypatch.setattr(calls, "MOST_BYTES", given)
        assert workspace_bytes(call(target, args)) == pytest.approx(taken(target, args), rel=0.02, abs=given // 100)


def test_a_compiled_convolution_holds_no_more_than_with_its_images_copied() -> None:
    args = backward(channels_last, 6, depthwise=True)
    copied = backward(channel_by_channel, 6, depthwise=True)
    with_copies = taken(aten.convolution_backward.default, copied) + copied[1].untyped_storage().nbytes()
    # Which of the two is less is the processor's: its oneDNN may have a kernel of its own for channels last.
    expected = min(with_copies, taken(aten.convolution_backward.default, args))
    found = inductor_workspace_bytes(call(aten.convolution_backward.default, args), ())
    assert found == pytest.approx(expected, abs=TOLERANCE_BYTES)
