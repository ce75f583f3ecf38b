"""Each rule of the verifier, on a graph that was broken by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from tests.lib.graphs import Block, Prepared, calls, features, prepare
from tests.lib.runs.offloads import offloading
from zerofx.errors import InvalidGraphError
from zerofx.ir import ops
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase, origin, set_copied_from, set_origin, set_value, value
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import loops_of
from zerofx.passes.verify import verify

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


def _updated_under_readers_in_place(prepared: Prepared) -> None:
    # After the release here, but nothing says that the other ranks are there too.
    release = max(calls(prepared.step, ops.release), key=prepared.step.positions().__getitem__)
    with prepared.step.graph.inserting_after(release):
        insert_call(prepared.step.graph, aten.mul_.Tensor, (prepared.node("shard_0"), 0.5), _WHERE)


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
    r"in place: gather_0 reads slices that may be written": _updated_under_readers_in_place,
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
    set_copied_from(_copy(prepared.step, drawn[0], drawn[1]), drawn[0].name)
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


def _offloading() -> Prepared:
    prepared = prepare()
    prepared.plan = offloading(prepared, prepared.plan, ["host"])
    return prepared.run()


def _read_behind_its_offload(prepared: Prepared) -> None:
    out = calls(prepared.step, ops.offload)[0]
    (stored,) = out.users
    with prepared.step.graph.inserting_after(stored):
        insert_call(prepared.step.graph, aten.neg.default, (out.args[0],), _WHERE)


def _never_reloaded(prepared: Prepared) -> None:
    reload = calls(prepared.step, ops.reload)[0]
    (again,) = reload.users
    (source,) = reload.all_input_nodes[0].all_input_nodes[0].all_input_nodes
    again.replace_all_uses_with(source)
    prepared.step.graph.erase_node(again)
    prepared.step.graph.erase_node(reload)


def _read_where_it_is_stored(prepared: Prepared) -> None:
    reload = calls(prepared.step, ops.reload)[0]
    with prepared.step.graph.inserting_after(reload):
        insert_call(prepared.step.graph, aten.neg.default, (reload.args[0],), _WHERE)


def _copied_out_of_what_may_be_gone(prepared: Prepared) -> None:
    out = calls(prepared.step, ops.offload)[0]
    (stored,) = out.users
    stored.args = (out,)


def _copied_back_from_what_may_be_gone(prepared: Prepared) -> None:
    reload = calls(prepared.step, ops.reload)[0]
    (again,) = reload.users
    again.args = (reload,)


def _reload_awaited_twice(prepared: Prepared) -> None:
    (again,) = calls(prepared.step, ops.reload)[0].users
    _copy(prepared.step, again, again)


_BROKEN_OFFLOADS: dict[str, Callable[[Prepared], None]] = {
    r"offload: neg_default reads (\w+) after stored_\1, which frees it": _read_behind_its_offload,
    r"offload: \w+ reads (\w+) after stored_\1, which frees it": _never_reloaded,
    r"offload: stored_\w+ has 1 reloads and is read by \['neg_default'\]": _read_where_it_is_stored,
    r"offload: stored_(\w+) awaits offload_\1 and does not hold \1 until then": _copied_out_of_what_may_be_gone,
    r"offload: (\w+)_again does not hold stored_\1 until its reload is done": _copied_back_from_what_may_be_gone,
    r"waits: reload_\w+ has 2 waits": _reload_awaited_twice,
}


@pytest.mark.parametrize(
    ("message", "hurt"), _BROKEN_OFFLOADS.items(), ids=[hurt.__name__[1:] for hurt in _BROKEN_OFFLOADS.values()]
)
def test_a_broken_offload_is_refused(message: str, hurt: Callable[[Prepared], None]) -> None:
    prepared = _offloading()
    verify(prepared.step, "all", prepared.plan)
    hurt(prepared)
    with pytest.raises(InvalidGraphError, match=f"after pass mine, {message}"):
        verify(prepared.step, "mine")


def test_an_offload_that_was_not_carried_out_is_refused() -> None:
    prepared = _offloading()
    elsewhere = tuple(replace(decision, tier="nvme") for decision in prepared.plan.offloads)
    for wrong in ((), elsewhere):
        with pytest.raises(InvalidGraphError, match="plan: the graph offloads"):
            verify(prepared.step, "all", prepared.plan.replace_absences(offloads=wrong))


def _read_after_its_round(prepared: Prepared) -> None:
    made = prepared.node("micro1_relu")
    with prepared.step.graph.inserting_before(prepared.step.output):
        insert_call(prepared.step.graph, aten.neg.default, (made,), _WHERE)


def _gone_after_the_first_round(prepared: Prepared) -> None:
    made = prepared.node("relu")
    with prepared.step.graph.inserting_before(prepared.node("micro1_relu")):
        insert_call(prepared.step.graph, aten.neg.default, (made,), _WHERE)


def _given_and_read_after_the_last_round(prepared: Prepared) -> None:
    (loop,) = loops_of(prepared.step)
    with prepared.step.graph.inserting_before(prepared.step.output):
        insert_call(prepared.step.graph, aten.neg.default, (loop.carries[0][0],), _WHERE)


_BROKEN_LOOPS: dict[str, Callable[[Prepared], None]] = {
    "loop: micro1_relu is made in each round, and read after the last": _read_after_its_round,
    "loop: relu is read in each round, and gone after the first": _gone_after_the_first_round,
    r"loop: \w+ is handed on to the first round, and read after the last": _given_and_read_after_the_last_round,
}


@pytest.mark.parametrize(
    ("message", "hurt"), _BROKEN_LOOPS.items(), ids=[hurt.__name__[1:] for hurt in _BROKEN_LOOPS.values()]
)
def test_a_broken_loop_is_refused(message: str, hurt: Callable[[Prepared], None]) -> None:
    prepared = prepare(num_micro_batches=4).run()
    verify(prepared.step, "all", prepared.plan)
    hurt(prepared)
    with pytest.raises(InvalidGraphError, match=f"after pass mine, {message}"):
        verify(prepared.step, "mine")
