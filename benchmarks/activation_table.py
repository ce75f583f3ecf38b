"""The table of Korthikanti et al. (2205.05198): activations that a layer keeps on each of t ranks, as zerofx has them.

    python -m benchmarks.activation_table                   # GPT-3's layer on 1, 2, 4 and 8 ranks: a minute
    python -m benchmarks.activation_table --shape 22B       # another of the paper's: 22B, 175B, 530B, 1T

Nothing runs: the step is captured without values, turned into one rank's graph by the pass that does so for training
(``passes/prepare/partition.py``), and what forward makes and backward reads of the middle of three layers is added up.
How the ranks share it is pinned to Megatron-LM's way: products by columns and then by rows, and what is between them
whole on each rank (TP), or in parts of the sequence (TP + SP), whose gathered values are gathered again in backward.

Two things are not in the paper's count. Mean and deviation of each token for two layer norms are kept in the dtype of
the weights, which the paper leaves out as small. And a plan draws nothing twice: where scores or all activations are
computed again, masks of dropout stay, which Megatron-LM draws again from a saved state of the generator.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from tabulate import tabulate
from torch import fx

from benchmarks.lib.megatron import traced
from zerofx.ir import ops
from zerofx.ir.aliasing import is_view
from zerofx.ir.facts import origin
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.own_draws import OWN_DRAWS
from zerofx.ir.ops import gather_values
from zerofx.ir.sharding.rule import results_of
from zerofx.passes.activations.recompute import recompute
from zerofx.passes.prepare.partition import partition
from zerofx.scheduler.analysis.saved_values import saved_storages, storage_size, value_node
from zerofx.scheduler.analysis.sharding_ways import ShardingWays, sharding_ways, slot_of
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.sharding_seconds import Prices
from zerofx.scheduler.decide.shardings import decide_shardings
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.placements import REPLICATED, SUM, Placement, Sharded
from zerofx.units import format_bytes

SEQUENCE = 2048
LAYER = "layers.1"  # of three: what is before and after it are layers too
BY_COLUMNS, BY_ROWS = ("attention.qkv", "up"), ("attention.out", "down")
_SCORES = (torch.ops.aten._softmax.default, torch.ops.aten.mul.Tensor)  # and the same after their dropout
_MASKS = (torch.ops.aten.bernoulli.p, OWN_DRAWS[torch.ops.aten.bernoulli.p])  # of what is whole, and of parts


@dataclass(frozen=True)
class Shape:
    """Heads, hidden size and micro-batch of a model in the paper's table 3."""

    heads: int
    hidden: int
    batch: int


SHAPES: Final[Mapping[str, Shape]] = {
    "22B": Shape(64, 6144, 4),
    "175B": Shape(96, 12_288, 1),
    "530B": Shape(128, 20_480, 1),
    "1T": Shape(160, 25_600, 1),
}


@dataclass(frozen=True)
class Technique:
    """A row: ``formula`` in words, and in bytes by sbh, 5 a s^2 b and t."""

    name: str
    formula: str
    num_bytes: Callable[[int, int, int], int]
    parallel: bool = True
    sequence_parallel: bool = False
    again: Literal["none", "selective", "full"] = "none"  # what is computed again


