"""The storage rules against the truth: which tensors share memory when the graph is run with real tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from zerofx.ir.aliasing import (
    aliased_input,
    is_view,
    mutated_inputs,
    storage_bytes,
    storage_source,
    tensors_of,
)

aten = torch.ops.aten


class Block(nn.Module):
    """A GPT block with its head: fused attention, a split, an unbind, dropout, an expanded bias and a tied weight."""

    def __init__(self, width: int = 32, heads: int = 4, vocab: int = 50) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocab, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Parameter(torch.ones(2, width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (
            t.view(*t.shape[:2], self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(x.shape[-1], -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.proj(y), 0.1)
        a, b = self.gate.unbind(0)
        x = x + a.expand_as(x) * self.down(F.gelu(self.up(self.norm2(x)))) + b
        return F.linear(x, self.embed.weight)


def training_step(model: nn.Module) -> Callable[..., Any]:
    def step(params: dict[str, Tensor], moments: list[list[Tensor]], count: list[Tensor], tokens: Tensor) -> Any:
        logits = torch.func.functional_call(model, params, (tokens,))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        weights = list(params.values())
        grads = list(torch.autograd.grad(loss, weights))
        with torch.no_grad():
            torch._foreach_mul_(grads, 0.5)
            options: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
            options |= {"amsgrad": False, "maximize": False}
            torch._fused_adamw_(weights, grads, moments[0], moments[1], [], count, **options)
        return loss, grads

    return step


@pytest.fixture(scope="module")
def traced() -> tuple[fx.GraphModule, list[Tensor]]:
    torch.manual_seed(0)
    model = Block()
    params = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    moments = [[torch.zeros_like(p) for p in params.values()] for _ in range(2)]
    count = [torch.ones(()) for _ in params]
    arguments = (params, moments, count, torch.randint(50, (2, 8)))
    graph = make_fx(training_step(model), tracing_mode="fake")(*arguments)
    # The traced step writes in place: the truth is taken on copies.
    return graph, [t.detach().clone() for t in torch.utils._pytree.tree_leaves(arguments)]


class Recorder(fx.Interpreter):
    """Runs a graph and keeps every value alive, so that an address means one storage for the whole run."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def address(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def record(graph: fx.GraphModule, inputs: list[Tensor]) -> dict[fx.Node, Any]:
    recorder = Recorder(graph)
    with torch.no_grad():
        # Fakes are recorded values too; the pytree code of make_fx graphs takes flat inputs.
        graph.graph.set_codegen(fx.graph.CodeGen())
        recorder.run(*inputs)
    return recorder.values


def single_tensors(values: dict[fx.Node, Any]) -> Iterator[tuple[fx.Node, Tensor]]:
    for node, value in values.items():
        if isinstance(value, Tensor) and node.op != "output" and value.untyped_storage().nbytes() > 0:
            yield node, value


def test_every_alias_of_a_training_step_is_the_real_one(traced: tuple[fx.GraphModule, list[Tensor]]) -> None:
    graph, inputs = traced
    values = record(graph, inputs)
    targets = {str(node.target) for node in graph.graph.nodes}
    for expected in ("aten.split.Tensor", "aten.unbind.int", "aten.t.default", "aten._unsafe_view.default"):
        assert expected in targets
    assert "aten.bernoulli_.float" in targets
    assert any("flash_attention_for_cpu_backward" in t for t in targets)

    owner_of_address: dict[int, tuple[fx.Node, int]] = {}
    for node, value in single_tensors(values):
        owner = storage_source(node)
        # Same memory if and only if same owner: an address has one owner, and no owner two addresses.
        assert owner_of_address.setdefault(address(value), owner) == owner, node.format_node()
        base = aliased_input(node)
        if base is not None:
            real = values[base]
            assert address(real if isinstance(real, Tensor) else real[0]) == address(value), node.format_node()
        elif node.target is not operator.getitem:
            shared = [n for n in node.all_input_nodes for t in _tensors(values[n]) if address(t) == address(value)]
            assert not shared, node.format_node()
    assert len(set(owner_of_address.values())) == len(owner_of_address)


def test_the_real_step_writes_to_the_mutated_inputs_only(traced: tuple[fx.GraphModule, list[Tensor]]) -> None:
    graph, inputs = traced
    before = [t.clone() for t in inputs]
    record(graph, inputs)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    written = {n for n, t, old in zip(placeholders, inputs, before, strict=True) if not torch.equal(t, old)}
    claimed = {storage_source(m)[0] for n in graph.graph.nodes for m in mutated_inputs(n)}
    assert written == claimed & set(placeholders) != set()


def test_bytes_of_every_owned_storage_are_the_real_ones(traced: tuple[fx.GraphModule, list[Tensor]]) -> None:
    graph, inputs = traced
    values = record(graph, inputs)
    for node, value in single_tensors(values):
        if storage_source(node)[0] is node and "flash_attention" not in str(node.target):
            assert storage_bytes(tensors_of(node)[0]) == value.untyped_storage().nbytes(), node.format_node()


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]


def one_op(target: Any, *args: Any, pick: int | None = None, **kwargs: Any) -> tuple[fx.Node, fx.Node, bool]:
    """A graph of one operator on real tensors: input node, (picked) output node, whether they share memory."""
    graph = fx.Graph()
    first = graph.placeholder("x")
    first.meta["val"] = args[0]
    node = graph.call_function(target, (first, *args[1:]), kwargs)
    real = target(*args, **kwargs)
    node.meta["val"] = real
    if pick is not None:
        node, real = graph.call_function(operator.getitem, (node, pick)), real[pick]
        node.meta["val"] = real
    return first, node, address(real) == address(args[0])


