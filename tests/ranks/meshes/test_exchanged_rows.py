"""Experts whose rows ranks send each other: one process's bits, whatever the routing, and no row is left out."""

from __future__ import annotations

import os
import traceback
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, DIM, Case, batches, sgd
from tests.lib.models.huggingface import deepseek_v3, gpt_oss, mixtral, olmoe, qwen3_moe
from tests.lib.runs.sharing import SHARING, one_process
from tests.lib.runs.training import Trained, build, differences, world
from zerofx import UsageError
from zerofx.driver import shardings
from zerofx.ir.facts import origin
from zerofx.runtime.state import row_room
from zerofx.scheduler.analysis.sharding_pins import Pins, apply_pins
from zerofx.scheduler.analysis.sharding_ways import ShardingWays
from zerofx.scheduler.plan.placements import REPLICATED, SUM

EXCHANGED = {"*experts*": "exchange"}
NUM_EXPERTS, NUM_TOKENS = 4, 16


class Experts(nn.Module):
    """Products of rows by their experts, as people write them: sorted, and added to their tokens in that order."""

    def __init__(self, top: int, favoured: float, width: int = DIM) -> None:
        super().__init__()
        self.top, self.favoured = top, favoured
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, width, 2 * width) / 4)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * width, width) / 4)

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        number = torch.arange(NUM_EXPERTS, device=x.device)
        weights, experts = (scores.softmax(-1) + self.favoured * (number == 1).to(x.dtype)).topk(self.top)
        order = experts.view(-1).argsort(stable=True)
        ends = (experts.view(-1, 1) == number).sum(0).cumsum(0).to(torch.int32)
        rows = torch._grouped_mm(x[order // self.top], self.up, offs=ends).tanh()
        rows = torch._grouped_mm(rows, self.down, offs=ends) * weights.reshape(-1, 1)[order]
        return torch.zeros_like(x).index_add(0, order // self.top, rows)


class Unlike(Experts):
    """Rows by one order of experts, and a bias for each by another."""

    def __init__(self, top: int, favoured: float) -> None:
        super().__init__(top, favoured)
        self.bias = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * DIM))

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        experts = scores.argmax(-1)
        order = experts.neg().argsort(stable=True)
        ends = (experts.view(-1, 1) == torch.arange(NUM_EXPERTS).flip(0)).sum(0).cumsum(0).to(torch.int32)
        rows = torch._grouped_mm(x[order], self.up, offs=ends) + self.bias[experts.sort().values]
        rows = torch._grouped_mm(rows.tanh(), self.down, offs=ends)
        return torch.zeros_like(x).index_add(0, order, rows)


class Routed(nn.Module):
    """Tokens and their experts; ``favoured`` is what the second expert's share is raised by, for all tokens or none."""

    def __init__(self, top: int = 2, favoured: float = 0.0, experts: type[Experts] = Experts) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, NUM_EXPERTS, bias=False), experts(top, favoured)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.experts(x, self.gate(x))
        return y.square().mean()


