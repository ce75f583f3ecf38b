"""Where steps are cut into stages, what crosses, and how long stages wait for each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.models import adamw
from tests.lib.runs.stages import Wide
from zerofx import MemoryBudgetError, UsageError
from zerofx.driver.plan_only import PlannedStep
from zerofx.errors import InvalidGraphError
from zerofx.ir import ops
from zerofx.ir.facts import Phase, Role, origin, placeholder, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import times_run
from zerofx.passes.lib.message_check import check_messages
from zerofx.scheduler.cost.stages import StageSeconds, simulate_stages


class Skipping(nn.Module):
    """Layers whose first value is read by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.layers[0](x))
        second = torch.relu(self.layers[1](first))
        third = torch.relu(self.layers[2](second))
        result: Tensor = (self.layers[3](third) * first).sum()
        return result


def planned(model: nn.Module, batch: tuple[Tensor, ...], num_stages: int, **options: Any) -> PlannedStep:
    options = {"machine": "cpu", "backend": "eager", "accumulate": 4, **options}
    return zerofx.plan(model, adamw(model), batch, mesh={"pipe": num_stages}, **options)


def gpt(**options: Any) -> PlannedStep:
    model = GPT(vocab=19, dim=16, depth=4, heads=2, block=16)
    return planned(model, tuple(torch.randint(19, (2, 8, 16))), 2, **options)


def test_each_parameter_is_in_one_stage_and_all_are_in_some() -> None:
    stages = gpt().stages
    names = [slot.name for stage in stages for bucket in stage.layout.buckets for slot in bucket.slots]
    model = GPT(vocab=19, dim=16, depth=4, heads=2, block=16)
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def _messages(stage: PlannedStep) -> tuple[list[int], list[int]]:
    """The stages that a micro-batch is sent to, and those that it hears of, in order."""
    calls = [node for node in stage.lowered.graph.calls() if not node.name.startswith("micro")]
    sent = [node.args[1] for node in calls if node.target is ops.send_value]
    received = [node.args[0] for node in calls if node.target is ops.receive_value]
    return sent, received  # type: ignore[return-value]  # numbers of stages


def test_a_skip_is_sent_once_and_its_gradient_comes_back_once() -> None:
    stages = planned(Skipping(), (torch.ones(8, 8),), 4).stages
    # The second stage sends its value to the last, and what it makes of that to the third.
    assert _messages(stages[0]) == ([1], [3, 1])
    assert _messages(stages[1]) == ([3, 2, 0], [0, 3, 2, 3])
    assert _messages(stages[2]) == ([3, 1], [1, 3, 3])
    # The loss goes to all others, and then the gradients.
    assert _messages(stages[3]) == ([0, 1, 2, 1, 2], [2, 1])


