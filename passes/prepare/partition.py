"""Turn the captured graph, of whole values, into one rank's, whose values lie on the model axis as decided.

    y = mm(x, w)            x lies whole, w by columns:     y = mm(x, w_columns)             # S1: this rank's columns
    z = mm(y, v)            v by rows:                      z = mm(y, v_rows)                # P: parts that add up
    r = add(z, x)           r lies by rows:                 sum = reduce_scatter_values(view(z, ...), 2, "model")
                                                            s = wait(sum); r = add(s, index_select(x, ...))

Every call is given what it reads as its decision says (``passes/lib/local_graph.py`` has the conversions); a conversion
serves all readers that ask for it, in forward and in backward, unless the decision about the value has backward's made
again. Sizes in a call's arguments become local ones. A call without a decision is done by every rank. A parameter
becomes this rank's part of it, and its gradient lies as it does, or, where every rank has the parameter, is left as
parts that add up over the axis. What all ranks have is drawn alike on all of them, from torch's generators, which they
have in one state; what lies in parts each rank draws for itself (``zerofx/ir/op_kernels/own_draws.py``).

Does not handle: sizes that the ranks do not divide, which no decision shards.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir.aliasing import storage_source
from zerofx.ir.edit import erase_unread
from zerofx.ir.facts import (
    Phase,
    Placeholder,
    Role,
    is_random,
    origin,
    piece_of,
    placeholder,
    set_alike,
    set_placeholder,
    set_value,
    tensor,
)
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.row_rounds import may_miss_rows
from zerofx.ir.operators.operator import OperatorKind
from zerofx.ir.operators.table import facts_of
from zerofx.ir.parameters import ParameterInfo
from zerofx.ir.sharding.grouped import align_operands
from zerofx.ir.sharding.rule import Rule, results_of, sharing_key
from zerofx.ir.sharding.rules import replication_rule, rule_for
from zerofx.passes.lib.local_graph import AXIS, LocalCallOf, LocalGraph
from zerofx.scheduler.analysis.saved_values import value_node
from zerofx.scheduler.analysis.sharding_ways import slot_of
from zerofx.scheduler.plan.decisions import ShardingDecision
from zerofx.scheduler.plan.placements import (
    LOSS_OF_OVERFLOW,
    REPLICATED,
    SUM,
    Placement,
    Ragged,
    Replicated,
    Sharded,
    local_shape,
    placement_of,
)
from zerofx.torch_private.operators import schema_of
from zerofx.torch_private.tensors import use_mode_of

_aten = torch.ops.aten
_SIZES = frozenset({"size", "input_size", "input_sizes", "shape"})  # arguments that have the shape of the result


@dataclass(frozen=True)
class Partition:
    """Turn the captured graph, of whole values, into one rank's."""

    shardings: tuple[ShardingDecision, ...]
    num_parts: int
    name: str = "partition"

    def run(self, step: StepGraph) -> None:
        partition(step, self.shardings, self.num_parts)


def partition(step: StepGraph, shardings: tuple[ShardingDecision, ...], num_parts: int) -> None:
    """Rewrite ``step`` in place for one of ``num_parts`` ranks.

    Raises:
        PlanError: a decision is about a node that the graph has not, or is none that its operator allows.
    """
    decided = {decision.node: decision for decision in shardings}
    missing = decided.keys() - step.nodes_by_name().keys()
    if missing:
        raise PlanError(f"the plan shards {min(missing)}, which this graph has not; make the plan anew for this model")
    with use_mode_of(tensor(step.loss)):
        _Partitioning(step, decided, num_parts).run()


