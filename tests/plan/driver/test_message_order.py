"""Messages of stages as they are emitted: each end receives what the other sends, and no stage waits for ever.

As in ``zerofx/passes/lib/message_check.py``, which looks at one micro-batch before it is planned: here the steps that
run, with all passes and loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zerofx
from gpt import GPT
from tests.lib.models import adamw
from tests.plan.decide.test_stages import Norms, Skipping
from zerofx.errors import InvalidGraphError
from zerofx.ir import ops
from zerofx.ir.facts import message_number
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import loops_of
from zerofx.passes.lib.message_check import check_order, order_on_links

_Place = tuple[int, int, int]  # of a message: sender, receiver, and how many this one has sent to that before


@dataclass
class _Stage:
    """Messages of a stage in the order of its program: at each place what it starts, or waits for."""

    started: dict[_Place, object] = field(default_factory=dict)  # with the number of the message
    events: list[tuple[_Place, bool]] = field(default_factory=list)  # waits are marked
    at: int = 0


def _program(step: StepGraph) -> Iterator[fx.Node | dict[fx.Node, fx.Node]]:
    """The nodes of a step as they run, and what the rounds of loops hand on, where they end."""
    loops = {loop.end: loop for loop in loops_of(step)}
    rounds = {end: loop.num_rounds for end, loop in loops.items()}
    node = next(iter(step.calls()))
    while node.op != "output":
        yield node
        if node in loops:
            yield dict(loops[node].carries)
            rounds[node] -= 1
            node = loops[node].begin if rounds[node] else node
        node = node.next


def _run_through(step: StepGraph, number: int) -> _Stage:
    stage, places, counts = _Stage(), dict[fx.Node, _Place](), dict[tuple[int, int], int]()
    for node in _program(step):
        if isinstance(node, dict):
            places.update([(before, places[after]) for before, after in node.items() if after in places])
        elif node.target in ops.MESSAGES:
            sends = node.target is ops.send_value
            peer = int(str(node.args[1 if sends else 0]))
            link = (number, peer) if sends else (peer, number)
            counts[link] = counts.get(link, 0) + 1
            places[node] = (*link, counts[link])
            stage.started[places[node]] = message_number(node)
            stage.events.append((places[node], False))
        elif node.target is ops.wait and node.args[0] in places:
            stage.events.append((places[node.args[0]], True))  # type: ignore[index]
    return stage


def _stuck(stages: list[_Stage]) -> list[int]:
    """The stages that do not come to their end, where each waits until the other end is at what it waits for."""
    num_ends, goes_on = dict[_Place, int](), True
    while goes_on:
        goes_on = False
        for stage in stages:
            while stage.at < len(stage.events):
                place, waits = stage.events[stage.at]
                if waits and num_ends[place] < 2:
                    break
                num_ends[place] = num_ends.get(place, 0) + (not waits)
                stage.at, goes_on = stage.at + 1, True
    return [number for number, stage in enumerate(stages) if stage.at < len(stage.events)]


@dataclass(frozen=True)
class _Case:
    """A model in so many stages, with so many micro-batches, in an order."""

    model: Callable[[], nn.Module]
    num_stages: int
    num: int
    order: str
    batch: Callable[[int], tuple[Tensor, ...]] = lambda rows: (torch.ones(rows, 8),)
    options: tuple[tuple[str, Any], ...] = ()

    def graphs(self) -> list[StepGraph]:
        """The emitted steps of all stages, of two GPUs each."""
        model = self.model()
        planned = zerofx.plan(
            model, adamw(model), self.batch(2 * self.num), stage=3, mesh={"pipe": self.num_stages, "shard": 2},
            machine="h100-sxm", backend="eager", accumulate=self.num, max_grad_norm=1.0,
            **{"order": self.order, **dict(self.options)},
        )  # fmt: skip
        return [stage.lowered.graph for stage in planned.stages]


def _gpt() -> nn.Module:
    return GPT(vocab=19, dim=16, depth=4, heads=2, block=16)


def _ids(rows: int) -> tuple[Tensor, ...]:
    return tuple(torch.randint(19, (2, rows, 16)))


CASES = {
    "1F1B": _Case(_gpt, 2, 6, "micro-batch", _ids),
    "1F1B, skips": _Case(Skipping, 3, 7, "micro-batch"),
    "1F1B, few": _Case(Skipping, 4, 2, "micro-batch"),
    "GPipe": _Case(Skipping, 4, 5, "layer"),
    "weight gradients apart": _Case(Skipping, 4, 8, "zero-bubble"),
    "two chunks": _Case(_gpt, 2, 5, "interleaved", _ids),
    "round robin": _Case(_gpt, 2, 5, "round-robin", _ids),
    "statistics": _Case(
        Norms,
        2,
        4,
        "micro-batch",
        lambda rows: (torch.ones(rows, 8), torch.ones(rows, 1)),
        (("loss_fn", nn.MSELoss()),),
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_emitted_messages_meet(name: str) -> None:
    graphs = CASES[name].graphs()
    stages = [_run_through(graph, number) for number, graph in enumerate(graphs)]
    assert _stuck(stages) == []
    ends: dict[_Place, list[object]] = {}
    for stage in stages:
        for place, number in stage.started.items():
            ends.setdefault(place, []).append(number)
    assert all(len(of_ends) == 2 and of_ends[0] == of_ends[1] for of_ends in ends.values())
    assert {place[:2] for place in ends} == {link for graph in graphs for link in order_on_links(graph)}


def test_stages_that_each_wait_for_what_they_send_are_found() -> None:
    there, back = (0, 1, 1), (1, 0, 1)
    orders = [(there, back), (back, there)]
    stages = [_Stage(events=[(place, waits) for place in order for waits in (False, True)]) for order in orders]
    assert _stuck(stages) == [0, 1]


def test_a_message_that_a_pass_moves_past_another_is_found() -> None:
    graph = CASES["1F1B, skips"].graphs()[0]
    before = order_on_links(graph)
    check_order(graph, {link: [n for n in numbers if n is not None] for link, numbers in before.items()})
    link, numbers = next((link, numbers) for link, numbers in before.items() if len(set(numbers)) > 1)
    with pytest.raises(InvalidGraphError, match=f"from stage {link[0]} to {link[1]} they are in another order"):
        check_order(graph, {link: numbers[::-1]})
