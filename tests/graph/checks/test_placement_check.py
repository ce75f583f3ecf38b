"""The check of placements finds what is wrong with a rank's graph, and nothing where it is right."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.lib.models.parameters import Regression
from zerofx.capture.trace import Batch, capture
from zerofx.errors import InvalidGraphError
from zerofx.ir import ops
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.own_draws import OWN_DRAWS
from zerofx.ir.op_kernels.own_rows import own_ends, own_rows, whole_rows
from zerofx.passes.lib.placement_check import WholeCall, check_placements, whole_calls
from zerofx.passes.prepare.partition import partition
from zerofx.passes.prepare.simplify import simplify
from zerofx.scheduler.plan.decisions import ShardingDecision

aten = torch.ops.aten
ROWS, DIM, HIDDEN = 8, 16, 32


class Feed(Regression):
    """Columns and then rows of a product, a bias, and a mean over tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM, bias=False)
        self.bias, self.drop = nn.Parameter(torch.zeros(DIM)), nn.Dropout(dropout) if dropout else nn.Identity()

    def predict(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.down(self.drop(torch.relu(self.up(x)))) + self.bias)
        return y.mean(0, keepdim=True).expand(ROWS, DIM)


class Experts(Regression):
    """Each token is given to all experts, and their results are weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, DIM, HIDDEN)), nn.Parameter(torch.randn(4, HIDDEN, DIM))

    def predict(self, x: Tensor) -> Tensor:
        share: Tensor = self.router(x).softmax(-1).t().unsqueeze(-1)
        return x + (torch.relu(x @ self.up) @ self.down * share).sum(0)


class Routed(Regression):
    """Each token is given to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, DIM, HIDDEN)), nn.Parameter(torch.randn(4, HIDDEN, DIM))

    def predict(self, x: Tensor) -> Tensor:
        experts, order = x[:, :4].argmax(-1).sort()
        ends = F.one_hot(experts, 4).sum(0).cumsum(0, dtype=torch.int32)
        import transformers.integrations.moe  # noqa: F401  # it registers the operator

        grouped_mm = torch.ops.transformers.grouped_mm_fallback
        y: Tensor = grouped_mm(torch.relu(grouped_mm(x[order], self.up, ends)), self.down, ends)
        return y[order.argsort()]


class Classes(nn.Module):
    """The loss of rows that are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), y)


Shared = tuple[StepGraph, Mapping[str, WholeCall]]

# How calls are shared: of node names, how tensor arguments lie, and results.
_FEED = {
    "up_weight, up_bias": "-> S0",
    "down_weight": "-> S1",
    "t": "S0 -> S1",
    "addmm": "S0 R S1 -> S1",
    "relu": "S1 -> S1",
    "t_1": "S1 -> S0",
    "mm": "S1 S0 -> P",
    "mean": "S0 -> P",
}
_DROPPING = {"empty_like, permute, bernoulli, permute_1, mul_1": "S1 -> S1", "mul": "S1 S1 -> S1"}
_EXPERTS = {
    "up, down": "-> S0",
    "expand": "R -> S0",
    "view, expand_1, view_1, _unsafe_view, relu, expand_2, view_2, expand_3, view_3, _unsafe_view_1": "S0 -> S0",
    "bmm, bmm_1, mul": "S0 S0 -> S0",
    "sum_1": "S0 -> P",
}
_ROUTED = {
    "up, down": "-> S0",
    "grouped_mm_fallback, grouped_mm_fallback_1": "S0[cumsum] S0 R -> S0[cumsum]",
    "relu": "S0[cumsum] -> S0[cumsum]",
    "threshold_backward": "S0[cumsum] S0[cumsum] -> S0[cumsum]",
    "grouped_mm_fallback_backward, grouped_mm_fallback_backward_1": "S0[cumsum] S0 R S0[cumsum] -> S0[cumsum] S0",
}
_CLASSES = {"_log_softmax": "S0 -> S0", "nll_loss_forward": "S0 S0 -> P R"}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "feed": (Feed, _FEED),
    "dropping": (lambda: Feed(0.1), {**_FEED, **_DROPPING}),
    "experts": (Experts, _EXPERTS),
    "routed": (Routed, _ROUTED),
    "classes": (Classes, _CLASSES),
}


def of(name: str) -> Shared:
    """One rank's graph of two, and what it is made of."""
    make, ways = MODELS[name]
    y = torch.zeros(ROWS, dtype=torch.int64) if name == "classes" else torch.zeros(ROWS, DIM)
    step = capture(make(), Batch.from_call((torch.zeros(ROWS, DIM), y), {}))
    simplify(step)
    whole = whole_calls(step)
    decisions = [
        ShardingDecision(node, tuple(way.partition("->")[2].split()), tuple(way.partition("->")[0].split()))
        for nodes, way in ways.items()
        for node in nodes.split(", ")
    ]
    partition(step, tuple(decisions), 2)
    return step, whole


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_that_is_right_is_right(name: str) -> None:
    step, whole = of(name)
    assert any(node.target in ops.VALUE_COLLECTIVES for node in step.calls())
    assert check_placements(step, whole, 2) == []


def calls(step: StepGraph, *targets: Any) -> list[fx.Node]:
    return [node for node in step.calls() if node.target in targets]


def named(step: StepGraph, name: str) -> fx.Node:
    return step.nodes_by_name()[name]


def found(shared: Shared, match: str) -> None:
    step, whole = shared
    with pytest.raises(InvalidGraphError, match=match):
        check_placements(step, whole, 2)


