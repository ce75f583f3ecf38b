"""Products with weights side by side: which are made as one, and that values stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import zerofx
from zerofx.codegen.cpu.merged_products import merge_products

aten = torch.ops.aten
MM, INTO, CAT = aten.mm.default, torch.ops.zerofx.mm_into.default, aten.cat.default
ROWS, INNER = 96, 80
WIDTHS = (64, 72, 64)
SIZE = sum(WIDTHS) * INNER


def begin(part: int) -> int:
    return sum(WIDTHS[:part]) * INNER


def part_of(buffer: Tensor, part: int, offset: int = 0) -> Tensor:
    view: Tensor = aten.as_strided(buffer, [WIDTHS[part], INNER], [INNER, 1], begin(part) + offset)
    return view


def products(buffers: list[Tensor], grad: Tensor, part: int, gap: int = 0) -> Tensor:
    """Of a layer whose result has the gradient ``grad``: the weight's goes to its place, the input's is returned."""
    weights, grads, x = buffers
    torch.ops.zerofx.mm_into(part_of(grads, part, gap), aten.permute(grad, [1, 0]), aten.view(x, [ROWS, INNER]))
    product: Tensor = aten.mm(grad, part_of(weights, part, gap))
    return product


def backward(*given: Tensor, order: tuple[int, ...] = (2, 1, 0), gap: int = 0) -> list[Tensor]:
    """Of linear layers that read one input: the gradient of that; those of the weights go into a buffer."""
    buffers = list(given[:3])
    terms = [products(buffers, given[3 + part] * 2, part, gap * part) for part in order]
    first, *others = [aten.view(term, [2, ROWS // 2, INNER]) for term in terms]
    return [torch.tanh(sum(others, first))]


def inputs(gap: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes: list[tuple[int, ...]] = [(SIZE + 2 * gap,), (SIZE + 2 * gap,), (2, ROWS // 2, INNER)]
    return [torch.randn(size, generator=generator) for size in sizes + [(ROWS, width) for width in WIDTHS]]


def merged(function: Callable[..., Any], given: list[Tensor]) -> fx.Graph:
    """The traced function's graph with its products merged, which has to give and write what it did before."""
    traced = make_fx(function, tracing_mode="fake")(*given)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        merge_products(traced.graph)
    traced.graph.lint()
    traced.recompile()
    here, there = ([tensor.clone() for tensor in given] for _ in range(2))
    for one, other in zip([*traced(*here), *here], [*function(*there), *there], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)
    return traced.graph


def counts(graph: fx.Graph) -> tuple[int, int, int]:
    """How many products, products into a buffer and concatenations there are."""
    mm, into, cat = (len(graph.find_nodes(op="call_function", target=target)) for target in (MM, INTO, CAT))
    return mm, into, cat


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 1, 2), (1, 2, 0)])
def test_layers_that_read_one_input_are_one_product_each_way(order: tuple[int, ...]) -> None:
    graph = merged(lambda *given: backward(*given, order=order), inputs())
    assert counts(graph) == (1, 1, 1)


def test_two_groups_stay_apart() -> None:
    def twice(*given: Tensor) -> list[Tensor]:
        return backward(*given[:6]) + backward(*given[6:])

    assert counts(merged(twice, inputs() + inputs())) == (2, 2, 2)


def test_a_part_of_the_layers_that_is_a_sum_of_its_own() -> None:
    def residual(first: Tensor, *given: Tensor) -> list[Tensor]:
        return [first + torch.atanh(backward(*given)[0])]

    assert counts(merged(residual, [torch.randn(2, ROWS // 2, INNER), *[t / 100 for t in inputs()]])) == (1, 1, 1)


def bias_read(*given: Tensor) -> list[Tensor]:
    buffers, grads = list(given[:3]), [given[4] * 2, given[3] * 2]
    return [products(buffers, grads[0], 1) + products(buffers, grads[1], 0), *[grad.sum(0) for grad in grads]]


def scaled(*given: Tensor) -> list[Tensor]:
    one, other = (products(list(given[:3]), given[3 + part] * 2, part) for part in (1, 0))
    return [aten.add(one, other, alpha=2)]


def returned(*given: Tensor) -> list[Tensor]:
    one, other = (products(list(given[:3]), given[3 + part] * 2, part) for part in (1, 0))
    return [one + other, one]


def other_inputs(weights: Tensor, grads: Tensor, x: Tensor, *given: Tensor) -> list[Tensor]:
    return [products([weights, grads, x], given[1], 1) + products([weights, grads, x + 1], given[0], 0)]


def read_between(weights: Tensor, grads: Tensor, *given: Tensor) -> list[Tensor]:
    one = products([weights, grads, given[0]], given[2], 1)
    total = aten.as_strided(grads, [SIZE], [1], 0).sum()
    return [one + products([weights, grads, given[0]], given[1], 0), total]


def changed_between(weights: Tensor, grads: Tensor, *given: Tensor) -> list[Tensor]:
    one = products([weights, grads, given[0]], given[2], 1)
    aten.mul_(aten.as_strided(weights, [SIZE], [1], 0), 0.5)
    return [one + products([weights, grads, given[0]], given[1], 0)]


def input_changed_between(weights: Tensor, grads: Tensor, *given: Tensor) -> list[Tensor]:
    one = products([weights, grads, given[0]], given[2], 1)
    aten.mul_(given[0], 0.5)
    return [one + products([weights, grads, given[0]], given[1], 0)]


@pytest.mark.parametrize(
    "function",
    [bias_read, scaled, returned, other_inputs, read_between, changed_between, input_changed_between],
    ids=lambda one: one.__name__,
)
def test_others_are_left_alone(function: Callable[..., list[Tensor]]) -> None:
    assert counts(merged(function, inputs())) == (2, 2, 0)


def test_weights_with_a_gap_between_them_are_left_alone() -> None:
    assert counts(merged(lambda *given: backward(*given, gap=16), inputs(16))) == (3, 3, 0)


def test_half_precision_is_left_alone() -> None:
    given = [tensor.to(torch.bfloat16) for tensor in inputs()]
    traced = make_fx(backward, tracing_mode="fake")(*given)
    merge_products(traced.graph)
    assert counts(traced.graph) == (3, 3, 0)


WIDTH = 64


class Block(nn.Module):
    """Attention and a gated MLP, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(self.query(x).tanh(), self.key(x).tanh(), self.value(x), is_causal=True)
        x = x + self.out(mixed)
        normed = F.layer_norm(x, x.shape[-1:])
        result: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


class Model(nn.Module):
    """Blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_step_trains_like_eager_mode_and_takes_the_bytes_predicted() -> None:
    torch.manual_seed(0)
    model, batch = Model(), torch.randn(2, 4, WIDTH, WIDTH)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)

    def train(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = plain(batch)
        loss.backward()
        optimizer.step()
        return loss

    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.5), 0)
    losses, expected = ([run(batch).item() for _ in range(4)] for run in (step, train))
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)
    assert losses[-1] < losses[0]
    assert step.measure(batch, num_steps=2).peak_bytes == step.plan.peak_bytes
