"""The net over Inductor: random graphs trained on the default backend next to ATen's kernels, up to rounding.

What eager mode computes in float64 says how far ATen's own results are from it: a compiled result may be some times as
far, which leaves no space for a scalar that was lost. ``python -m tests.nets.inductor`` runs 2,000 graphs as Inductor
has rewritten them, on ATen's kernels, and every tenth compiled to C++, which takes seconds a graph.
"""

from __future__ import annotations

import argparse
import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, fx, nn
from tqdm import tqdm

import zerofx
from tests.nets.cases.random_graphs import Graph, GraphCase
from tests.nets.records import Record, read_records, results_path, write_records
from tests.nets.workers import WorkerError, run_in_workers
from zerofx.codegen.inductor.region_rewrites import TracedRegion
from zerofx.torch_private.operators import OpOverload

NET, NUM_CASES = "inductor", 2000
REWRITTEN, COMPILED, EAGER = "rewritten", "compiled", "eager"
_TOGETHER = {REWRITTEN: 25, COMPILED: 5, EAGER: 25}  # graphs of one step
_EVERY = 10  # of which one is compiled
_LARGEST = 1e4  # of values: of larger ones little is left of others
# How far a result may be: times as far as ATen's, and a part of the largest element.
_TIMES = {torch.float64: 100.0, torch.float32: 30.0, torch.bfloat16: 4.0}
_PART = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2}

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """Graphs that are trained in one step, and how they are run: a key of ``_TOGETHER``."""

    variant: str
    cases: tuple[GraphCase, ...]


class Graphs(nn.Module):
    """Several graphs next to each other; each element of what they give has a weight of its own in the loss."""

    def __init__(self, graphs: Iterable[Graph]) -> None:
        super().__init__()
        self.each = tuple(graphs)
        self.graphs = nn.ModuleList(self.each)

    def forward(self) -> tuple[Tensor, list[list[Tensor]]]:
        outputs = [list(graph.results()) for graph in self.each]  # not called: as layers, they would be regions each
        losses = [(each.double() * _weights(each)).sum() for results in outputs for each in results]
        return torch.stack(losses).sum(), outputs


def _weights(x: Tensor) -> Tensor:
    return torch.arange(1, x.numel() + 1, dtype=torch.float64).view(x.shape).sin() + 1.5


def check(batch: Batch) -> list[Record]:
    """The records of a batch's graphs; where all of them together are none, of each one on its own."""
    graphs = [graph for graph in map(Graph, batch.cases) if _is_worth_it(graph)]
    if not graphs:
        return []
    exact = _eager_results([graph.in_float64() for graph in graphs])
    eager = _eager_results(graphs)
    try:
        compiled = _trained_results(graphs, batch.variant)
    except Exception as error:  # noqa: BLE001  # whatever escapes is what the net is for
        if len(batch.cases) > 1:
            return [record for case in batch.cases for record in check(Batch(batch.variant, (case,)))]
        return [_record(graphs[0], batch.variant, f"{type(error).__name__}: {error}")]
    if batch.variant == EAGER:
        pairs = zip(graphs, eager, compiled, strict=True)
        return [_record(graph, EAGER, _difference_in_bits(*results)) for graph, *results in pairs]
    everything = zip(graphs, exact, eager, compiled, strict=True)
    return [_record(graph, batch.variant, _difference(graph.dtype, *results)) for graph, *results in everything]


def _record(graph: Graph, variant: str, wrong: str) -> Record:
    if not wrong:
        return Record(graph.case.name, variant, "exact")
    return Record(graph.case.name, variant, "wrong", f"{wrong[:300]} ({', '.join(graph.operators)}; {graph.dtype})")


def _is_worth_it(graph: Graph) -> bool:
    """Whether all that it gives is of a size that leaves something of everything."""
    results = _eager_results([graph])[0]
    return all(bool((each.double().abs() < _LARGEST).all()) for each in results.values())


def _difference(dtype: torch.dtype, exact: Results, eager: Results, compiled: Results) -> str:
    if eager.keys() != compiled.keys():
        return f"expected {', '.join(eager)}, found {', '.join(compiled)}"
    for name, expected in exact.items():
        found, other = compiled[name], eager[name]
        if (found.shape, found.dtype) != (other.shape, other.dtype):
            return f"{name}: expected {other.dtype}{list(other.shape)}, found {found.dtype}{list(found.shape)}"
        if expected.numel() == 0:
            continue
        allowed = _TIMES[dtype] * (other - expected).abs().max() + _PART[dtype] * expected.abs().max().clamp(min=1)
        by = (found - expected).abs().max()
        if not by <= allowed:
            return f"{name} by {float(by):.1e}, where {float(allowed):.1e} are rounding"
    return ""


def _difference_in_bits(eager: Results, found: Results) -> str:
    differ = [name for name, expected in eager.items() if not torch.equal(expected, found[name])]
    return f"other bits in {', '.join(differ)}" if differ else ""


def _named(graph: Graph, outputs: Sequence[Tensor], gradients: dict[nn.Parameter, Tensor]) -> Results:
    results = {f"result {number}": each.detach().clone() for number, each in enumerate(outputs)}
    parameters = [(name, p) for name, p in graph.named_parameters() if p in gradients]
    return results | {f"gradient of {name}": gradients[p].view(p.shape).clone() for name, p in parameters}


def _eager_results(graphs: Sequence[Graph]) -> list[Results]:
    model = Graphs(graphs)
    model.zero_grad()
    loss, outputs = model()
    loss.backward()
    gradients = {p: p.grad for p in model.parameters() if p.grad is not None}
    return [_named(graph, results, gradients) for graph, results in zip(graphs, outputs, strict=True)]