class Inner(Routed):
    """Tokens that are computed, and have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


def _tokens(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(NUM_TOKENS, DIM, generator=generator).to(torch.bfloat16),), {}


def _whole_tokens(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(NUM_TOKENS, DIM, generator=generator),), {}


def _odd_tokens(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(NUM_TOKENS + 1, DIM, generator=generator).to(torch.bfloat16),), {}


def _odd_lengths(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = torch.randint(0, 32, (4, 33), generator=generator)
    return (), {"input_ids": ids, "labels": ids}


def _transformer(model: Any, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Case:
    """With AdamW, which rounds alike wherever a parameter lies; SGD does not, of odd numbers of elements in 16 bits."""
    return replace(CASES["mixtral"], model=lambda: model(**sizes).to(dtype))


def _exact_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """With a rate that has few bits, so that it is rounded alike wherever a parameter lies."""
    return torch.optim.SGD(model.parameters(), lr=0.125)


def _adapted() -> nn.Module:
    """Experts with LoRA, whose weights are computed in forward."""
    from peft import LoraConfig, get_peft_model

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names)
    model = get_peft_model(qwen3_moe(intermediate_size=32), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros, unless told otherwise
            nn.init.normal_(parameter, std=0.02)
    return model


def _routed(*options: Any) -> Case:
    return Case(lambda: Routed(*options).to(torch.bfloat16), _tokens, optimizer=sgd)


MODELS = {
    "mixtral": _transformer(mixtral, intermediate_size=32),
    "mixtral, odd lengths": replace(_transformer(mixtral, intermediate_size=32), batch=_odd_lengths),
    "olmoe": _transformer(olmoe),
    "deepseek v3": _transformer(deepseek_v3),
    "gpt oss": _transformer(gpt_oss),
    "gpt oss, half": replace(_transformer(gpt_oss, torch.float16), optimizer=_exact_sgd),
    "lora": replace(_transformer(_adapted), optimizer=sgd),
    "qwen3 moe": _transformer(qwen3_moe, intermediate_size=32),
    "qwen3 moe, SGD": replace(_transformer(qwen3_moe, intermediate_size=32), optimizer=sgd),
    "by hand": _routed(),
    "by hand, unlike": _routed(1, 0.0, Unlike),
    "all to one": _routed(1, 2.0),
    "none to one": _routed(1, -2.0),
    "single precision": replace(CASES["mixtral"], optimizer=sgd),
    "all to one, single precision": Case(lambda: Routed(1, 2.0), _whole_tokens, optimizer=sgd),
}
# After so many steps one process's step rounds a weight, in bf16, otherwise than eager mode does.
NUM_STEPS = {"gpt oss, half": 5, "qwen3 moe, SGD": 12}


def whole_elsewhere(ways: ShardingWays, pins: Pins, unasked: Collection[str] = ()) -> ShardingWays:
    """The ways that do as the pins say, with all else done whole by each rank, in one process's order."""
    pinned = apply_pins(ways, pins, unasked)
    for node, rules in pinned.rules.items():
        is_within = "experts" in origin(node).layer
        pinned.rules[node] = [
            rule
            for rule in rules
            if all(p in (None, REPLICATED) or (is_within and p != SUM) for p in (*rule.outputs, *rule.inputs))
        ]
    return pinned


def _differences(name: str, num_steps: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """What is unlike one process, how often a step was run again, and whether as many rows went as are to."""
    case, num_ranks = MODELS[name], options["mesh"]["model"]
    index, num_data = world()[0] // num_ranks, world()[1] // num_ranks
    expected = one_process(case, num_data, num_steps)
    model = build(case)
    given = {"stage": 0, "backend": "eager", "machine": SHARING, "shardings": EXCHANGED, **options}
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(shardings, "apply_pins", whole_elsewhere)
    step = zerofx.compile(model, case.optimizer(model), **given)
    losses = [step(*args, **keywords).clone() for args, keywords in batches(case, index, num_steps)]
    unlike = differences(expected, Trained(losses, step.full_state_dict()))
    sends = step.plan.sends_rows
    repeated = int(step.metrics["repeated_steps"])
    step.close()
    monkeypatch.undo()
    return unlike, sends, repeated


def _check(num_ranks: int, name: str, num_steps: int, options: dict[str, Any], most_repeated: int = 4) -> int:
    (unlike, sends, repeated), *others = run_ranks(_differences, num_ranks, name, num_steps, options)
    assert (unlike, sends) == ([], True)
    assert all(other == (unlike, sends, repeated) for other in others)
    assert repeated <= most_repeated
    return int(repeated)


def test_two_ranks_exchange_the_rows_of_experts_to_the_bit() -> None:
    """All tokens go to one expert: the first step is run again, with more capacity, and once for all."""
    assert _check(2, "all to one", 4, {"mesh": {"model": 2}}, 2) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", [{"model": 2}, {"model": 4}, {"shard": 2, "model": 2}], ids=str)
def test_rows_of_experts_are_exchanged_to_the_bit(mesh: dict[str, int], name: str) -> None:
    num_ranks = 2 if mesh == {"model": 2} else 4
    _check(num_ranks, name, NUM_STEPS.get(name, 20), {"mesh": mesh})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"stage": 3}, {"stage": 3, "recompute": "full"}, {"stage": 3, "offload": "host", "memory_budget": "76KiB"}],
    ids=str,
)
def test_rows_are_exchanged_next_to_what_else_a_step_does(options: dict[str, Any]) -> None:
    _check(2, "qwen3 moe, SGD", 4, {"mesh": {"model": 2}, **options})


