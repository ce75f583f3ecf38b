"""What random graphs pick, place, join and turn, and sums over windows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.nets.cases.random_graphs import Drawing, Operator


def _where(d: Drawing) -> Tensor:
    x = d.any(1)
    mask, s = d.mask(*x.shape[-1:]), d.number()
    return d.draw(
        lambda: torch.where(mask, x, d.like(x)), lambda: torch.where(mask, x, s), lambda: torch.where(mask, s, x),
        lambda: x.masked_fill(mask, s), lambda: x.masked_fill(~mask, s).tanh(), lambda: x * mask,
        lambda: torch.where(d.operand(*x.shape).detach() > s, x, d.number()), lambda: x * (d.operand(*x.shape) > 0),
        lambda: x.masked_scatter(d.mask(*x.shape), d.operand(x.numel())),
    )  # fmt: skip


def _indexed(d: Drawing) -> Tensor:
    x = d.any(1)
    dim = d.dim(x)
    size = x.shape[dim]
    index = d.indices((d.size(),), size)
    whole = d.indices(x.shape, size)
    return d.draw(
        lambda: x.index_select(dim, index), lambda: x.gather(dim, whole), lambda: torch.take_along_dim(x, whole, dim),
        lambda: x[d.indices((3,), x.shape[0]) - x.shape[0]], lambda: x[..., d.indices((2, 2), x.shape[-1])],
        lambda: x.select(dim, -1), lambda: x.take(d.indices((4,), x.numel())),
        lambda: torch.where(d.mask(*x.shape).any(), x, x.neg()),
        lambda: x.narrow(dim, size - 1, 1), lambda: x[d.order(x.shape[0])], lambda: x[:, None][-1:],
        lambda: x[..., -1:],
    )  # fmt: skip


def _embedding(d: Drawing) -> Tensor:
    table, index = d.tensor(7, d.columns), d.indices((d.rows, 3), 7)
    return d.draw(
        lambda: F.embedding(index, table, padding_idx=d.pick(None, 0, -1), scale_grad_by_freq=d.flag()),
        lambda: F.embedding_bag(index, table, mode=d.pick("sum", "mean"), padding_idx=d.pick(None, 2)),
        lambda: F.one_hot(index, 7).to(d.dtype) @ table,
    )


def _written(d: Drawing) -> Tensor:
    x = d.any(1)
    dim, s = d.dim(x), d.number()
    size = x.shape[dim]
    like, order = d.operand(*x.shape), d.order(size)
    one = like.select(dim, 0)

    def whole() -> Tensor:
        return d.indices(x.shape, size)

    return d.draw(
        lambda: x.index_add(dim, d.indices((size,), size), like, alpha=s), lambda: x.index_copy(dim, order, like),
        lambda: x.index_fill(dim, d.order(1), s), lambda: x.scatter_add(dim, d.indices(x.shape, size), like),
        lambda: x.scatter(dim, d.indices((1,) * x.dim(), size), s),
        lambda: x.scatter(dim, d.indices((1,) * x.dim(), size), like[(slice(1),) * x.dim()]),
        lambda: x.scatter_reduce(dim, whole(), like, d.pick("sum", "mean", "amax"), include_self=d.flag()),
        lambda: x.select_scatter(one, dim, -1), lambda: x.slice_scatter(like.narrow(dim, 0, 1), dim, size - 1, size),
        lambda: x.index_put((d.indices((4,), x.shape[0]),), like[:1], accumulate=True),
        lambda: torch.full(x.shape, 2.5, dtype=d.dtype).scatter(dim, d.indices(one.unsqueeze(dim).shape, size), s) * x,
        lambda: torch.diagonal_scatter(d.tensor(4, 4), d.operand(3), d.pick(-1, 1)),
    )  # fmt: skip


def _assigned(d: Drawing) -> Tensor:
    x = d.any(2).clone()
    y, s = d.operand(*x.shape), d.number()
    if d.flag():
        x[..., : d.size()] = s
    if d.flag():
        x[0] = y[-1] * s
    if d.flag():
        x[-1:].add_(y[:1], alpha=s)
    if d.flag():
        x[..., ::2] *= y[..., ::2]
    if d.flag():
        x.clamp_(d.pick(-0.3, 0), 2).mul_(s).sub_(y, alpha=2)
    if d.flag():
        x.masked_fill_(d.mask(*x.shape), s)
    return x.t_() if x.dim() == 2 and d.flag() else x * y


def _joined(d: Drawing) -> Tensor:
    x = d.any(2)
    y, dim = d.operand(*x.shape), d.dim(x)
    size = d.pick(1, x.shape[1])
    both = torch.cat([x, y], 1)
    return d.draw(
        lambda: torch.cat([x, y], dim), lambda: torch.stack([x, y, x], dim),
        lambda: torch.cat([both, both[:, :size]], 1),
        lambda: torch.cat([x], dim), lambda: torch.cat([both, both[:, : size + 1]], 1), lambda: torch.hstack([x, y]),
        lambda: torch.cat([x, x.narrow(dim, 0, 1), y * 2], dim), lambda: torch.cat([both, both[:, -1:]], 1),
    )  # fmt: skip


def _split(d: Drawing) -> Tensor:
    x = d.any(2)
    dim = d.dim(x)
    x = torch.cat([x, d.operand(*x.shape)], dim)
    size = x.shape[dim]
    sizes = d.pick([1, size - 1], [size - 1, 1], [size // 2, size - size // 2])
    parts = list(torch.split(x, sizes, dim))
    joined = torch.cat([*parts, d.operand(*x.shape)], dim).split([*sizes, size], dim)
    return d.draw(
        lambda: torch.cat(parts, dim), lambda: torch.cat(parts[::-1], dim),
        lambda: torch.cat([*parts, parts[0]], dim),
        lambda: torch.cat(parts, d.pick(dim, dim % x.dim())), lambda: torch.cat(list(joined), dim),
        lambda: joined[0] * d.number(), lambda: x.chunk(2, dim)[1], lambda: torch.stack(x.unbind(dim), d.dim(x)),
        lambda: F.glu(torch.cat([x, x * 2], dim), dim), lambda: torch.cat([part * 2 for part in parts], dim),
        lambda: torch.cat([*joined[:-1]], dim),
    )  # fmt: skip


def _moved(d: Drawing) -> Tensor:
    x = d.any(2)
    dim, other, s = d.dim(x), d.dim(x), d.pick(1, 2, -1)
    return d.draw(
        lambda: x.transpose(dim, other), lambda: x.flip(d.dims(x)), lambda: x.roll(s, dim), lambda: x.roll(s),
        lambda: x.movedim(dim, other), lambda: x.repeat(*[1] * (x.dim() - 1), 2), lambda: x.repeat(*[1] * x.dim()),
        lambda: x.tile(2), lambda: x.repeat_interleave(2, dim), lambda: torch.rot90(x, s, [0, 1]), lambda: x.tril(s),
        lambda: x.triu(s), lambda: x.diagonal(0, 0, 1), lambda: torch.diag_embed(x, s), lambda: x.reshape(-1),
        lambda: x.flatten(0, 1), lambda: x.unsqueeze(dim), lambda: x.reshape(x.shape[::-1]),
        lambda: x.mT.contiguous(),
        lambda: x.unfold(dim, 1, 1), lambda: x.expand(2, *x.shape), lambda: x.trace() if x.dim() == 2 else x.sum(),
        lambda: x.permute(*range(x.dim())[::-1]).reshape(x.shape), lambda: x.squeeze(),
        lambda: x.as_strided((x.shape[0],), (1,)),
    )  # fmt: skip


def _padded(d: Drawing) -> Tensor:
    x = d.any(2)
    image = d.operand(2, 3, 6, 5)
    return d.draw(
        lambda: F.pad(x, d.pick((1, 2), (0, 1, 2, 0), (-1, 2), (0, 0)), value=d.number()),
        lambda: F.pad(image, (1, 2, 0, 1), mode=d.pick("reflect", "replicate", "circular")),
        lambda: F.pad(image, (0, 0, 1, -1), value=d.number()), lambda: F.pad(image * 2, (1, 1), value=d.number()),
        lambda: F.pixel_shuffle(torch.cat([image, image[:, :1]], 1), 2),
        lambda: F.interpolate(image, scale_factor=d.pick(2, 1.5), mode="nearest"),
        lambda: F.interpolate(image, size=(4, 9), mode=d.pick("bilinear", "bicubic"), align_corners=d.flag()),
        lambda: F.unfold(image, 2, dilation=1, padding=d.pick(0, 1), stride=d.pick(1, 2)),
    )  # fmt: skip


def _convolution(d: Drawing) -> Tensor:
    groups, stride = d.pick(1, 2), d.pick(1, 2)
    padding, dilation = d.pick(0, 1, 2), d.pick(1, 2)
    bias = d.tensor(4) if d.flag() else None
    if d.flag():
        return F.conv1d(d.tensor(2, 4, 11), d.operand(4, 4 // groups, 3), bias, stride, padding, dilation, groups)
    if d.flag():
        return F.conv_transpose2d(
            d.tensor(2, 4, 5, 6), d.operand(4, 4 // groups, 3, 2), None, stride, 1, 0, groups, dilation
        )
    return F.conv2d(d.tensor(2, 4, 7, 8), d.operand(4, 4 // groups, 3, 2), bias, stride, padding, dilation, groups)


def _pooled(d: Drawing) -> Tensor:
    x = d.tensor(2, 3, 8, 7)
    ceil, stride = d.flag(), d.pick(1, 2, 3)
    divisor = d.pick(None, 3)
    return d.draw(
        lambda: F.avg_pool2d(x, 3, stride, 1, ceil, d.flag(), divisor),
        lambda: F.adaptive_avg_pool2d(x, d.pick(2, (3, 1))),
        lambda: F.avg_pool1d(x[0], 2, stride, 1, ceil, d.flag()),
        lambda: F.lp_pool2d(x.abs() + 0.5, 2, 2, stride, ceil),
        lambda: x.mean((2, 3), keepdim=d.flag()),
    )  # fmt: skip


def _max_pooled(d: Drawing) -> Tensor:
    x = d.operand(2, 3, 8, 7) * d.number()
    return d.draw(
        lambda: F.max_pool2d(x, 3, d.pick(1, 2), 1, d.pick(1, 2), d.flag()),
        lambda: F.adaptive_max_pool2d(x, (3, 2)),
        lambda: F.max_pool1d(x[0], 2, d.pick(1, 2), 1),
    )


OPERATORS: dict[str, Operator] = {
    "where": _where,
    "index": _indexed,
    "embedding": _embedding,
    "scatter": _written,
    "in place": _assigned,
    "cat": _joined,
    "split": _split,
    "views": _moved,
    "pad": _padded,
    "convolution": _convolution,
    "avg_pool": _pooled,
    "max_pool": _max_pooled,
}