class Norms(nn.Sequential):
    """Layers with batch norm, whose statistics stages hand to each other when a step ends."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)), nn.Linear(8, 1))


def test_statistics_are_handed_on_once_a_step() -> None:
    stages = planned(Norms(), (torch.ones(16, 8), torch.ones(16, 1)), 2, loss_fn=nn.MSELoss()).stages
    runs = [times_run(stage.lowered.graph) for stage in stages]
    messages = [(node, times[node]) for times in runs for node in times if node.target in ops.MESSAGES]
    statistics = [(node, times) for node, times in messages if origin(node).phase is Phase.UPDATE]
    assert {times for _, times in statistics} == {1}
    sent = [node.all_input_nodes[0] for node, _ in statistics if node.target is ops.send_value]
    received = [node for node, _ in statistics if node.target is ops.receive_value]
    assert len(sent) == len(received) == 8 and {placeholder(node).role for node in sent} == {Role.BUFFER}
    assert {tuple(tensor(node).shape) for node in sent} == {(8,)}  # counts follow from the batch


def _staged() -> list[StepGraph]:
    """The stages of a micro-batch, before it is unrolled."""
    return [stage.lowered.graph for stage in planned(Skipping(), (torch.ones(8, 8),), 3, accumulate=1).stages]


@pytest.mark.parametrize("num", [1, 2, 3, 4, 7])
def test_messages_of_all_stages_meet(num: int) -> None:
    check_messages(_staged(), num)
    check_messages(_staged(), num, by_turns=True)


def test_messages_that_do_not_meet_are_defects() -> None:
    stages = _staged()
    first, second = (node for node in stages[0].calls() if node.target is ops.receive_value and node.args[0] == 2)
    first.prepend(second)
    with pytest.raises(InvalidGraphError, match="where the other has"):
        check_messages(stages, 3)
    stages = _staged()
    last = [node for node in stages[1].calls() if node.target is ops.send_value][-1]
    receive = next(node for node in stages[1].calls() if node.target is ops.receive_value)
    sent = next(iter(last.users))
    receive.prepend(last)
    receive.prepend(sent)
    with pytest.raises(InvalidGraphError, match="waits for ever"):
        check_messages(stages, 3)


def test_what_is_sent_is_counted_by_its_sender() -> None:
    first, second = planned(Skipping(), (torch.ones(8, 8),), 2).stages
    # Of each of four micro-batches two rows of eight numbers, to and fro, twice for the skip, and the loss.
    assert first.plan.wire_bytes == 4 * 2 * 64
    assert second.plan.wire_bytes == 4 * (2 * 64 + 4)


@pytest.mark.parametrize("order", ["layer", "micro-batch"])
def test_stages_do_not_grow_with_micro_batches(order: str) -> None:
    few, many = (
        planned(Skipping(), (torch.ones(num, 8),), 2, accumulate=num, order=order).stages[0].lowered.emitted.source
        for num in (5, 16)
    )
    assert len(few.splitlines()) == len(many.splitlines())


@pytest.mark.days(3)
def test_stages_that_take_turns_hold_as_many_micro_batches_as_stages_are_left() -> None:
    model = GPT(vocab=19, dim=16, depth=4, heads=2, block=16)

    def peaks(num: int, order: str) -> list[int]:
        batch = tuple(torch.randint(19, (2, 2 * num, 16)))
        stages = planned(model, batch, 4, accumulate=num, order=order).stages
        # Two batches of whole numbers lie there throughout.
        return [stage.plan.peak_bytes["device"] - 2 * batch[0].nbytes for stage in stages]

    few, many, first = peaks(8, "micro-batch"), peaks(16, "micro-batch"), peaks(8, "layer")
    assert few == many
    assert all(mine < other for mine, other in zip(few[:3], first[:3], strict=True))


@pytest.mark.days(3)
def test_the_order_is_chosen_by_seconds_and_bytes() -> None:
    def plan(**options: Any) -> tuple[str, int]:
        stages = planned(Skipping(), (torch.ones(16, 8),), 3, accumulate=16, **options).stages
        assert len({stage.plan.by_layer for stage in stages}) == 1
        (reason,) = {stage.plan.micro_batches_reason for stage in stages}
        return reason, max(stage.plan.peak_bytes["device"] for stage in stages)

    # Messages take longer here than computation: with all forward first they overlap with each other.
    chosen, most = plan()
    assert "all forward, then all backward" in chosen and "rather than one forward, one backward" in chosen
    asked, least = plan(order="micro-batch")
    assert "one forward, one backward, as asked" in asked and least < most
    within, peak = plan(memory_budget=least, recompute="none", offload="none")
    assert "one forward, one backward" in within and "the other order does not fit" in within and peak <= least
    with pytest.raises(MemoryBudgetError, match="memory_budget"):
        plan(memory_budget=2_000)


def test_turns_are_taken_where_they_cost_no_time() -> None:
    model = GPT(vocab=512, dim=256, depth=4, heads=4, block=64)
    batch = tuple(torch.randint(512, (2, 64, 64)))
    stages = planned(model, batch, 2, accumulate=8).stages
    for stage in stages:
        assert not stage.plan.by_layer and "all forward first takes" in stage.plan.micro_batches_reason
        assert "holds 8 micro-batches" in stage.plan.micro_batches_reason


@pytest.mark.parametrize(("num_stages", "num", "idle"), [(4, 8, 9.0), (8, 16, 21.0), (2, 1, 3.0), (1, 3, 0.0)])
def test_equal_stages_idle_as_gpipe_and_1f1b_do(num_stages: int, num: int, idle: float) -> None:
    equal = [StageSeconds(1.0, 2.0)] * num_stages
    seconds, by_turns = simulate_stages(equal, num), simulate_stages(equal, num, by_turns=True)
    assert seconds.idle == by_turns.idle == (idle,) * num_stages
    assert seconds.step == by_turns.step == num * 3.0 + idle
    assert seconds.under_way == (*[num] * (num_stages - 1), 1)
    assert by_turns.under_way == tuple(min(num, num_stages - stage) for stage in range(num_stages))


def test_the_slowest_stage_and_messages_are_waited_for() -> None:
    fast, slow = StageSeconds(1.0, 1.0, rest=1.0), StageSeconds(2.0, 2.0, forward_message=0.5, backward_message=0.5)
    seconds = simulate_stages([fast, slow], 2)
    # Forward until 2; the slow one from 1 + 0.5 for 8; then the last backward.
    assert seconds.step == 1.5 + 8.0 + 1.0 + 1.0 + 0.0
    assert seconds.idle == (seconds.step - 5.0, seconds.step - 8.0)


def test_a_plan_for_absent_machines_says_how_long_stages_idle() -> None:
    text = str(gpt(machine="h100-sxm"))
    assert "1 of 2" in text and "of the step" in text and "idle" in text
    for stage in gpt(machine="h100-sxm").stages:
        assert stage.plan.prediction is not None
        assert stage.plan.prediction.idle_seconds is not None
        assert 0 < stage.plan.prediction.idle_seconds < stage.plan.step_seconds
        assert stage.plan.pipe == 2 and f"part {stage.plan.pipe_stage + 1} of 2" in str(stage.plan)


@pytest.mark.parametrize("machine", ["h100-sxm", "cpu"])
def test_waits_for_messages_are_idle_seconds_and_count_once(machine: str) -> None:
    for stage in gpt(machine=machine).stages:
        prediction = stage.plan.prediction
        assert prediction is not None and prediction.idle_seconds is not None
        assert prediction.idle_seconds <= prediction.exposed_seconds < prediction.step_seconds


def test_a_step_of_fewer_layers_than_stages_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 8 parts of a step"):
        planned(Skipping(), (torch.ones(8, 8),), 8)


def test_stages_are_not_tuned() -> None:
    model = Skipping()
    with pytest.raises(UsageError, match="without the axis 'pipe'"):
        zerofx.tune(model, adamw(model), (torch.ones(8, 8),), mesh={"pipe": 2})


class Tables(nn.Module):
    """Tables, which do little, and then layers with few parameters, none like another."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(4_000 + number, 16) for number in range(3))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64 + number), nn.GELU(), nn.Linear(64 + number, 16)) for number in range(4)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tables[0](ids)
        for table in self.tables[1:]:
            x = table(ids) + x
        for layer in self.layers:
            x = layer(x)
        result: Tensor = x.square().mean()
        return result