def _trained_results(graphs: Sequence[Graph], variant: str) -> list[Results]:
    model = Graphs(graphs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    with run_by_aten() if variant == REWRITTEN else contextlib.nullcontext():
        backend: Literal["eager", "inductor"] = "eager" if variant == EAGER else "inductor"
        step = zerofx.compile(model, optimizer, 0, forward=lambda given: given(), backend=backend)
        try:
            _, outputs = step()
            with step.full_parameters():
                states = optimizer.state_dict()["state"]
                gradients = {p: states[k]["momentum_buffer"] for k, p in enumerate(model.parameters()) if k in states}
                return [_named(graph, results, gradients) for graph, results in zip(graphs, outputs, strict=True)]
        finally:
            step.close()


@contextlib.contextmanager
def run_by_aten() -> Iterator[None]:
    """While open, regions are not compiled to C++, but run by ATen's kernels as Inductor has rewritten them; except
    those in which it put something that computes with its own tensors alone."""
    from zerofx.codegen.inductor import compile as inductor
    from zerofx.codegen.inductor.background import Background
    from zerofx.codegen.inductor.cpp import preparation

    compile_region = inductor.compile_region

    def rewrite_region(
        function: Any, inputs: Sequence[Any], name: str, kernels: frozenset[str] = frozenset(), **settings: Any
    ) -> inductor.CompiledRegion:
        preparation("cpu").wait()
        region = inductor.trace_and_rewrite(function, inputs, kernels)
        graph = rewritten_by_inductor(region)
        if not all(node.op != "call_function" or _takes_tensors(node) for node in graph.graph.nodes):
            return compile_region(function, inputs, name, kernels, **settings)

        def run(given: list[Any]) -> tuple[Tensor, ...]:
            tensors = [given[i].as_strided(*args) if args else given[i] for i, args in region.views]
            given.clear()
            return tuple(fx.Interpreter(graph).run(*tensors))

        return inductor.CompiledRegion(name, run, (), Background(name, []))

    with mock.patch.object(inductor, "compile_region", rewrite_region):
        yield


def _takes_tensors(node: fx.Node) -> bool:
    """Whether a call can be run: of an operator, or of a function in an operator's place that only hands on."""
    if node.target is operator.getitem or isinstance(node.target, OpOverload):
        return True
    args, named = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    try:
        node.target(*args, **named)  # type: ignore[operator]  # what a call calls
    except AttributeError:  # of what a tensor of Inductor's has
        return False
    return True


def rewritten_by_inductor(region: TracedRegion) -> fx.GraphModule:
    """The graph that Inductor makes kernels of."""
    from torch._inductor import config

    from zerofx.codegen.inductor.kernel_passes import KERNEL_PASSES
    from zerofx.torch_private.inductor.compile import compile_graph, set_up

    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.Graph) -> None:
        copy = fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        graphs.append(fx.GraphModule({}, copy))
        raise _KeptError

    examples = [node.meta["val"] for node in region.graph.find_nodes(op="placeholder")]
    with set_up(*KERNEL_PASSES), config.patch(post_grad_custom_post_pass=keep, force_disable_caches=True):
        try:
            compile_graph(region.module, examples, region.mode)
        except Exception:
            if not graphs:
                raise
    return graphs[0]


class _KeptError(Exception):
    """Ends a compilation whose graph has been kept."""


def batches(seeds: Iterable[int]) -> list[Batch]:
    """The graphs of these seeds: all of them rewritten and on the eager backend, some of them compiled."""
    cases = list(map(GraphCase, seeds))
    of_variant = {REWRITTEN: cases, COMPILED: [case for case in cases if case.seed % _EVERY == 0], EAGER: cases}
    return [Batch(variant, group) for variant, own in of_variant.items() for group in _groups(own, _TOGETHER[variant])]


def _groups(cases: Sequence[GraphCase], size: int) -> Iterator[tuple[GraphCase, ...]]:
    return (tuple(cases[start : start + size]) for start in range(0, len(cases), size))


def run(tried: Sequence[Batch], num_workers: int = 1) -> Iterator[Record]:
    """The records of graphs, a batch after the other."""
    for batch, result in run_in_workers(check, tried, num_workers, timeout=1200.0):
        if isinstance(result, WorkerError):
            yield from (Record(case.name, batch.variant, "wrong", str(result)) for case in batch.cases)
        else:
            yield from result


def main() -> None:
    """The full sweep, or a part of it; the records of those that ran are written as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--first", type=int, default=0, help="seed of the first graph")
    parser.add_argument("--last", type=int, default=NUM_CASES, help="seed after that of the last graph")
    parser.add_argument("--variant", choices=_TOGETHER, help="one of them alone")
    parsed = parser.parse_args()
    tried = [batch for batch in batches(range(parsed.first, parsed.last)) if parsed.variant in (None, batch.variant)]
    coming = {(case.name, batch.variant) for batch in tried for case in batch.cases}
    earlier = {(record.name, record.variant): record for record in read_records(results_path(NET))}
    records = {key: record for key, record in earlier.items() if key not in coming}
    for record in tqdm(run(tried, parsed.workers), unit=" graphs"):
        records[record.name, record.variant] = record
        write_records(results_path(NET), records.values())
        if record.outcome == "wrong":
            tqdm.write(f"{record.name} {record.variant}: {record.detail}")


if __name__ == "__main__":
    main()