def reductions(step: StepGraph) -> list[fx.Node]:
    """What gives sums of terms."""
    return [node for node in calls(step, ops.wait) if node.all_input_nodes[0].target is ops.all_reduce_values]


def started(wait: fx.Node) -> fx.Node:
    return wait.all_input_nodes[0].all_input_nodes[0]


def with_sum(step: StepGraph, terms: fx.Node, place: fx.Node) -> fx.Node:
    """A sum over the ranks, made in front of ``place``."""
    where = Origin("", Phase.FORWARD)
    with step.graph.inserting_before(place):
        pending = insert_call(step.graph, ops.all_reduce_values, (terms, "sum", 2), where, {"over": "model"})
        return insert_call(step.graph, ops.wait, (pending, terms), where)


def test_a_bias_that_is_added_on_every_rank_before_the_reduction() -> None:
    step, whole = of("feed")
    add = named(step, "add")
    (summed,) = (node for node in add.all_input_nodes if node.target is ops.wait)
    add.replace_input_with(summed, started(summed))
    done = with_sum(step, add, add.next)
    add.replace_all_uses_with(done, delete_user_cb=lambda user: user not in (*done.all_input_nodes, done))
    found((step, whole), "placements: add: no way")


@pytest.mark.parametrize("name", MODELS)
def test_a_sum_of_what_ranks_have_that_is_not_taken(name: str) -> None:
    """Each of them; below experts, say, whose ranks have the results of some each."""
    for number in range(len(reductions(of(name)[0]))):
        step, whole = of(name)
        wait = reductions(step)[number]
        wait.replace_all_uses_with(started(wait))
        found((step, whole), "placements: ")


def test_tokens_of_others_that_are_counted_as_this_ranks_experts() -> None:
    step, whole = of("routed")
    first = calls(step, own_rows)[0]
    first.replace_all_uses_with(first.all_input_nodes[0])
    found((step, whole), "placements: grouped_mm_fallback: no way")


def test_tokens_of_experts_that_end_where_those_of_all_do() -> None:
    step, whole = of("routed")
    product = named(step, "grouped_mm_fallback")
    (ends,) = (node for node in product.all_input_nodes if node.target is own_ends)
    product.replace_input_with(ends, ends.all_input_nodes[0])
    found((step, whole), "placements: grouped_mm_fallback: ")


def test_tokens_that_are_not_put_back_before_they_are_summed() -> None:
    step, whole = of("routed")
    (back,) = (node for node in calls(step, whole_rows) if node.all_input_nodes[0].name == "grouped_mm_fallback_1")
    back.replace_all_uses_with(back.all_input_nodes[0])
    found((step, whole), r"a collective of terms \(P\) is given none")


def test_a_sum_that_is_taken_twice() -> None:
    step, whole = of("feed")
    wait = reductions(step)[0]
    again = with_sum(step, wait, wait.next)
    wait.replace_all_uses_with(again, delete_user_cb=lambda user: user not in (*again.all_input_nodes, again))
    found((step, whole), r"a collective of terms \(P\) is given none")


def test_draws_that_are_alike_on_parts() -> None:
    step, whole = of("dropping")
    own = named(step, "bernoulli")
    assert own.target is OWN_DRAWS[aten.bernoulli.p]
    own.target, own.kwargs = aten.bernoulli.p, {}
    found((step, whole), "placements: bernoulli: no way")


def test_draws_that_are_unlike_on_what_all_ranks_have() -> None:
    step, whole = of("dropping")
    alike = named(step, "bernoulli_1")
    alike.target, alike.kwargs = OWN_DRAWS[aten.bernoulli.p], {"rank": named(step, "model_rank_on_host")}
    found((step, whole), "placements: bernoulli_1: ")


def test_a_mean_over_local_tokens() -> None:
    step, whole = of("feed")
    mean = named(step, "mean")
    assert mean.target is aten.div.Scalar and mean.args[1] == 2
    mean.replace_all_uses_with(mean.all_input_nodes[0])
    found((step, whole), r"a collective of terms \(P\) is given none")


def test_a_loss_that_is_a_mean_over_local_rows() -> None:
    step, whole = of("classes")
    (loss,) = calls(step, aten.nll_loss_forward.default)
    assert loss.args[3] == 2
    loss.update_arg(3, 1)
    found((step, whole), f"placements: {loss.name}: no way")


def test_a_number_that_counts_local_elements() -> None:
    step, whole = of("feed")
    gradient = named(step, "div")
    assert gradient.args[1] == ROWS
    gradient.update_arg(1, ROWS // 2)
    found((step, whole), "placements: div: numbers among its arguments")


def test_a_gradient_that_is_whole_where_a_bucket_is_summed() -> None:
    step, whole = of("feed")
    outputs = list(step.output.args[0])  # type: ignore[arg-type]  # a tuple
    place = len(outputs) - len(step.gradient_names) + step.gradient_names.index("bias")
    outputs[place] = with_sum(step, outputs[place], step.output)
    step.output.args = (tuple(outputs),)
    found((step, whole), "the gradient of bias is to lie as P")


def test_getitem_of_what_is_unknown_is_unknown() -> None:
    step, whole = of("classes")
    (loss,) = calls(step, aten.nll_loss_forward.default)
    with step.graph.inserting_before(loss):
        strange = insert_call(step.graph, operator.neg, (loss.args[0],), Origin("", Phase.FORWARD))
    loss.update_arg(0, strange)
    assert strange in check_placements(step, whole, 2)
