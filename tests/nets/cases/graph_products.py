"""Products of random graphs, scaled and added to in all ways that there are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.nets.cases.random_graphs import Drawing, Operator


def _factors(d: Drawing) -> tuple[Tensor, Tensor]:
    inner = d.size()
    return d.tensor(d.rows, inner), d.tensor(inner, d.columns)


def _product(d: Drawing) -> Tensor:
    a, b = _factors(d)
    result: Tensor = d.pick(torch.mm, torch.matmul)(a, b)
    return result


def _batches(d: Drawing) -> tuple[Tensor, Tensor]:
    inner, batch = d.size(), d.size()
    return d.tensor(batch, d.rows, inner), d.tensor(batch, inner, d.columns)


def _bias(d: Drawing) -> Tensor:
    return d.tensor(*d.pick((d.rows, d.columns), (d.columns,), (1, d.columns), (d.rows, 1), (1,), ()))


def _add_product(d: Drawing) -> Tensor:
    product, other = _product(d), _bias(d)
    first, second = d.pick((product, other), (other, product), (product, _product(d)))
    result: Tensor = d.pick(torch.add, torch.sub, torch.add, torch.rsub)(first, second, alpha=d.number())
    return result


def _add_product_in_place(d: Drawing) -> Tensor:
    x = d.tensor(d.rows, d.columns).clone()
    result: Tensor = d.pick(x.add_, x.sub_)(_product(d), alpha=d.number())
    return result


def _activated_product(d: Drawing) -> Tensor:
    x = torch.addmm(_bias(d), *_factors(d), beta=d.number(), alpha=d.number())
    result: Tensor = d.pick(torch.tanh, torch.sigmoid, F.gelu, F.silu)(x)
    return result


def _addbmm(d: Drawing) -> Tensor:
    return torch.addbmm(_bias(d), *_batches(d), beta=d.number(), alpha=d.number())


def _baddbmm(d: Drawing) -> Tensor:
    a, b = _batches(d)
    bias = d.tensor(*d.pick((a.shape[0], d.rows, d.columns), (1, d.rows, d.columns), (a.shape[0], 1, 1), (d.columns,)))
    return torch.baddbmm(bias, a, b, beta=d.number(), alpha=d.number())


def _addmv(d: Drawing) -> Tensor:
    bias = d.tensor(*d.pick((d.rows,), (1,), ()))
    return torch.addmv(bias, d.tensor(d.rows, d.columns), d.tensor(d.columns), beta=d.number(), alpha=d.number())


def _addr(d: Drawing) -> Tensor:
    return torch.addr(_bias(d), d.tensor(d.rows), d.tensor(d.columns), beta=d.number(), alpha=d.number())


def _addmm_in_place(d: Drawing) -> Tensor:
    return d.tensor(d.rows, d.columns).clone().addmm_(*_factors(d), beta=d.number(), alpha=d.number())


def _linear(d: Drawing) -> Tensor:
    x = d.any(1)
    return F.linear(x, d.tensor(d.columns, x.shape[-1]), d.tensor(d.columns) if d.flag() else None)


def _einsum(d: Drawing) -> Tensor:
    a, b = _batches(d)
    return torch.einsum(d.pick("bij,bjk->bik", "bij,bjk->ik", "bij,bjk->bki", "bij,bjk->i"), a, b)


def _chain_of_products(d: Drawing) -> Tensor:
    product: Tensor = torch.linalg.multi_dot([d.tensor(d.rows, 3), d.tensor(3, d.columns), d.tensor(d.columns, d.rows)])
    return product


OPERATORS: dict[str, Operator] = {
    "mm": _product,
    "add of a product": _add_product,
    "add_ of a product": _add_product_in_place,
    "addmm": lambda d: torch.addmm(_bias(d), *_factors(d), beta=d.number(), alpha=d.number()),
    "addmm_": _addmm_in_place,
    "addmm, activated": _activated_product,
    "addbmm": _addbmm,
    "baddbmm": _baddbmm,
    "bmm": lambda d: torch.bmm(*_batches(d)),
    "addmv": _addmv,
    "addr": _addr,
    "linear": _linear,
    "einsum": _einsum,
    "multi_dot": _chain_of_products,
}