TECHNIQUES: Final = (
    Technique("no parallelism", "sbh (34 + 5as/h)", lambda sbh, scores, t: 34 * sbh + scores, parallel=False),
    Technique("TP", "sbh (10 + 24/t + 5as/ht)", lambda sbh, scores, t: 10 * sbh + (24 * sbh + scores) // t),
    Technique("TP + SP", "sbh/t (34 + 5as/h)", lambda sbh, scores, t: (34 * sbh + scores) // t, sequence_parallel=True),
    Technique("TP + selective", "sbh (10 + 24/t)", lambda sbh, _, t: 10 * sbh + 24 * sbh // t, again="selective"),
    Technique(
        "TP + SP + selective", "34 sbh/t", lambda sbh, _, t: 34 * sbh // t, sequence_parallel=True, again="selective"
    ),
    Technique("full recomputation", "2 sbh", lambda sbh, _, t: 2 * sbh, again="full"),
)


@dataclass(frozen=True)
class Kept:
    """Bytes of the middle layer's activations on one rank: all of them, what norms keep of each token, and masks."""

    total: int
    statistics: int
    masks: int


def measured(shape: Shape, technique: Technique, num_ranks: int, sequence: int = SEQUENCE) -> Kept:
    """What the middle layer of such a model keeps on one of ``num_ranks`` ranks."""
    step = traced(shape.hidden, shape.heads, shape.batch, sequence=sequence)
    if technique.parallel and num_ranks > 1:
        _share(step, num_ranks, technique.sequence_parallel)
    _compute_again(step, technique.again)
    values = kept_values(step)
    return Kept(
        sum(values.values()),
        sum(size for node, size in values.items() if slot_of(node)[1] in (1, 2)),
        sum(size for node, size in values.items() if node.target in _MASKS),
    )


def kept_values(step: StepGraph, unit: str = LAYER) -> dict[fx.Node, int]:
    """What a layer makes in forward and backward reads, with bytes.

    The layer's own input is counted with the layer that made it, and its output with it: as many bytes.
    """
    return {value_node(s): storage_size(s) for s in saved_storages(step) if step.unit_of(s[0]) == unit}


def _share(step: StepGraph, num_ranks: int, sequence_parallel: bool) -> None:
    """Turn ``step`` into one rank's, shared in Megatron-LM's way."""
    ways = sharding_ways(step, num_ranks)
    between: Placement = Sharded(0) if sequence_parallel else REPLICATED
    for node, lies in _pinned(step, ways, between):
        first = ways.classes.first[node]
        ways.rules[first] = [rule for rule in ways.rules[first] if rule.outputs[0] == lies]
    mesh, machine = Mesh(model=num_ranks), Machine.named("h100-sxm")
    partition(step, decide_shardings(ways, mesh, machine, Prices(), _parameters(step)), num_ranks)


def _parameters(step: StepGraph) -> dict[str, Placement]:
    """How weights and biases lie: ``out = x @ weight.T``, so that columns of the product are rows of the weight."""
    lies: dict[str, Placement] = {}
    for info in step.parameters:
        module, _, kind = info.name.rpartition(".")
        if module.endswith(BY_COLUMNS):
            lies[info.name] = Sharded(0)
        elif module.endswith(BY_ROWS):
            lies[info.name] = Sharded(1) if kind == "weight" else REPLICATED
    return lies


def _pinned(step: StepGraph, ways: ShardingWays, between: Placement) -> Iterator[tuple[fx.Node, Placement]]:
    """What products of the layers give, and how everything lies that is between them, gradients too."""
    norm = next(node for node in step.calls() if node.target is torch.ops.aten.native_layer_norm.default)
    (stream, *_) = results_of(norm)
    assert stream is not None
    for node in step.calls():
        _, _, module = origin(node).layer.partition("layers.")
        inside = module.partition(".")[2]
        result = next(iter(results_of(node)), None)
        if not module or is_view(node) or ways.classes.first.get(node) not in ways.rules:
            continue
        if node.target is torch.ops.aten.addmm.default:
            yield node, Sharded(1) if inside in BY_COLUMNS else SUM
        elif inside in ("", "norm1", "norm2") and result is not None and result.shape == stream.shape:
            yield node, between


def _compute_again(step: StepGraph, what: str) -> None:
    """Leave out of what the middle layer keeps what is gathered, and what the technique computes again."""
    values = kept_values(step)
    result = max(values, key=step.positions().__getitem__)  # the next layer's input
    gathered = {node for node in values if _is_gathered(node)}
    again = set(gathered)
    if what == "selective":
        again |= {node for node in values if node.target in _SCORES}
    if what == "full":
        again = {node for node in values if node.target not in _MASKS and node is not result}
        recompute(step, frozenset(node.name for node in again), frozenset())
        return
    parts = {_source(node).name for node in gathered}
    recompute(step, frozenset(node.name for node in again), frozenset(parts))


def _is_gathered(node: fx.Node) -> bool:
    """Whether a node waits for the parts of a value."""
    return node.target is ops.wait and node.all_input_nodes[0].target is gather_values


def _source(wait: fx.Node) -> fx.Node:
    """The value whose parts are gathered, which waits for backward in the place of the whole."""
    (source,) = wait.all_input_nodes[0].all_input_nodes
    while is_view(source) and slot_of(source)[0] is source:
        source = source.all_input_nodes[0]
    return source


def table(name: str, ranks: tuple[int, ...]) -> str:
    """A line for each technique and number of ranks: the paper's bytes, those of the graph, and what is beyond them."""
    shape = SHAPES[name]
    sbh, scores = SEQUENCE * shape.batch * shape.hidden, 5 * shape.heads * SEQUENCE**2 * shape.batch
    rows = []
    for technique in TECHNIQUES:
        for num_ranks in ranks:
            layer, expected = measured(shape, technique, num_ranks), technique.num_bytes(sbh, scores, num_ranks)
            beyond = layer.total - expected - layer.statistics
            rows.append(
                [technique.name, num_ranks, technique.formula, *map(format_bytes, (expected, layer.total)),
                 format_bytes(layer.statistics), format_bytes(beyond) if beyond else "0"]
            )  # fmt: skip
    headers = ["", "t", "formula", "paper", "zerofx", "statistics of norms", "masks that are not drawn again"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="175B")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], metavar="T")
    options = parser.parse_args()
    print(table(options.shape, tuple(options.ranks)))


if __name__ == "__main__":
    main()
