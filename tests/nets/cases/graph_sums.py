"""What random graphs sum, compare or normalise along dimensions, and their losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.nets.cases.random_graphs import Drawing, Operator


def _sum(d: Drawing) -> Tensor:
    x = d.any(1)
    dims, keep = d.dims(x), d.flag()
    wide = torch.float64 if d.flag() else None
    return d.draw(
        lambda: x.sum(dims, keepdim=keep, dtype=wide).to(x.dtype),
        lambda: x.mean(dims, keepdim=keep, dtype=wide).to(x.dtype),
        lambda: x.sum(), lambda: x.nansum(dims, keepdim=keep), lambda: torch.logsumexp(x, dims, keepdim=keep),
        lambda: x.prod(dims[0], keepdim=keep), lambda: x.mean(),
    )  # fmt: skip


def _spread(d: Drawing) -> Tensor:
    x = d.operand(d.rows, d.columns + 2)
    y = d.any(1)
    dim, keep = d.pick(1, -1), d.flag()
    spread = d.draw(
        lambda: x.var(dim, correction=d.pick(0, 1, 2), keepdim=keep),
        lambda: x.std(dim, unbiased=d.flag(), keepdim=keep),
        lambda: torch.var_mean(x, dim, correction=d.pick(0, 1))[d.pick(0, 1)], lambda: x.var(), lambda: x.std([0, 1]),
    )  # fmt: skip
    return d.draw(lambda: spread, lambda: y * spread.sum())


def _largest(d: Drawing) -> Tensor:
    x = d.any(1)
    dim, keep = d.dim(x), d.flag()
    return d.draw(
        lambda: x.amax(d.dims(x), keepdim=keep), lambda: x.amin(dim, keepdim=keep),
        lambda: x.max(dim, keepdim=keep)[0],
        lambda: x.min(dim, keepdim=keep)[0], lambda: x.max(), lambda: x.median(dim, keepdim=keep)[0],
        lambda: x.sort(dim, descending=d.flag())[0], lambda: x.topk(1, dim, largest=d.flag())[0],
        lambda: x.cummax(dim)[0], lambda: x.kthvalue(1, dim, keepdim=keep)[0], lambda: x - x.amax(dim, keepdim=True),
        lambda: x.cummin(dim)[0],
    )  # fmt: skip


def _norm(d: Drawing) -> Tensor:
    x = d.any(1)
    dims, keep = d.dims(x), d.flag()
    return d.draw(
        lambda: x.norm(p=d.pick(2, 3, 1.5), dim=dims, keepdim=keep),
        lambda: F.normalize(x, p=d.pick(2, 3), dim=dims[0]),
        lambda: torch.linalg.vector_norm(x, d.pick(2, 1.5), dims, keepdim=keep), lambda: x.norm(),
        lambda: F.cosine_similarity(x, d.operand(*x.shape), dim=dims[0], eps=d.pick(1e-8, 0.1)),
        lambda: torch.renorm(d.operand(d.rows, d.columns), 2, d.pick(0, 1), d.positive_number()),
        lambda: F.pairwise_distance(x, d.operand(*x.shape) + 3, p=d.pick(2, 3), eps=d.pick(1e-6, 0.2), keepdim=keep),
    )  # fmt: skip


def _softmax(d: Drawing) -> Tensor:
    x = d.any(1)
    scale, dim = d.pick(0.5, 2, -1.5, 1), d.dim(x)
    scaled = d.draw(lambda: x * scale, lambda: x / scale, lambda: x)
    wide = d.pick(None, torch.float64)
    result: Tensor = d.pick(F.softmax, F.log_softmax, F.softmin)(scaled, dim=dim, dtype=wide).to(d.dtype)
    return result


def _own_softmax(d: Drawing) -> Tensor:
    """As people write it."""
    x = d.any(1) * d.pick(0.7, -2)
    dim = d.dim(x)
    raised = torch.exp(torch.sub(x, x.amax(dim, keepdim=True), alpha=d.pick(1, 0.5)))
    return raised / raised.sum(dim, keepdim=True, dtype=d.pick(None, torch.float64)).to(d.dtype)


def _running(d: Drawing) -> Tensor:
    x = d.any(1)
    dim = d.dim(x)
    return d.draw(
        lambda: x.cumsum(dim), lambda: x.cumsum(dim, dtype=torch.float64).to(d.dtype), lambda: x.cumprod(dim),
        lambda: x.logcumsumexp(dim), lambda: x.diff(dim=dim) if x.shape[dim] > 1 else x,
        lambda: x.flip(dim).cumsum(dim),
    )  # fmt: skip


def _layer_norm(d: Drawing) -> Tensor:
    x, eps = d.any(1), d.pick(1e-5, 0.1, 1)
    shape = x.shape[-1:]
    if d.flag():
        return F.layer_norm(x, shape, d.operand(*shape), d.operand(*shape) if d.flag() else None, eps=eps)
    return F.rms_norm(x, shape, d.operand(*shape) if d.flag() else None, eps=eps)


def _batch_norm(d: Drawing) -> Tensor:
    x, eps = d.operand(d.rows + 1, 4, d.columns), d.pick(1e-5, 0.1, 1)
    mean, var = d.constant_operand(4), d.constant_operand(4).square()
    scale, shift = d.operand(4), d.operand(4)
    return d.draw(
        lambda: F.batch_norm(x, mean.clone(), var.clone(), scale, shift, True, d.pick(0.1, 0.5), eps),
        lambda: F.batch_norm(x, mean, var, scale, shift, False, 0.1, eps),
        lambda: F.group_norm(x, d.pick(1, 2, 4), scale, shift, eps),
        lambda: F.instance_norm(torch.cat([x, x * 2], 2), weight=scale, bias=shift, eps=eps),
        lambda: F.local_response_norm(x, d.pick(2, 3), alpha=d.positive_number(), beta=0.75, k=d.pick(1.0, 2.0)),
    )


def _loss(d: Drawing) -> Tensor:
    x = d.any(2, 2)
    y, reduction = d.operand(*x.shape), d.pick("mean", "sum", "none")
    p = d.positive_number()
    return d.draw(
        lambda: F.mse_loss(x, y, reduction=reduction),
        lambda: F.smooth_l1_loss(x, y, reduction=reduction, beta=p),
        lambda: F.huber_loss(x, y, reduction=reduction, delta=p),
        lambda: F.soft_margin_loss(x, y.detach(), reduction=reduction),
        lambda: F.kl_div(x, y.tanh() if (log := d.flag()) else y.abs(), reduction=reduction, log_target=log),
        lambda: F.binary_cross_entropy_with_logits(
            x,
            y.detach().sigmoid(),
            reduction=reduction,
            pos_weight=d.positive(x.shape[1]).detach() if d.flag() else None,
        ),
        lambda: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction),
        lambda: F.gaussian_nll_loss(x, y, y.square(), full=d.flag(), eps=d.pick(1e-6, 0.5), reduction=reduction),
        lambda: F.poisson_nll_loss(x.tanh(), y.abs(), log_input=d.flag() or True, full=False, reduction=reduction),
        lambda: F.multilabel_soft_margin_loss(x, d.mask(*x.shape).to(d.dtype), reduction=reduction),
        lambda: F.margin_ranking_loss(x, y, d.mask(*x.shape).to(d.dtype) * 2 - 1, margin=p, reduction=reduction),
        lambda: F.hinge_embedding_loss(x, d.mask(*x.shape).to(d.dtype) * 2 - 1, margin=p, reduction=reduction),
        lambda: F.triplet_margin_loss(x, y + 2, y - 3, margin=p, p=d.pick(2, 3), reduction=reduction),
        lambda: F.cosine_embedding_loss(x, y, d.mask(x.shape[0]).to(d.dtype) * 2 - 1, margin=0.2, reduction=reduction),
    )


def _classes(d: Drawing) -> Tensor:
    x = d.any(2, 2)
    labels, reduction = d.indices((x.shape[0],), x.shape[1]), d.pick("mean", "sum", "none")
    weight = d.positive(x.shape[1]).detach() if d.flag() else None
    ignored = d.pick(-100, 0)
    smoothing = d.pick(0.0, 0.1, 0.4)
    return d.draw(
        lambda: F.cross_entropy(x, labels, weight, ignore_index=ignored, label_smoothing=smoothing, reduction="sum"),
        lambda: F.cross_entropy(x, labels, weight, label_smoothing=smoothing, reduction=reduction),
        lambda: F.cross_entropy(
            x, d.operand(*x.shape).softmax(1), weight, label_smoothing=smoothing, reduction=reduction
        ),
        lambda: F.nll_loss(x.log_softmax(-1), labels, weight, reduction=reduction),
        lambda: F.multi_margin_loss(x, labels, p=d.pick(1, 2), margin=d.positive_number(), reduction=reduction),
    )


def _attention(d: Drawing) -> Tensor:
    heads, inner = d.pick(1, 2), d.pick(4, 8)
    q, k, v = (
        d.tensor(2, heads, d.rows, inner),
        d.tensor(2, heads, d.columns, inner),
        d.tensor(2, heads, d.columns, inner),
    )
    mask = d.pick(None, torch.cat([torch.ones(d.rows, 1, dtype=torch.bool), d.mask(d.rows, d.columns)[:, 1:]], 1))
    causal = mask is None and d.flag()
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=d.pick(None, 0.3, 1.0))


def _own_attention(d: Drawing) -> Tensor:
    """As people write it."""
    inner = d.pick(4, 8)
    q, k, v = d.tensor(2, d.rows, inner), d.tensor(2, d.columns, inner), d.tensor(2, d.columns, inner)
    scores = d.draw(
        lambda: q @ k.mT * d.number(), lambda: q @ k.mT / d.positive_number(),
        lambda: torch.baddbmm(d.tensor(1, 1, 1), q, k.mT, alpha=0.4),
    )  # fmt: skip
    if d.flag():
        scores = scores.masked_fill(d.mask(d.rows, d.columns), d.pick(-1e4, -2.0))
    elif d.flag():
        scores = torch.add(scores, d.tensor(d.rows, d.columns), alpha=d.number())
    return scores.softmax(-1) @ v


OPERATORS: dict[str, Operator] = {
    "sum": _sum,
    "var": _spread,
    "max": _largest,
    "norm": _norm,
    "softmax": _softmax,
    "softmax, written out": _own_softmax,
    "cumsum": _running,
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
    "losses": _loss,
    "cross_entropy": _classes,
    "attention": _attention,
    "attention, written out": _own_attention,
}