@pytest.mark.slow
def test_a_loss_scale_stays_where_rows_find_no_room() -> None:
    scaled = zerofx.Precision(loss_scale=zerofx.LossScale(1024.0))
    assert _check(2, "all to one", 4, {"mesh": {"model": 2}, "precision": scaled}) > 0


def _uneven_steps() -> list[str]:
    """What is wrong in steps of two micro-batches, of which the third's tokens all have one expert, and after them."""
    case, accumulate = MODELS["by hand"], 2
    model, eager = build(case), build(case)
    optimizer = case.optimizer(eager)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(shardings, "apply_pins", whole_elsewhere)
    step = zerofx.compile(
        model, case.optimizer(model), 0, backend="eager", machine=SHARING, shardings=EXCHANGED, mesh={"model": 2},
        accumulate=accumulate, on_nonfinite="raise",
    )  # fmt: skip
    wrong: list[str] = []
    for number, ((x,), _) in enumerate(batches(case, 0, 4)):
        batch = x[:1].expand_as(x).contiguous() if number == 2 else x
        optimizer.zero_grad()
        losses = []
        for part in batch.chunk(accumulate):
            loss = eager(part) / accumulate
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        if not torch.equal(step(batch), losses[0] + losses[1]):
            wrong.append(f"the loss of step {number}")
    expected = eager.state_dict()
    wrong += [name for name, value in step.full_state_dict().items() if not torch.equal(value, expected[name])]
    if step.metrics["repeated_steps"] == 0:
        wrong.append("no step was run again")
    if not torch.isfinite(step.evaluate(batch)):
        wrong.append("evaluation")
    before, infinite = step.num_repeated, torch.full_like(batch, torch.inf)
    try:
        step(infinite)
    except zerofx.NonFiniteLossError:
        return [*wrong, *(["a step of many"] if step.num_repeated > before + 3 else [])]
    return [*wrong, "a loss that is not finite"]


def test_a_late_batch_without_room_is_run_again_in_each_of_its_micro_batches() -> None:
    assert run_ranks(_uneven_steps, 2) == [[], []]


