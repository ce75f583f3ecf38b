"""Node costs: FLOPs against torch's own counter, bytes by hand, and the two sides of the roofline."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from zerofx.errors import InvalidGraphError
from zerofx.ir.aliasing import is_view
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost, node_flops

aten = torch.ops.aten
H100 = Machine.named("h100-sxm")


def trace(function: Callable[..., Any], *args: Any) -> list[fx.Node]:
    return list(make_fx(function, tracing_mode="fake")(*args).graph.nodes)


def find(nodes: list[fx.Node], target: Any) -> fx.Node:
    return next(node for node in nodes if node.target is target)


def of_one(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node of one operator; tensors of `args`, which may be meta tensors, become placeholders."""
    graph = fx.Graph()

    def lift(value: Any) -> Any:
        if isinstance(value, Tensor):
            node = graph.placeholder("x")
            node.meta["val"] = value
            return node
        return value

    node = graph.call_function(target, torch.utils._pytree.tree_map(lift, args), kwargs)
    node.meta["val"] = target(*args, **kwargs)
    return node


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Small(nn.Module):
    """Convolution (also strided and grouped), linear with and without bias, batched matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2))
        self.lin, self.head = nn.Linear(8, 16), nn.Linear(16, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x).flatten(2).transpose(1, 2)
        y = torch.bmm(y, y.transpose(1, 2)) @ self.head(torch.tanh(self.lin(y)))
        flat: Tensor = self.lin(x[:, 0, 0, :8])
        return y.sum() + flat.sum()


def test_flops_of_a_model_equal_the_flop_counter() -> None:
    model = Small()
    params: dict[str, Tensor] = dict(model.named_parameters())

    def step(params: dict[str, Tensor], x: Tensor) -> Any:
        loss = torch.func.functional_call(model, params, (x,))
        return loss, torch.autograd.grad(loss, list(params.values()))

    x = torch.randn(2, 4, 16, 16)
    with FlopCounterMode(display=False) as counter:
        step(params, x)
    counts = counter.get_flop_counts()["Global"]
    assert {aten.mm, aten.addmm, aten.bmm, aten.convolution, aten.convolution_backward} <= set(counts)
    nodes = trace(step, params, x)
    mine: dict[Any, int] = {}
    for node in nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if packet in flop_registry:
            mine[packet] = mine.get(packet, 0) + node_flops(node)
    assert mine == counts


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_on_the_cpu_counts_as_the_kernels_that_the_registry_knows(kv_heads: int) -> None:
    b, h, s, d = 2, 4, 16, 8

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != h)
        return out, torch.autograd.grad(out.sum(), (q, k, v))

    q, k, v = (torch.randn(b, heads, s, d, requires_grad=True) for heads in (h, kv_heads, kv_heads))
    nodes = trace(attention, q, k, v)
    forward = find(nodes, aten._scaled_dot_product_flash_attention_for_cpu.default)
    backward = find(nodes, aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    matmul = 2 * b * h * s * s * d
    assert (node_flops(forward), node_flops(backward)) == (2 * matmul, 5 * matmul)
    # The same from torch's counter, on the kernel of the same arguments that it knows.
    with FlopCounterMode(display=False) as counter:
        aten._scaled_dot_product_efficient_attention(*(t.to("meta") for t in (q, q, q)), None, False)
    assert counter.get_total_flops() == 2 * matmul
    cost = node_cost(forward, H100)
    assert cost.bytes_read == 4 * b * s * d * (h + 2 * kv_heads)
    assert cost.bytes_written == 4 * b * s * h * (d + 1)  # the output, and the log-sum-exp of every row


def test_convolutions_and_their_backwards_take_what_the_machine_has_them_take() -> None:
    at_once = replace(H100, device=replace(H100.device, launch_latency=0.0))
    half = replace(at_once, efficiency=replace(H100.efficiency, convolution=0.5))
    images, filters = torch.randn(8, 64, 16, 16, requires_grad=True), torch.randn(64, 64, 3, 3, requires_grad=True)
    nodes = trace(lambda *given: torch.autograd.grad(F.conv2d(*given).sum(), given), images, filters)
    for target in (aten.convolution.default, aten.convolution_backward.default):
        node = find(nodes, target)
        seconds = node_flops(node) / H100.matmul_flops(torch.float32)
        assert node_cost(node, at_once).seconds == pytest.approx(seconds)
        assert node_cost(node, half).seconds == pytest.approx(2 * seconds)


@pytest.mark.parametrize(
    ("target", "args", "flops"),
    [
        (aten.mm.default, (meta(3, 5), meta(5, 7)), 2 * 3 * 5 * 7),
        (aten.addmm.default, (meta(7), meta(3, 5), meta(5, 7)), 2 * 3 * 5 * 7),
        (aten.bmm.default, (meta(2, 3, 5), meta(2, 5, 7)), 2 * 2 * 3 * 5 * 7),
        (aten.mv.default, (meta(3, 5), meta(5)), 2 * 3 * 5),
        (aten.add.Tensor, (meta(4, 6), meta(6)), 24),
        (aten.gelu.default, (meta(4, 6),), 24),
        (aten.sum.dim_IntList, (meta(4, 6), [0]), 24),
        (aten._softmax.default, (meta(4, 6), -1, False), 5 * 24),
        (aten.native_layer_norm.default, (meta(4, 6), [6], meta(6), meta(6), 1e-5), 8 * 24),
        (aten.embedding.default, (meta(100, 6), meta(4, dtype=torch.int64)), 0),
        (aten.clone.default, (meta(4, 6),), 0),
        (aten.cat.default, ([meta(4, 6), meta(4, 6)],), 0),
        (aten._to_copy.default, (meta(4, 6),), 0),
        (aten.zeros_like.default, (meta(4, 6),), 0),
        (aten.permute_copy.default, (meta(4, 6), [1, 0]), 0),
        (aten.full.default, ([4, 6], 1.0), 0),
        (aten._foreach_mul_.Scalar, ([meta(4), meta(6)], 2.0), 10),
        (aten.t.default, (meta(4, 6),), 0),
    ],
)
def test_flops_by_hand(target: Any, args: tuple[Any, ...], flops: int) -> None:
    assert node_flops(of_one(target, *args)) == flops


@pytest.mark.parametrize(
    ("target", "args", "read", "written"),
    [
        (aten.mm.default, (meta(3, 5), meta(5, 7)), 4 * (15 + 35), 4 * 21),
        (aten.add.Tensor, (meta(4, 6), meta(6)), 4 * (24 + 6), 4 * 24),
        (aten.add.Tensor, (meta(4, 6), meta(1, 6).expand(4, 6)), 4 * (24 + 6), 4 * 24),
        (aten.add_.Tensor, (meta(4, 6), meta(6)), 4 * (24 + 6), 4 * 24),
        (aten.copy_.default, (meta(4, 6), meta(4, 6)), 4 * 24, 4 * 24),
        (aten.zero_.default, (meta(4, 6),), 0, 4 * 24),
        (aten.zeros_like.default, (meta(4, 6),), 0, 4 * 24),
        (aten.empty_like.default, (meta(4, 6),), 0, 0),
        (aten.t.default, (meta(4, 6),), 0, 0),
        (aten._to_copy.default, (meta(4, 6),), 4 * 24, 4 * 24),
        (aten.max.dim, (meta(4, 6), 1), 4 * 24, 4 * 4 + 8 * 4),
        # 5 rows of 100 are touched, and 5 indices of 8 bytes.
        (aten.embedding.default, (meta(100, 6), meta(5, dtype=torch.int64)), 4 * 30 + 40, 4 * 30),
        # More indices than rows: no row is read twice from memory.
        (aten.embedding.default, (meta(2, 6), meta(5, dtype=torch.int64)), 4 * 12 + 40, 4 * 30),
        (aten._foreach_add_.List, ([meta(4), meta(6)], [meta(4), meta(6)]), 4 * 20, 4 * 10),
    ],
)
def test_bytes_by_hand(target: Any, args: tuple[Any, ...], read: int, written: int) -> None:
    cost = node_cost(of_one(target, *args), H100)
    assert (cost.bytes_read, cost.bytes_written) == (read, written)


def test_out_arguments_are_written_and_not_read() -> None:
    graph = fx.Graph()
    a, out = graph.placeholder("a"), graph.placeholder("out")
    node = graph.call_function(aten.mm.out, (a, a), {"out": out})
    for n in (a, out, node):
        n.meta["val"] = meta(8, 8)
    cost = node_cost(node, H100)
    assert (cost.flops, cost.bytes_read, cost.bytes_written) == (1024, 4 * 64, 4 * 64)


def test_views_of_one_storage_are_read_once() -> None:
    nodes = trace(lambda x: torch.mm(x, x.t()), torch.randn(4, 4))
    assert node_cost(find(nodes, aten.mm.default), H100).bytes_read == 64

    def disjoint(x: Tensor) -> Any:
        a, b, _ = torch.split(x, 2)
        return a + b

    nodes = trace(disjoint, torch.randn(6, 4))
    assert node_cost(find(nodes, aten.add.Tensor), H100).bytes_read == 64
    for node in nodes:
        if is_view(node):
            cost = node_cost(node, H100)
            assert (cost.flops, cost.bytes_read, cost.bytes_written, cost.seconds) == (0, 0, 0, 0.0)


def test_matmuls_cross_the_roofline_where_the_machine_says() -> None:
    def seconds(side: int) -> tuple[float, float, float]:
        a = meta(side, side, dtype=torch.bfloat16)
        cost = node_cost(of_one(aten.mm.default, a, a.clone()), H100)
        arithmetic = cost.flops / H100.matmul_flops(torch.bfloat16)
        traffic = (cost.bytes_read + cost.bytes_written) / H100.memory_bandwidth
        return cost.seconds - H100.device.launch_latency, arithmetic, traffic

    # 2 n^3 / peak = 6 n^2 / bandwidth at n = 3 peak / bandwidth.
    crossover = 3 * H100.matmul_flops(torch.bfloat16) / H100.memory_bandwidth
    below, above = int(crossover * 0.9), int(crossover * 1.1)
    taken, arithmetic, traffic = seconds(below)
    assert taken == pytest.approx(traffic)
    assert traffic > arithmetic
    taken, arithmetic, traffic = seconds(above)
    assert taken == pytest.approx(arithmetic)
    assert arithmetic > traffic


def test_rates_follow_the_type_of_the_inputs() -> None:
    def seconds(dtype: torch.dtype) -> float:
        a = meta(8192, 8192, dtype=dtype)
        return node_cost(of_one(aten.mm.default, a, a.clone()), H100).seconds

    assert seconds(torch.float32) > seconds(torch.bfloat16)
    pointwise = node_cost(of_one(aten.mul.Tensor, meta(1 << 20), meta(1 << 20)), H100)
    traffic = 12 * 2**20 / H100.memory_bandwidth
    assert pointwise.seconds == pytest.approx(traffic + H100.device.launch_latency)


def test_nodes_without_work_are_free_and_nodes_without_facts_are_refused() -> None:
    graph = fx.Graph()
    a = graph.placeholder("a")
    a.meta["val"] = meta(2)
    numbers = graph.call_function(operator.add, (1, 2))
    for node in (a, numbers):
        assert node_cost(node, H100).seconds == 0.0
    unknown = graph.call_function(aten.relu.default, (a,))
    with pytest.raises(InvalidGraphError, match=r"relu.*no meta\['val'\]"):
        node_cost(unknown, H100)


def test_an_optimizer_step_moves_its_states() -> None:
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    options |= {"amsgrad": False, "maximize": False}
    graph = fx.Graph()
    state = [graph.placeholder(name) for name in ("weight", "grad", "first", "second")]
    count = graph.placeholder("count")
    for node in state:
        node.meta["val"] = meta(1000)
    count.meta["val"] = meta()
    step = graph.call_function(aten._fused_adamw_.default, (*([n] for n in state), [], [count]), options)  # type: ignore[arg-type]  # torch types no lists of lists
    cost = node_cost(step, H100)
    # Four tensors and the step count are read; by the schema all four are written (the kernel may unscale grads).
    assert (cost.flops, cost.bytes_read, cost.bytes_written) == (14_000, 16_004, 16_000)
    assert cost.seconds > H100.device.launch_latency