class _Partitioning:
    """The graph of one rank as it is written, and where the values of the whole graph are in it."""

    def __init__(self, step: StepGraph, decided: Mapping[str, ShardingDecision], num_parts: int) -> None:
        self._step, self._decided, self._num_parts = step, decided, num_parts
        self._named = step.nodes_by_name()
        self._graph, self._names = fx.Graph(), dict[fx.Node, str]()
        self._results: dict[fx.Node, tuple[Any, Rule]] = {}  # of calls: a node, or a tuple of nodes
        self._values: dict[fx.Node, tuple[fx.Node, Placement]] = {}
        self._rules: dict[tuple[object, ...], Rule | None] = {}
        self._converted: dict[tuple[fx.Node, Placement, Phase | None], fx.Node] = {}
        self._alike: list[fx.Node] = []  # what all ranks have
        self._counts: dict[tuple[Any, ...], fx.Node] = {}  # of rows that are to find room

    def run(self) -> None:
        step = self._step
        for node in step.placeholders():
            self._place(node)
        rank = self._add_input("model_rank", step.fake((1,), torch.int64), Role.RANK)
        host_rank = None
        if any(map(is_random, step.calls())):
            fake = torch.empty((), dtype=torch.int64, device="cpu")
            host_rank = self._add_input("model_rank_on_host", fake, Role.HOST_RANK)
        asked = self._output_placements()
        completed: dict[fx.Node, list[Placement]] = {}
        for node, placement in asked[len(asked) - len(step.gradient_names) :]:
            completed.setdefault(node, []).append(placement)
        for node in self._nodes_in_order():
            local = LocalGraph(
                self._graph, self._num_parts, rank, host_rank, origin(node), self._whole_value, piece_of(node),
                self._counts,
            )  # fmt: skip
            if node.target is operator.getitem:
                self._pick(node, local)
            elif node.op == "call_function":
                self._call(node, local)
            elif node.op == "output":
                loss, *others = (self._convert(result, placement, local) for result, placement in asked)
                self._graph.output(self._mark_loss(loss, others, local))
            for placement in completed.get(node, ()):  # not where the step ends: no bucket would be complete before
                self._convert(node, placement, local)
        if self._counts:  # zeros that rows are added to: a rank makes its own
            erase_unread(self._graph)
        self._name_nodes()
        for node in self._alike:
            set_alike(value_node(storage_source(node)), 1)
        parameters = {placeholder(node).name: node for node in step.placeholders(Role.PARAMETER)}
        step.parameters = tuple(
            self._part(info, parameters[info.name]) if info.name in parameters else info for info in step.parameters
        )
        step.graph = self._graph
        step.shardings = tuple(self._decided.values())

    def _nodes_in_order(self) -> Iterable[fx.Node]:
        """The nodes in their order, but for what says where rows end, which is there before any of these are sent."""
        order = dict[fx.Node, None]()
        ends = {name: _names_of_ends(decision) for name, decision in self._decided.items()}

        def visit(node: fx.Node) -> None:
            for source in (*node.all_input_nodes, *(self._named[name] for name in ends.get(node.name, ()))):
                if source not in order:
                    visit(source)
            order.setdefault(node)

        for node in self._step.graph.nodes:
            visit(node)
        return order

    def _mark_loss(self, loss: fx.Node, others: list[fx.Node], local: LocalGraph) -> tuple[fx.Node, ...]:
        """The step's results: where rows of experts are sent, the loss is ``LOSS_OF_OVERFLOW`` if some have found no
        room, and the last of what forward gives is the most rows that a rank has for another, in equal shares."""
        if not self._counts:
            return loss, *others
        most = local.call(_aten.amax.default, local.call(_aten.stack.default, list(self._counts.values())), [0])
        if any(map(may_miss_rows, self._counts.values())):
            missed = local.call(_aten.gt.Scalar, local.call(_aten.select.int, most, 0, 1), 0)
            loss = local.call(_aten.masked_fill.Scalar, loss, missed, LOSS_OF_OVERFLOW)
        num_extras = self._step.num_extras
        self._step.num_extras += 1
        return loss, *others[:num_extras], most, *others[num_extras:]

    def _add_input(self, name: str, fake: torch.Tensor, role: Role) -> fx.Node:
        node = self._graph.placeholder(name)
        set_placeholder(node, Placeholder(role, AXIS))
        return set_value(node, fake)

    def _whole_value(self, name: str, local: LocalGraph) -> fx.Node:
        return self._convert(self._named[name], REPLICATED, local)

    def _name_nodes(self) -> None:
        """Nodes of the whole graph keep their names; those that are put in have ones that it has not."""
        taken, numbers = {node.name for node in self._step.graph.nodes}, Counter[str]()
        for node in self._graph.nodes:
            if node in self._names or node.op == "output":
                node.name = self._names.get(node, node.name)
                continue
            called = node.target
            base = "model_" + called.__name__.partition(".")[0] if callable(called) else node.name
            name = base
            while name in taken:
                numbers[base] += 1
                name = f"{base}_{numbers[base]}"
            taken.add(name)
            node.name = name

    def _place(self, node: fx.Node) -> None:
        """A placeholder: a parameter as it is decided, all else whole."""
        decision = self._decided.get(node.name)
        (text,) = ("R",) if decision is None else decision.outputs
        placement = placement_of(text or "R")
        local = self._graph.placeholder(node.name)
        self._keep_facts(local, node)
        if isinstance(placement, Sharded):
            whole = tensor(node)
            part = whole.narrow(placement.dim, 0, whole.shape[placement.dim] // self._num_parts)
            set_value(local, torch.empty_like(part))
        else:
            set_value(local, node.meta["val"])
        self._values[node] = local, placement

    def _keep_facts(self, local: fx.Node, node: fx.Node) -> None:
        local.meta.update({name: fact for name, fact in node.meta.items() if name != "val"})
        self._names[local] = node.name

    def _pick(self, node: fx.Node, local: LocalGraph) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        results, rule = self._results[source]
        placement = rule.outputs[index]
        assert placement is not None, node
        picked = results[index] if isinstance(results, tuple) else local.call(operator.getitem, results, index)
        self._keep_facts(picked, node)
        self._values[node] = picked, placement
        self._alike += [picked] if placement == REPLICATED else []

    def _call(self, node: fx.Node, local: LocalGraph) -> None:
        rule = self._rule(node)
        read, takes_dense = iter(rule.inputs), facts_of(node.target).takes_dense

        def local_argument(source: fx.Node) -> fx.Node:
            part = self._convert(source, next(read), local)
            return local.match_format(part, tensor(source)) if takes_dense else part

        args, kwargs = fx.map_arg((node.args, node.kwargs), local_argument)
        results = (rule.local or _same_call)(LocalCallOf(node, rule, args, dict(kwargs), local))
        self._results[node] = results, rule
        self._check(node, results, rule)
        if isinstance(results, fx.Node):
            self._keep_facts(results, node)
            if isinstance(node.meta.get("val"), torch.Tensor):
                assert rule.outputs[0] is not None
                self._values[node] = results, rule.outputs[0]
                self._alike += [results] if rule.outputs[0] == REPLICATED else []

    def _check(self, node: fx.Node, results: Any, rule: Rule) -> None:
        local = results_of(results) if isinstance(results, fx.Node) else tuple(result.meta["val"] for result in results)
        for whole, part, placement in zip(results_of(node), local, rule.outputs, strict=True):
            if whole is not None and part is not None and placement is not None:
                expected = local_shape(tuple(whole.shape), placement, self._num_parts)
                assert tuple(part.shape) == expected, f"{node.format_node()} as {rule}: {tuple(part.shape)}, {expected}"

    def _rule(self, node: fx.Node) -> Rule:
        decision = self._decided.get(node.name)
        if decision is None:
            return replication_rule(node)
        outputs = tuple(None if text is None else placement_of(text) for text in decision.outputs)
        key = (sharing_key(node), decision.outputs, decision.inputs)
        if key not in self._rules:  # calls of layers that are alike have one
            self._rules[key] = rule_for(node, outputs, tuple(map(placement_of, decision.inputs)), self._num_parts)
        rule = self._rules[key]
        if rule is None:
            raise PlanError(
                f"expected a way to share {node.name} ({node.target}) among {self._num_parts} ranks, found {decision}; "
                f"make the plan anew for this model"
            )
        return rule

    def _convert(self, source: fx.Node, target: Placement, local: LocalGraph) -> fx.Node:
        """A value of the whole graph in a reader's placement, at the end of the local graph."""
        node, placement = self._values[source]
        if placement == target:
            return node
        call, index = slot_of(source)
        decision = self._decided.get(call.name) if index == 0 else None
        again = decision is not None and str(target) in decision.again
        key = (source, target, local.where.phase if again else None)
        if key not in self._converted:
            shape = tuple(tensor(source).shape)
            self._converted[key] = local.convert(node, placement, target, shape)
            self._alike += [self._converted[key]] if target == REPLICATED else []
        return self._converted[key]

    def _output_placements(self) -> list[tuple[fx.Node, Placement]]:
        """The step's results with their placements: whole, but gradients are placed like their parameters, or are
        partial sums if these are whole."""
        step = self._step
        parameters = {placeholder(node).name: node for node in step.placeholders(Role.PARAMETER)}
        lies = [self._values[parameters[name]][1] for name in step.gradient_names]
        outputs = step.output.args[0]
        assert isinstance(outputs, tuple)
        asked = [SUM if isinstance(placement, Replicated) else placement for placement in lies]
        return list(zip(outputs, [*[REPLICATED] * (len(outputs) - len(asked)), *asked], strict=True))

    def _part(self, info: ParameterInfo, node: fx.Node) -> ParameterInfo:
        local, placement = self._values[node]
        if not isinstance(placement, Sharded):
            return info
        fake = tensor(local)
        return replace(info, shape=tuple(fake.shape), stride=fake.stride(), part=placement, num_parts=self._num_parts)


def _names_of_ends(decision: ShardingDecision) -> set[str]:
    lies = (placement_of(text) for text in (*decision.outputs, *decision.inputs) if text is not None and "[" in text)
    return {placement.ends for placement in lies if isinstance(placement, Ragged)}


def _same_call(rank: LocalCallOf) -> fx.Node:
    """The call itself, with local sizes in the place of the result's."""
    node, args, kwargs = rank.node, align_operands(rank), dict(rank.kwargs)
    whole, placement = next(zip(results_of(node), rank.rule.outputs, strict=True), (None, None))
    if isinstance(placement, Sharded | Ragged) and whole is not None:
        shape = list(local_shape(tuple(whole.shape), placement, rank.num_ranks))
        for position, argument in enumerate(schema_of(node.target).arguments):  # type: ignore[arg-type]  # an operator
            if argument.name in _SIZES and position < len(args):
                args[position] = shape
            elif argument.name in _SIZES and argument.name in kwargs:
                kwargs[argument.name] = shape
    if facts_of(node.target).kind is OperatorKind.RESHAPE:
        return rank.graph.reshape(args[0], args[1])
    return rank.call(node.target, *args, **kwargs)