def x(*shape: int) -> Tensor:
    return torch.ones(*shape)


@pytest.mark.parametrize(
    ("target", "args", "pick"),
    [
        (aten.reshape.default, (x(4, 6), (24,)), None),
        (aten.reshape.default, (x(4, 6).t(), (24,)), None),
        (aten.reshape.default, (x(4, 6).t(), (2, 3, 4)), None),
        (aten.flatten.using_ints, (x(2, 3, 4), 0, 1), None),
        (aten.flatten.using_ints, (x(2, 3, 4).transpose(0, 1), 0, 1), None),
        (aten.contiguous.default, (x(4, 6),), None),
        (aten.contiguous.default, (x(4, 6).t(),), None),
        (aten.to.dtype, (x(3), torch.float32), None),
        (aten.to.dtype, (x(3), torch.float64), None),
        (aten.to.dtype, (x(3), torch.float32, False, True), None),
        (aten._to_copy.default, (x(3),), None),
        (aten.clone.default, (x(3),), None),
        (aten._unsafe_view.default, (x(4, 6), (24,)), None),
        (aten.unsafe_split.Tensor, (x(4, 6), 2), 1),
        (aten.split.Tensor, (x(4, 6), 2), 1),
        (aten.unbind.int, (x(4, 6),), 2),
        (aten.chunk.default, (x(4, 6), 2), 1),
        (aten.split_copy.Tensor, (x(4, 6), 2), 1),
        (aten.max.dim, (x(4, 6), 1), 0),
        (aten.native_layer_norm.default, (x(4, 6), (6,), None, None, 1e-5), 0),
        (aten.add_.Tensor, (x(4), 1.0), None),
        (aten.squeeze_.default, (x(1, 4),), None),
        (aten.expand.default, (x(1, 4), (3, 4)), None),
        (aten.slice.Tensor, (x(4, 6), 1, 2, 5), None),
        (aten.alias.default, (x(4),), None),
        (aten.lift_fresh_copy.default, (x(4),), None),
        (aten.view_as_complex.default, (x(4, 2),), None),
    ],
)
def test_aliases_of_single_operators(target: Any, args: tuple[Any, ...], pick: int | None) -> None:
    first, node, shared = one_op(target, *args, pick=pick)
    assert (aliased_input(node) is first) == shared
    assert (storage_source(node) == (first, 0)) == shared


def test_views_cost_nothing_and_in_place_operators_are_no_views() -> None:
    _, view, _ = one_op(aten.t.default, x(2, 3))
    _, in_place, _ = one_op(aten.add_.Tensor, x(4), 1.0)
    _, squeezed, _ = one_op(aten.squeeze_.default, x(1, 4))
    _, fresh, _ = one_op(aten.add.Tensor, x(4), 1.0)
    assert [is_view(n) for n in (view, in_place, squeezed, fresh)] == [True, False, True, False]
    assert [len(mutated_inputs(n)) for n in (view, in_place, fresh)] == [0, 1, 0]


def test_getitem_of_an_ordinary_operator_names_an_output_of_its_own() -> None:
    _, values, _ = one_op(aten.max.dim, x(4, 6), 1, pick=1)
    assert is_view(values)
    assert aliased_input(values) is None
    assert storage_source(values) == (values.args[0], 1)


def test_out_arguments_are_aliased_and_mutated() -> None:
    graph = fx.Graph()
    a, out = graph.placeholder("a"), graph.placeholder("out")
    node = graph.call_function(aten.mm.out, (a, a), {"out": out})
    for n in (a, out, node):
        n.meta["val"] = x(3, 3)
    assert aliased_input(node) is out
    assert mutated_inputs(node) == (out,)
    assert not is_view(node)


def test_getitem_of_out_results_picks_the_matching_argument() -> None:
    graph = fx.Graph()
    a, values, indices = (graph.placeholder(name) for name in ("a", "values", "indices"))
    node = graph.call_function(aten.max.dim_max, (a, 1), {"max": values, "max_values": indices})
    picked = [graph.call_function(operator.getitem, (node, i)) for i in (0, 1)]
    assert aliased_input(node) is None
    assert [aliased_input(n) for n in picked] == [values, indices]
    assert mutated_inputs(node) == (values, indices)


def test_lists_of_mutated_tensors_are_flattened() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    node = graph.call_function(aten._foreach_add_.Scalar, ([a, b, a], 1.0))
    assert mutated_inputs(node) == (a, b)
    assert aliased_input(node) is None
    assert not is_view(node)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (x(3, 5), 60),
        (x(3, 5).t(), 60),
        (x(4, 8)[:, :3], 4 * (3 * 8 + 3)),
        (x(1).expand(1000), 4),
        (x(0, 7), 0),
        (torch.ones((), dtype=torch.float64), 8),
        (torch.ones(6, dtype=torch.bool), 6),
        (torch.empty_strided((2, 3), (10, 1), dtype=torch.bfloat16, device="meta"), 26),
    ],
)
def test_storage_bytes(tensor: Tensor, expected: int) -> None:
    assert storage_bytes(tensor) == expected


def test_nodes_without_tensors_are_plain() -> None:
    graph = fx.Graph()
    a = graph.placeholder("a")
    total = graph.call_function(operator.add, (a, 1))
    assert tensors_of(a) == ()
    assert aliased_input(a) is None
    assert mutated_inputs(total) == ()
    assert not is_view(total)
    assert storage_source(a) == (a, 0)
