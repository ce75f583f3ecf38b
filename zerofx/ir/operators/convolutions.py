"""Convolutions, and what else is done to images.

oneDNN copies images, filters and results into layouts of its own, with channels rounded up to whole blocks; which, it
decides from shapes, strides and the processor. What a convolution holds for filters is the same for any number of
images; what it holds for images grows with their number and their rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from zerofx.ir.operators.operator import Operator, ResultLayout, Smaller, SmallerCall

_PRODUCTS_A_STEP = 8  # of a convolution, which takes less time for one than other products
_FEWEST_ROWS = 8  # of an image that is made smaller
_ALIKE = 16  # images from which on ATen hands all convolutions to oneDNN, on one thread


def _image_operator(argument: int) -> Operator:
    return Operator(layout=ResultLayout.OF_FORMAT, layout_arguments=(argument,))


def _steps(given: Sequence[Any], results: Sequence[Any]) -> int:
    return int(math.prod(results[0].shape) * math.prod(given[1].shape[1:])) // _PRODUCTS_A_STEP


def _backward_steps(given: Sequence[Any], _results: Sequence[Any]) -> int:
    return int(math.prod(given[0].shape) * math.prod(given[2].shape[1:])) // _PRODUCTS_A_STEP


def _smaller(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Smaller:
    """Fewer images, of fewer rows."""
    images, *rest = args
    return _pairs([SmallerCall(n * rows, [images.cut({0: n, 2: rows}), *rest], kwargs) for n, rows in _sizes(images)])


def _smaller_backward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Smaller:
    grad, images, filters, bias, *how = args
    parts = []
    for batch, rows in _sizes(images):
        cut = grad.cut({0: batch, 2: _rows_of_result(rows, filters.shape[2], *how)})
        parts.append(SmallerCall(batch * rows, [cut, images.cut({0: batch, 2: rows}), filters, bias, *how], kwargs))
    return _pairs(parts)


def _pairs(parts: Sequence[SmallerCall]) -> Smaller:
    """The whole call if it can be made, else the two largest of the others."""
    return Smaller(parts[0].num_parts, [(parts[0], parts[0]), *pairwise(parts[1:])])


def _rows_of_result(
    rows: int, filter_rows: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    is_transposed: bool, more: Sequence[int], *_: Any,
) -> int:  # fmt: skip
    reach = dilation[0] * (filter_rows - 1) - 2 * padding[0]
    return (rows - 1) * stride[0] + reach + more[0] + 1 if is_transposed else (rows - reach - 1) // stride[0] + 1


def _sizes(images: Any) -> Iterator[tuple[int, int]]:
    """Numbers of images and of their rows: all, then half as many in each. Sizes at which other kernels are used come
    last; a single image is dense where several are not."""
    batch, rows = images.shape[0], images.shape[2]
    yield batch, rows
    for fewest_images, fewest_rows in ((_ALIKE, rows), (_ALIKE, _FEWEST_ROWS), (2, _FEWEST_ROWS)):
        while batch >= 2 * fewest_images:
            batch //= 2
            yield batch, rows
        while rows >= 2 * fewest_rows:
            rows //= 2
            yield batch, rows


OPERATORS: dict[str, Operator] = {
    "convolution": Operator(steps=_steps, smaller=_smaller, copied_by_inductor=(0,)),
    "convolution_backward": Operator(steps=_backward_steps, smaller=_smaller_backward, copied_by_inductor=(0, 1)),
    "channel_shuffle": _image_operator(0),
    "max_unpool2d": _image_operator(0),
    "reflection_pad2d_backward": _image_operator(1),
    "reflection_pad3d": _image_operator(0),
    "reflection_pad3d_backward": _image_operator(1),
    "replication_pad2d_backward": _image_operator(1),
    "replication_pad3d": _image_operator(0),
    "replication_pad3d_backward": _image_operator(1),
}
