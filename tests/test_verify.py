"""Each rule of the verifier, on a graph that was broken by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from tests.graphs import Block, Prepared, calls, features, prepare
from zerofx import ops
from zerofx.errors import InvalidGraphError
from zerofx.graph import Origin, Phase, StepGraph, insert_call, mark_copy, origin, set_origin, set_value, value
from zerofx.verify import verify

aten = torch.ops.aten
_WHERE = Origin("", Phase.BACKWARD)


def _copy(step: StepGraph, node: fx.Node, behind: fx.Node) -> fx.Node:
    with step.graph.inserting_after(behind):
        copy = step.graph.node_copy(node)
    set_value(copy, value(node))
    return set_origin(copy, origin(node))


def _read_before_it_is_made(prepared: Prepared) -> None:
    prepared.node("mm").append(prepared.node("batch_0"))


def _read_after_release(prepared: Prepared) -> None:
    release = calls(prepared.step, ops.release)[0]
    full = release.args[0]
    assert isinstance(full, fx.Node)
    with prepared.step.graph.inserting_after(release):
        insert_call(prepared.step.graph, aten.neg.default, (full,), _WHERE)


def _released_twice(prepared: Prepared) -> None:
    release = calls(prepared.step, ops.release)[0]
    _copy(prepared.step, release, release)


def _never_released(prepared: Prepared) -> None:
    prepared.step.graph.erase_node(calls(prepared.step, ops.release)[0])


def _never_awaited(prepared: Prepared) -> None:
    gather = calls(prepared.step, ops.all_gather)[0]
    with prepared.step.graph.inserting_after(gather):
        insert_call(prepared.step.graph, ops.all_gather, gather.args, _WHERE)


def _awaited_twice(prepared: Prepared) -> None:
    wait = calls(prepared.step, ops.wait)[0]
    _copy(prepared.step, wait, wait)


def _read_while_under_way(prepared: Prepared) -> None:
    gather = calls(prepared.step, ops.all_gather)[0]
    with prepared.step.graph.inserting_after(gather):
        insert_call(prepared.step.graph, aten.neg.default, (gather,), _WHERE)


def _reduced_twice(prepared: Prepared) -> None:
    reduction = calls(prepared.step, ops.reduce_scatter)[0]
    again = _copy(prepared.step, reduction, reduction)
    with prepared.step.graph.inserting_after(again):
        insert_call(prepared.step.graph, ops.wait, (again, reduction.args[0]), _WHERE)


def _updated_under_a_gather(prepared: Prepared) -> None:
    gather = calls(prepared.step, ops.all_gather)[0]
    with prepared.step.graph.inserting_after(gather):
        insert_call(prepared.step.graph, aten.mul_.Tensor, (gather.args[0], 0.5), _WHERE)


_BROKEN: dict[str, Callable[[Prepared], None]] = {
    r"order: mm reads batch_0, which comes later": _read_before_it_is_made,
    r"release: neg_default reads full_0 after its release": _read_after_release,
    r"release: full_0 is released twice": _released_twice,
    r"residency: what gather_0 gathers is never released": _never_released,
    r"waits: all_gather_default\w* has 0 waits": _never_awaited,
    r"waits: gather_0 has 2 waits": _awaited_twice,
    r"waits: gather_0 has 1 waits and is read by \['neg_default'\]": _read_while_under_way,
    r"gradients: bucket 2 is reduced 2 times": _reduced_twice,
    r"update: mul__tensor writes shard_0 before gather_0 is done": _updated_under_a_gather,
}


@pytest.mark.parametrize(("message", "hurt"), _BROKEN.items(), ids=[hurt.__name__[1:] for hurt in _BROKEN.values()])
def test_a_broken_graph_is_refused(message: str, hurt: Callable[[Prepared], None]) -> None:
    prepared = prepare().run()
    verify(prepared.step, "all", prepared.plan)
    hurt(prepared)
    with pytest.raises(InvalidGraphError, match=f"after pass mine, {message}"):
        verify(prepared.step, "mine")


def test_a_failure_shows_the_nodes_around_the_spot() -> None:
    prepared = prepare().run()
    _released_twice(prepared)
    with pytest.raises(InvalidGraphError) as caught:
        verify(prepared.step, "mine")
    lines = str(caught.value).splitlines()
    assert sum(line.startswith("> ") for line in lines) == 1
    assert any("aten.relu.default" in line for line in lines)


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.5)
        return x.sum()


def test_a_random_operator_that_is_run_again_is_refused() -> None:
    prepared = prepare(_Dropping(), features())
    drawn = calls(prepared.step, aten.bernoulli.p)
    verify(prepared.step, "capture")  # two of them, but each draws once
    assert len(drawn) == 2
    mark_copy(_copy(prepared.step, drawn[0], drawn[1]), drawn[0])
    with pytest.raises(InvalidGraphError, match=rf"random operators: \w+ runs {drawn[0].name} a second time"):
        verify(prepared.step, "mine")


def test_a_decision_that_was_not_carried_out_is_refused() -> None:
    prepared = prepare().run()
    fewer = replace(prepared.plan, gathers=prepared.plan.gathers[:-1])
    with pytest.raises(InvalidGraphError, match="plan: the graph gathers buckets"):
        verify(prepared.step, "all", fewer)
    none = replace(prepared.plan, reduces=())
    with pytest.raises(InvalidGraphError, match=r"plan: the graph reduces buckets .* the plan says \[\]"):
        verify(prepared.step, "all", none)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_the_passes_leave_is_accepted(stage: int, num_ranks: int) -> None:
    prepare(stage=stage, num_ranks=num_ranks).run_pipeline()
