"""The step graph: one fx graph of a whole training step, with its parameters, gradients and buffers by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from zerofx.ir.facts import (
    Placeholder,
    Role,
    Task,
    origin,
    piece_of,
    placeholder,
    set_placeholder,
    set_value,
    task_of,
    tensor,
)
from zerofx.ir.parameters import ParameterInfo
from zerofx.ir.returned import NOTHING_ELSE, Returned
from zerofx.ir.text import node_text
from zerofx.scheduler.plan.decisions import MovedNodes, ProductDecision, ShardingDecision, TileDecision
from zerofx.scheduler.plan.facts import unit_of
from zerofx.torch_private.tensors import empty_like_fake


def num_bodies(num_micro_batches: int, num_before: int = 1) -> int:
    """The number of bodies in a graph of ``num_micro_batches`` (``zerofx/ir/micro_batches.py``): ``num_before`` that
    come before the loop, the loop, and the last."""
    return min(num_micro_batches, num_before + 2)


@dataclass(frozen=True)
class Clipping:
    """Nodes that clip gradients by their global norm.

    ``norm`` and the ``factor`` that gradients are multiplied by are nodes of shape ``[]``. ``begin`` is the first node
    of their computation, where all reductions are done.
    """

    norm: fx.Node
    factor: fx.Node
    begin: fx.Node

    def remap(self, copies: Mapping[fx.Node, fx.Node]) -> Clipping:
        """The same nodes in a copy of the graph."""
        return Clipping(copies[self.norm], copies[self.factor], copies[self.begin])


@dataclass(frozen=True)
class Unscaling:
    """Nodes that divide gradients by the loss scale, once they are known to be finite.

    ``inverse``, float32 of shape ``[]``, is what they are multiplied by. ``largest``, of shape ``[]``, is the largest
    magnitude among all of them on all ranks, which is not finite where one of them is not; None where their norm says
    that. ``begin`` is the first node of their computation, where all reductions are done.
    """

    inverse: fx.Node
    largest: fx.Node | None
    begin: fx.Node

    def remap(self, copies: Mapping[fx.Node, fx.Node]) -> Unscaling:
        """The same nodes in a copy of the graph."""
        largest = None if self.largest is None else copies[self.largest]
        return Unscaling(copies[self.inverse], largest, copies[self.begin])


@dataclass(frozen=True)
class PipeStage:
    """The part of a captured step that ranks with one place on the axis pipe run.

    ``number`` counts stages from 0. ``cuts`` are the names of the nodes in the whole graph's forward that later chunks
    begin with: stage i has chunk i, and, where there are more chunks than stages, every ``num_stages``-th after it
    (interleaved, 2104.04473). ``buckets``: which its trained buckets are of the ``num_buckets`` that all stages have,
    in order. ``draws``: whether any of them draws random numbers. ``buffers`` are, by name, the stages of the buffers
    that one of them changes. ``weights_lag``: where a stage by turns computes weight gradients apart from the rest of
    backward, how many turns after it. ``by_chunk``: all micro-batches run through a chunk of several before the next
    (round robin, 2604.27085), rather than by turns.
    """

    number: int
    num_stages: int
    cuts: tuple[str, ...]
    buckets: tuple[int, ...] = ()
    num_buckets: int = 0
    draws: bool = False
    buffers: tuple[tuple[str, int], ...] = ()
    weights_lag: int | None = None
    by_chunk: bool = False

    @property
    def num_after(self) -> int:
        """Stages after this one."""
        return self.num_stages - 1 - self.number

    @property
    def chunks(self) -> range:
        """The numbers of its chunks, in order."""
        return range(self.number, len(self.cuts) + 1, self.num_stages)

    def number_buckets(self, chunks: Sequence[Sequence[int]]) -> PipeStage:
        """The same where the trained buckets of each stage are of these ``chunks``, of which each is of one stage."""
        order = sorted((chunk, stage, place) for stage, own in enumerate(chunks) for place, chunk in enumerate(own))
        buckets = tuple(number for number, (_, owner, _) in enumerate(order) if owner == self.number)
        return replace(self, buckets=buckets, num_buckets=len(order))


@dataclass
class StepGraph:
    """An fx graph of a training step with its parameters, gradients and buffer updates by name.

    The output node is ``(loss, extras..., buffer updates..., gradients...)``, and after them the gradients' norm, if
    they are clipped, ``layer_squares``, the sum of squares of each trained bucket's gradient, if that is asked for, and
    the ``kept_gradients`` that are.
    ``clipping`` says how they are clipped, ``unscaling`` how they are freed of the loss's scale; ``num_extras``,
    ``gradient_names`` and ``mutation_names`` say which is which, and each micro-batch has extras and gradients of its
    own. ``returned`` is what one of them gives besides its loss. Passes empty both as they turn gradients into
    reductions and updates into in-place writes; ``reduced`` then holds, by bucket, the node whose value is the
    bucket's gradient on this rank. ``by_layer``: all micro-batches run through a layer before the next layer
    (``zerofx/ir/micro_batches.py``). ``num_before`` bodies come before the loop over those in between. ``slices``
    says which parameters are there in slices, each a parameter of its own, ``shardings`` how the ranks of the model
    axis share what was captured, ``overlaps`` what stands elsewhere in the order, ``products`` which matrix products
    are in fp8, ``pipe`` which stage it is, where it is one alone. ``fakes`` remembers the values that passes have
    asked for. ``cut_pieces`` are the pieces of what is outside ``units`` at whose borders regions end. Where the step
    is ``guarded``, it ends before its updates if a loss is not finite.
    """

    graph: fx.Graph
    device: torch.device
    parameters: tuple[ParameterInfo, ...]
    units: frozenset[str] = frozenset()
    mutation_names: list[str] = field(default_factory=list)
    gradient_names: list[str] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    reduced: dict[int, fx.Node] = field(default_factory=dict)
    fakes: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    num_micro_batches: int = 1
    by_layer: bool = False
    num_before: int = 1
    slices: tuple[TileDecision, ...] = ()
    shardings: tuple[ShardingDecision, ...] = ()
    overlaps: tuple[MovedNodes, ...] = ()
    products: tuple[ProductDecision, ...] = ()
    pipe: PipeStage | None = None
    cut_pieces: frozenset[str] = frozenset()
    clipping: Clipping | None = None
    unscaling: Unscaling | None = None
    layer_squares: fx.Node | None = None
    kept_gradients: tuple[fx.Node, ...] = ()
    num_extras: int = 0
    returned: Returned = NOTHING_ELSE
    guarded: bool = False

    @property
    def output(self) -> fx.Node:
        return self.graph.output_node()

    @property
    def num_bodies(self) -> int:
        """Micro-batches that the graph has written out."""
        return num_bodies(self.num_micro_batches, self.num_before)

    @property
    def has_loop(self) -> bool:
        """True if the second body stands for several micro-batches."""
        return self.num_micro_batches > self.num_bodies

    @property
    def takes_turns(self) -> bool:
        """True for a stage that runs backward of a micro-batch before the forward of later ones."""
        return self.pipe is not None and self.num_micro_batches > 1 and not self.by_layer

    @property
    def is_ahead(self) -> bool:
        """True if forward is some turns ahead of backward, or of weight gradients."""
        pipe = self.pipe if self.takes_turns else None
        return pipe is not None and bool(pipe.num_after or pipe.weights_lag or len(pipe.chunks) > 1)

    @property
    def num_backwards(self) -> int:
        """The number of times that a layer's backward runs, with others in between, before its gradients are reduced:
        once for each micro-batch, or once for all where they run layer by layer, and in stages."""
        return 1 if self.by_layer or self.pipe is not None else self.num_micro_batches

    @property
    def loss(self) -> fx.Node:
        node = self._outputs()[0]
        assert isinstance(node, fx.Node)
        return node

    @property
    def loss_scale(self) -> fx.Node | None:
        """The factor of the loss before backward, if there is one: float32, shape ``[]``."""
        return next((node for node in self.placeholders(Role.LOSS_SCALE) if tensor(node).dtype is torch.float32), None)

    @property
    def updates_begin(self) -> fx.Node | None:
        """The first node of the computation on all gradients, for which updates wait; None if there is none."""
        of_all = self.unscaling or self.clipping
        return None if of_all is None else of_all.begin

    @property
    def mutations(self) -> dict[str, fx.Node]:
        """Buffer name to the node that computes the buffer's next value."""
        return dict(zip(self.mutation_names, self._outputs()[1 + self.num_extras :], strict=False))

    @property
    def extras(self) -> tuple[fx.Node, ...]:
        """The step's results besides its loss, body by body."""
        return self._outputs()[1 : 1 + self.num_extras]

    @property
    def gradients(self) -> dict[str, fx.Node]:
        """Parameter name to the node that completes its gradient: that of the last micro-batch."""
        return self.gradients_by_body[-1]

    @property
    def gradients_by_body(self) -> tuple[dict[str, fx.Node], ...]:
        """For each body, parameter name to the node that computes its share of the gradient.

        A gradient is the sum of its shares in this order, of which a loop has one in each round.
        """
        gradients, length = self._outputs()[1 + self.num_extras + len(self.mutation_names) :], len(self.gradient_names)
        if not length:
            return ({},)
        starts = range(0, len(gradients), length)
        return tuple(dict(zip(self.gradient_names, gradients[i : i + length], strict=True)) for i in starts)

    def set_outputs(
        self,
        loss: fx.Node,
        mutations: Mapping[str, fx.Node],
        *gradients: Mapping[str, fx.Node],
        extras: Sequence[fx.Node] | None = None,
    ) -> None:
        """Rewrite the output node; ``gradients`` are one mapping for each micro-batch, all with the same names, and
        ``extras`` stay as they are where none are given."""
        extra_nodes = self.extras if extras is None else extras
        self.mutation_names, self.gradient_names = list(mutations), list(gradients[0]) if gradients else []
        shares = [share[name] for share in gradients for name in self.gradient_names]
        norm = [self.clipping.norm] if self.clipping is not None else []
        norm += [self.layer_squares] if self.layer_squares is not None else []
        norm += self.kept_gradients
        self.num_extras = len(extra_nodes)
        self.output.args = ((loss, *extra_nodes, *mutations.values(), *shares, *norm),)

    def placeholders(self, role: Role | None = None) -> Iterator[fx.Node]:
        for node in self.graph.find_nodes(op="placeholder"):
            if role is None or placeholder(node).role is role:
                yield node

    def last_placeholder(self) -> fx.Node:
        """The node after which the graph's first call may be put: all placeholders stand before it."""
        # The one made last is the last, or near it. Sorting them all for each that is added would take quadratic time.
        last: fx.Node = list(self.graph.find_nodes(op="placeholder", sort=False))[-1]
        while last.next.op == "placeholder":
            last = last.next
        return last

    def add_placeholder(self, name: str, what: Placeholder, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        """A new placeholder after the others, with a fake value of ``shape`` and ``dtype`` on the step's device."""
        last = self.last_placeholder()
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(name)
        set_value(node, self.fake(shape, dtype))
        return set_placeholder(node, what)

    def fake(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous fake tensor on the step's device; for equal arguments the same one, in the step's copies too."""
        key = (shape, dtype)
        if key not in self.fakes:
            self.fakes[key] = empty_like_fake(tensor(self.loss), shape, dtype, self.device)
        return self.fakes[key]

    def fake_view(self, base: fx.Node, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
        """The fake value of a strided view of a flat buffer; remembered like that of ``fake``."""
        flat = tensor(base)
        key = (tuple(flat.shape), flat.dtype, shape, stride, offset)
        if key not in self.fakes:
            self.fakes[key] = flat.as_strided(shape, stride, offset)
        return self.fakes[key]

    def clone(self) -> StepGraph:
        """A copy whose nodes have the same names, facts and fake values, to try a plan on."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            # Arguments that a node is made with are searched for symbolic numbers, which takes most of the time.
            copy = copies[node] = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
            copy.args = fx.map_arg(node.args, copies.__getitem__)
            if node.kwargs:
                copy.kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
            if copy.name != node.name:
                copy.name = node.name
            copy.meta = dict(node.meta)
        return replace(
            self,
            graph=graph,
            mutation_names=list(self.mutation_names),
            gradient_names=list(self.gradient_names),
            reduced={bucket: copies[node] for bucket, node in self.reduced.items()},
            clipping=None if self.clipping is None else self.clipping.remap(copies),
            unscaling=None if self.unscaling is None else self.unscaling.remap(copies),
            layer_squares=None if self.layer_squares is None else copies[self.layer_squares],
            kept_gradients=tuple(copies[node] for node in self.kept_gradients),
        )

    def calls(self) -> Iterator[fx.Node]:
        """All call_function nodes in order of execution."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    def nodes_by_name(self) -> dict[str, fx.Node]:
        """All nodes by name, to find those of the captured graph that a plan names: they keep their names.

        Nodes that passes insert have any free name: find them in ``tasks``, by their purpose.
        """
        return {node.name: node for node in self.graph.nodes}

    def tasks(self) -> dict[Task, fx.Node]:
        """The nodes that passes have put in and others ask for, by task."""
        return {task: node for node in self.calls() if (task := task_of(node)) is not None}

    def positions(self) -> dict[fx.Node, int]:
        return {node: i for i, node in enumerate(self.graph.nodes)}

    def unit_of(self, node: fx.Node) -> str:
        """The repeated layer that ``node`` is in, or ``""`` when it is in none."""
        return unit_of(origin(node).layer, self.units)

    def cut_piece_of(self, node: fx.Node) -> str | None:
        """The piece that ``node`` is in, or ``""`` where regions do not end at its borders; None for a node of none."""
        name = piece_of(node)
        return name if name is None or name in self.cut_pieces else ""

    def text(self) -> str:
        """The graph as text, one node a line, stable from run to run: what golden tests compare."""
        return "\n".join(node_text(node) for node in self.graph.nodes)

    def fingerprint(self) -> str:
        """SHA-256 of the graph's text: equal on two ranks exactly when they captured the same step."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def _outputs(self) -> tuple[Any, ...]:
        outputs = self.output.args[0]
        assert isinstance(outputs, tuple)
        return outputs
