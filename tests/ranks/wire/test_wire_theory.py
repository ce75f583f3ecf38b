"""Bytes that each rank sends in a step are those of theory, counted where they are sent: hybrid sharding, tensor
parallelism, the same with sequences in parts between products, and Ulysses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import zerofx
from gpt import MLP, Attention
from tests.lib.distributed import run_ranks
from tests.lib.runs.training import world
from zerofx import Machine
from zerofx.scheduler.cost.machine import Link
from zerofx.scheduler.plan.mesh import AXES

DIM, HEADS, DEPTH, TOKENS = 64, 4, 2, 16  # a layer is as many bytes as its bucket, whose slices are of 64 bytes each
STREAM = TOKENS * DIM * 4  # bytes of the values between layers: b = 1
MATRICES, ROW_BIASES, NORMS = 4 * (12 * DIM**2 + 7 * DIM), 4 * 2 * DIM, 4 * 4 * DIM  # of a layer's parameters
LAYER = MATRICES + ROW_BIASES + NORMS

# Bytes are all that a collective costs, so that of the ways that pins leave, the one that sends the least is planned.
BY_BYTES = replace(Machine.named("cpu"), intra_node=Link(bandwidth=1.8e9, latency=1e-9), ranks_per_node=4)

BY_HEADS = {"*.qkv": "column", "*.attention.out": "row", "*.up": "column", "*.mlp.out": "row"}


class Residual(nn.Module):
    """Adds to a stream of tokens what ``inner`` makes of it, which has the name that pins know it by."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(DIM), name
        self.add_module(name, inner)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = getattr(self, self.inner)(self.norm(x))
        return x + added


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(Residual("attention", Attention(DIM, HEADS)), Residual("mlp", MLP(DIM))) for _ in range(DEPTH)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - target).square().mean()


@dataclass(frozen=True)
class Layout:
    """``pins``: ``shardings=`` of it; ``streams``: how the values that norms are given lie in forward; ``layers``: the
    bytes that a rank of t sends for all layers, of values and of parameters and their gradients."""

    stage: int
    pins: Mapping[str, str]
    streams: str
    layers: Callable[[int], int]


def _each(share_of: int, t: int) -> int:
    """What a rank sends of ``share_of`` bytes in one gather, reduce-scatter or half of an all-reduce."""
    assert share_of % t == 0
    return share_of * (t - 1) // t


def _by_heads(t: int) -> int:
    """Two all-reduces forward and two backward, or a gather and a reduce-scatter in the place of each; gradients of
    parameters that all ranks have whole are all-reduced."""
    return DEPTH * (2 * 4 * _each(STREAM, t) + 2 * _each(NORMS + ROW_BIASES, t))


def _ulysses(t: int) -> int:
    """Queries, keys, values and what attention gives are exchanged forward and backward, a part each; the parameters of
    a layer are gathered twice and their gradients reduced, but those of the last are gathered once."""
    return DEPTH * 2 * 4 * _each(STREAM // t, t) + (3 * DEPTH - 1) * _each(LAYER, t)


LAYOUTS = {
    "tensor parallel": Layout(0, BY_HEADS | dict.fromkeys(("*.norm", "layers.*.?"), "replicated"), "R", _by_heads),
    "with sequences": Layout(0, BY_HEADS | dict.fromkeys(("*.norm", "layers.*.?"), "sequence"), "S1", _by_heads),
    "Ulysses": Layout(3, {"layers.*": "sequence"}, "S1", _ulysses),
}


@dataclass(frozen=True)
class Sent:
    """Bytes that this rank has sent to others of its group of each axis, and to nobody's."""

    by_axis: Mapping[str, int]
    elsewhere: int
    streams: str


def _sent(mesh: dict[str, int], stage: int, pins: Mapping[str, str] | None = None) -> Sent:
    torch.manual_seed(0)
    model = Layers()
    step = zerofx.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.1), stage, mesh=mesh, shardings=pins, backend="eager",
        machine=BY_BYTES,
    )  # fmt: skip
    batch = torch.randn(2, 1, TOKENS, DIM).unbind()
    step(*batch)
    assert step._steps.taken is not None
    runtime = step._steps.taken.runtime
    before = runtime.sent_to
    step(*batch)
    sent = {peer: number - before.get(peer, 0) for peer, number in runtime.sent_to.items()}
    by_axis: dict[str, int] = {}
    for axis in step.plan.mesh.axes_in_use(AXES):
        by_axis[axis] = sum(sent.pop(peer, 0) for peer in step.plan.mesh.members(world()[0], (axis,)))
    lie = {decision.node: decision.inputs[0] for decision in step.plan.shardings if "layer_norm" in decision.node}
    streams = {lies for node, lies in lie.items() if "backward" not in node} or {"R"}
    step.close()
    return Sent(by_axis, sum(sent.values()), ", ".join(streams))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_that_share_a_computation_send_what_theory_has_them_send(name: str, num_ranks: int) -> None:
    layout = LAYOUTS[name]
    for rank, sent in enumerate(run_ranks(_sent, num_ranks, {"model": num_ranks}, layout.stage, layout.pins)):
        loss = 4 * (1 if rank else num_ranks - 1)  # the first adds up its terms, and tells the others
        assert sent == Sent({"model": layout.layers(num_ranks) + loss}, 0, layout.streams)


def test_replicas_of_slices_send_what_theory_has_them_send() -> None:
    inside = (3 * DEPTH - 1) * _each(LAYER, 2)  # the last layer is gathered once
    across = DEPTH * 2 * _each(LAYER // 2, 2)
    for sent in run_ranks(_sent, 4, {"replicate": 2, "shard": 2}, 3):
        assert sent == Sent({"replicate": across, "shard": inside}, 0, "R")