@pytest.mark.days(3)
def test_stages_are_cut_for_bytes_where_those_that_take_alike_fit_no_budget() -> None:
    def plan(**options: Any) -> list[PlannedStep]:
        given = {"recompute": "none", "offload": "none", "accumulate": 4, **options}
        return list(planned(Tables(), (torch.randint(4_000, (8, 32)),), 2, **given).stages)

    table_bytes = 4 * 4 * 16 * 4_000  # with its gradient and states
    free = [stage.plan.peak_bytes["device"] for stage in plan()]
    assert free[0] > 3 * table_bytes > 10 * free[1]
    budget = free[0] - table_bytes // 2
    peaks = [stage.plan.peak_bytes["device"] for stage in plan(memory_budget=budget)]
    assert table_bytes < peaks[1] <= budget and peaks[0] <= budget
    with pytest.raises(MemoryBudgetError, match="part 1 of 2 on the axis 'pipe': memory_budget"):
        plan(memory_budget=table_bytes)


def test_buckets_have_numbers_among_those_that_a_budget_leaves() -> None:
    options = {"accumulate": 2, "max_grad_norm": 0.1, "offload": "host", "order": "micro-batch"}
    stages = planned(Wide(), (torch.randn(4, 8),), 2, memory_budget=60_000, **options).stages
    assert [bool(stage.plan.slices) for stage in stages] == [True, False]
    pipes = [stage.lowered.graph.pipe for stage in stages]
    numbers = [number for pipe in pipes if pipe is not None for number in pipe.buckets]
    assert sorted(numbers) == list(range(sum(len(stage.plan.reduces) for stage in stages)))
    assert {pipe.num_buckets for pipe in pipes if pipe is not None} == {len(numbers)}


@pytest.mark.days(3)
def test_of_stages_that_fit_no_budget_the_one_that_needs_most_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4_000), nn.ReLU())
    options = {"accumulate": 2, "memory_budget": 100, "loss_fn": lambda out, target: (out - target).square().sum()}
    with pytest.raises(MemoryBudgetError, match=r"part 2 of 2 .* 1 of the other parts cannot meet it either"):
        planned(model, (torch.randn(8, 8), torch.randn(8, 4_000)), 2, **options)