def _norms(name: str, mesh: dict[str, int]) -> tuple[list[float], list[float], int]:
    """Norms of gradients of all ranks, and of one process's, and how often a step was run again."""
    case = MODELS[name]
    index, num_data = world()[0] // mesh["model"], world()[1] // mesh["model"]
    model, eager = build(case), build(case)
    optimizer, expected, norms = case.optimizer(eager), list[float](), list[float]()
    step = zerofx.compile(
        model, case.optimizer(model), 2, backend="eager", machine=SHARING, shardings=EXCHANGED, mesh=mesh,
        max_grad_norm=0.1,
    )  # fmt: skip
    for given in zip(*(batches(case, rank, 4) for rank in range(num_data)), strict=True):
        optimizer.zero_grad()
        for args, kwargs in given:
            (case.loss(eager(*args, **kwargs)) / num_data).backward()
        expected.append(nn.utils.clip_grad_norm_(eager.parameters(), 0.1).item())
        optimizer.step()
        args, kwargs = given[index]
        step(*args, **kwargs)
        norms.append(step.grad_norm.item())
    return norms, expected, step.num_repeated


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("mesh", [{"model": 2}, {"model": 4}, {"shard": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("name", ["single precision", "all to one, single precision"])
def test_there_is_one_norm_of_all_gradients(name: str, mesh: dict[str, int]) -> None:
    """Experts' gradients are each on one rank, all others' are on all."""
    (norms, expected, repeated), *others = run_ranks(_norms, 2 if mesh == {"model": 2} else 4, name, mesh)
    assert norms == pytest.approx(expected, rel=1e-6)
    assert all(other[0] == norms for other in others)
    assert repeated or name == "single precision"


def test_biases_that_go_by_another_order_than_rows_are_sent() -> None:
    """Which the first step sees, and is run again."""
    assert _check(2, "by hand, unlike", 3, {"mesh": {"model": 2}}) == 1


class Order(TorchDispatchMode):
    """The operators that are called, in order, but for those by which ranks see that the others are there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(frame.filename.endswith(("control.py", "heartbeat.py")) for frame in traceback.extract_stack()):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def exchanges(self, routes: str) -> tuple[int, int]:
        """The calls of ``routes``, and those of them that come before what the host reads first once there was one."""
        at = [number for number, name in enumerate(self.names) if routes in name]
        reads = [number for number, name in enumerate(self.names) if any(read in name for read in HOST_READS)]
        flag = min(number for number in reads if number > at[0])
        return len(at), sum(number < flag for number in at)


HOST_READS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "equal")


def _sent() -> tuple[int, int, int, int, int]:
    """Bytes that a step sends, as counted and as planned, those of rows of features as planned; exchanges, and those of
    them that come before what the host reads first once there was one."""
    case = replace(MODELS["by hand"], model=lambda: Inner().to(torch.bfloat16))
    model = build(case)
    step = zerofx.compile(
        model, case.optimizer(model), backend="eager", machine=SHARING, shardings=EXCHANGED, mesh={"model": 2}
    )
    (((x,), _),) = batches(case, 0, 1)
    step(x)
    assert step._steps.taken is not None
    runtime = step._steps.taken.runtime
    before = runtime.sent_bytes
    with Order() as order:
        step(x)
    sent = runtime.sent_bytes - before
    planned = step.plan.wire_bytes
    exchanges, before_flag = order.exchanges("row_routes")
    rows = sum(row.wire_bytes for row in step.schedule().rows if row.op == "exchange_values" and row.wire_bytes > 64)
    return sent, planned, rows, exchanges, before_flag


def test_as_much_is_sent_as_is_planned_and_the_host_reads_nothing_before_the_flag() -> None:
    for sent, planned, rows, exchanges, before_flag in run_ranks(_sent, 2):
        assert sent == planned
        # Both ways, forward and backward, 1.25 k T h (t - 1) / t elements: room is sent, filled or not.
        assert rows == 4 * 1.25 * 2 * (NUM_TOKENS // 2) * DIM / 2 * torch.bfloat16.itemsize
        assert exchanges == before_flag >= 4


def _room_for_one_row() -> tuple[Any, ...]:
    monkeypatch = pytest.MonkeyPatch()
    for module in (shardings, row_room):
        monkeypatch.setattr(module, "FIRST_CAPACITY", 4 / (2 * NUM_TOKENS))
    outcome = _differences("by hand", 2, {"mesh": {"model": 2}})
    monkeypatch.undo()
    return outcome


def test_ranks_begin_with_room_for_one_row() -> None:
    for unlike, sends, repeated in run_ranks(_room_for_one_row, 2):
        assert (unlike, sends) == ([], True)
        assert repeated > 0


def _repeats_of_two_runs(folder: str) -> list[int]:
    """How often steps were run again before a checkpoint, with steps cached on disk, and after it."""
    os.environ["ZEROFX_CACHE_DIR"] = f"{folder}/cache"
    case, counts = MODELS["all to one"], list[int]()
    ((args, _),) = batches(case, 0, 1)
    for number in range(2):
        model = build(case)
        step = zerofx.compile(
            model, case.optimizer(model), backend="eager", machine=SHARING, shardings=EXCHANGED, mesh={"model": 2}
        )
        if number:
            step.load_checkpoint(folder)
        step(*args)
        step.save_checkpoint(folder)
        counts.append(step.num_repeated)
        step.close()
    return counts


def test_a_checkpoint_has_the_capacity_that_a_run_has_come_to(tmp_path: Path) -> None:
    (before, after), other = run_ranks(_repeats_of_two_runs, 2, str(tmp_path))
    assert before > 0 == after
    assert other == [before, after]


def test_tokens_that_ranks_do_not_divide_are_not_exchanged() -> None:
    model = Routed(1).to(torch.bfloat16)
    batch, _ = _odd_tokens(torch.Generator())
    how: dict[str, Any] = {"mesh": {"model": 2}, "world_size": 2, "machine": "h100-sxm"}
    with pytest.raises(UsageError, match=r"experts that 2 ranks of the model axis can send each other.*\[17, 8\]"):
        zerofx.plan(model, sgd(model), batch, shardings=EXCHANGED, **how)
    assert zerofx.plan(model, sgd(model), batch, **how).plan.model == 2


class Balanced(Routed):
    """A router that is held in balance as DeepSeek-V3's: tokens of each expert are counted, and its bias follows."""

    def __init__(self) -> None:
        super().__init__(1)
        self.counts: Tensor
        self.bias: Tensor
        self.latest: Tensor
        self.register_buffer("counts", torch.zeros(NUM_EXPERTS))
        self.register_buffer("bias", torch.zeros(NUM_EXPERTS))
        self.register_buffer("latest", torch.zeros(NUM_EXPERTS, DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.latest.copy_(self.gate.weight.detach())
        scores = self.gate(x) + self.bias.to(x.dtype)
        counts = torch.zeros_like(self.counts).scatter_add(0, scores.argmax(-1), self.counts.new_ones(len(x)))
        self.counts.add_(counts)
        with torch.no_grad():
            self.bias.add_((counts.mean() - counts).sign(), alpha=0.01)
        y: Tensor = x + self.experts(x, scores)
        return y.square().mean()


def _balanced_steps(options: dict[str, Any]) -> list[str]:
    """What is wrong in steps of a model with buffers, of which the seventh's tokens all have the same experts."""
    case, accumulate = replace(MODELS["by hand"], model=lambda: Balanced().to(torch.bfloat16)), options["accumulate"]
    model, eager = build(case), build(case)
    optimizer = case.optimizer(eager)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(shardings, "apply_pins", whole_elsewhere)
    step = zerofx.compile(
        model, case.optimizer(model), backend="eager", machine=SHARING, shardings=EXCHANGED, mesh={"model": 2},
        **options,
    )  # fmt: skip
    wrong, repeated = list[str](), list[int]()
    (((x,), _),) = batches(case, 0, 1)
    for number in range(1, 9):
        batch = x[:1].expand_as(x).contiguous() if number == 7 else x
        optimizer.zero_grad()
        for part in batch.chunk(accumulate):
            (eager(part) / accumulate).backward()
        optimizer.step()
        step(batch)
        repeated.append(step.num_repeated)
        expected = eager.state_dict()
        unlike = [name for name, value in step.full_state_dict().items() if not torch.equal(value, expected[name])]
        wrong += [f"{name} after step {number}" for name in unlike]
    return wrong if repeated[5] == 0 < repeated[6] else [*wrong, f"steps run again: {repeated}"]


@pytest.mark.parametrize("options", [{"accumulate": 1, "stage": 3}, {"accumulate": 2, "stage": 0}], ids=str)
def test_a_step_that_is_run_again_changes_buffers_once(options: dict[str, Any]) -> None:
    assert run_ranks(_balanced_steps, 2, options) == [[], []]


@pytest.mark.days(3)
def test_shared_experts_lie_as_the_plan_has_them_where_experts_are_exchanged() -> None:
    case = MODELS["deepseek v3"]
    model, (_, batch) = case.model(), case.batch(torch.Generator())
    planned = zerofx.plan(
        model, sgd(model), batch, shardings=EXCHANGED, mesh={"model": 2}, world_size=2, machine="h100-sxm"
    )
    assert planned.plan.sends_rows
