"""Steps whose tensors lie in one planned pool train the same bits, in the memory that was planned."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib import compiling
from tests.lib.distributed import run_ranks
from tests.lib.models import Case, sgd
from tests.lib.runs.training import differences, train_compiled
from zerofx.errors import InternalError, MemoryBudgetError
from zerofx.runtime.arena import Allocations, Arena
from zerofx.units import format_bytes

pytestmark = compiling.trainings

VOCAB, BLOCK = 61, 16
CPU = torch.device("cpu")


def _tokens(generator: torch.Generator) -> Any:
    ids = torch.randint(VOCAB, (8, BLOCK + 1), generator=generator)
    return (ids[:, :-1], ids[:, 1:]), {}


CASE = Case(lambda: GPT(VOCAB, dim=32, depth=3, heads=2, block=BLOCK), _tokens, optimizer=sgd, steps=3)


def _step(**options: Any) -> tuple[zerofx.Step, tuple[Any, ...]]:
    model = CASE.model()
    batch = _tokens(torch.Generator())[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return zerofx.compile(model, optimizer, example_batch=batch, **{"arena": True, **options}), batch


class _Poisoned(Arena):
    """Every byte is written over as it is handed out: whoever still reads what lay there has other bits."""

    def tensor(self, *args: Any) -> Tensor:
        tensor = super().tensor(*args)
        torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)  # NaN where there is one
        return tensor


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerofx.runtime import executor

    monkeypatch.setattr(executor, "Arena", _Poisoned)


WAYS: dict[str, dict[str, Any]] = {
    "a loop of micro-batches": {"accumulate": 8},
    "states on the host, clipped": {"memory_budget": 0, "offload": "host", "max_grad_norm": 0.1},
    "all computed again": {"recompute": "full"},
    "in bf16": {"precision": "bf16"},
    "micro-batches one by one": {"accumulate": 2, "grad_norms": True},
}
QUICK = 1  # of these; others compile their regions in more than ten seconds


@pytest.mark.days(3)
@pytest.mark.parametrize(
    "way", [way if n < QUICK else pytest.param(way, marks=pytest.mark.slow) for n, way in enumerate(WAYS)]
)
@pytest.mark.usefixtures("poisoned")
def test_bits_are_those_without_an_arena(way: str) -> None:
    options = dict(WAYS[way])
    if options.get("memory_budget") == 0:
        step, _ = _step(arena=False)
        options["memory_budget"] = int(0.75 * step.plan.peak_bytes["device"])
        step.close()
    expected = train_compiled(CASE, 3, backend="inductor", **options)
    assert differences(expected, train_compiled(CASE, 3, backend="inductor", arena=True, **options)) == []


@pytest.mark.days(3)
def test_a_step_takes_what_was_planned() -> None:
    step, batch = _step()
    arena, peak = step.plan.arena, step.plan.peak_bytes["device"]
    assert arena is not None
    held = step.tiers()["device"]
    step(*batch)
    # The pool is all that a step leaves behind, and it has the planned size.
    assert step.tiers()["device"] - held == arena.pool_bytes > 0
    assert arena.least_bytes <= arena.pool_bytes <= 1.1 * arena.least_bytes
    measured = step.measure(*batch, num_steps=2).peak_bytes["device"]
    assert measured == pytest.approx(peak, rel=0.01)
    bare, _ = _step(arena=False)
    live = bare.plan.peak_bytes["device"]
    assert live <= peak <= 1.15 * live
    text = str(step)
    assert f"{format_bytes(arena.pool_bytes)} are the arena" in text
    assert "arena's gaps" in text
    assert any("attention" in name for name in arena.outside)
    assert sum(arena.outside.values()) == arena.outside_bytes
    step.close()
    bare.close()


def test_a_kept_step_has_the_same_places() -> None:
    first, batch = _step()
    losses = [first(*batch).item() for _ in range(2)]
    first.close()
    torch.manual_seed(0)
    second, _ = _step()
    assert second.plan.arena == first.plan.arena
    assert second.compiled.takes == first.compiled.takes
    assert all(loss == loss for loss in losses)
    second.close()


@pytest.mark.days(3)
@pytest.mark.usefixtures("poisoned")
def test_what_a_step_returns_is_the_callers() -> None:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(model, GPT)
        return model(x, y), model.tokens(x) * 2

    step, batch = _step(forward=forward)
    loss, extras = step(*batch)
    before = loss.clone(), extras.clone()
    step(*batch)
    step.evaluate(*batch)
    assert torch.equal(loss, before[0]) and torch.equal(extras, before[1])
    assert torch.isfinite(extras).all()
    step.close()


@pytest.mark.usefixtures("poisoned")
def test_evaluations_lie_in_the_pool_of_the_step() -> None:
    step, batch = _step()
    step(*batch)
    arena = step._steps.taken.runtime.arena  # type: ignore[union-attr]
    size = arena.num_bytes
    first, again = step.evaluate(*batch), step.evaluate(*batch)
    assert torch.equal(first, again) and torch.isfinite(first)
    assert arena.num_bytes == size  # which is smaller than the step's
    step.close()
    assert arena.num_bytes == 0


@pytest.mark.slow
def test_a_budget_holds_for_the_pool() -> None:
    bare, batch = _step(arena=False)
    peak = bare.plan.peak_bytes["device"]
    bare.close()
    for share in (0.9, 0.75):
        step, _ = _step(memory_budget=int(share * peak), offload="host")
        assert step.plan.peak_bytes["device"] <= share * peak
        step(*batch)
        assert step.measure(*batch, num_steps=2).peak_bytes["device"] <= share * peak
        step.close()
    with pytest.raises(MemoryBudgetError):
        _step(memory_budget=int(0.05 * peak), offload="none")


def _two_ranks() -> dict[str, Any]:
    from zerofx.runtime import executor

    stages = (0, 3)
    expected = [train_compiled(CASE, stage, backend="inductor") for stage in stages]
    with mock.patch.object(executor, "Arena", _Poisoned):
        trained = [train_compiled(CASE, stage, backend="inductor", arena=True) for stage in stages]
    return {
        f"stage {stage}": differences(first, second)
        for stage, first, second in zip(stages, expected, trained, strict=True)
    }


@pytest.mark.slow
def test_ranks_gather_and_reduce_in_the_pool() -> None:
    for found in run_ranks(_two_ranks, 2, timeout=1800.0):
        assert {stage: wrong for stage, wrong in found.items() if wrong} == {}


def test_an_allocation_that_was_not_planned_is_an_error() -> None:
    allocations = Allocations([(0, 64), None], 512)
    allocations.begin(Arena(CPU))
    assert allocations.take((4, 4), (4, 1), torch.float32).untyped_storage().nbytes() == 64
    assert allocations.take((2,), (1,), torch.float32).shape == (2,)
    with pytest.raises(InternalError, match="2 in all"):
        allocations.take((2,), (1,), torch.float32)
    allocations.begin(Arena(CPU))
    with pytest.raises(InternalError, match=r"planned \(64 bytes\)"):
        allocations.take((5,), (1,), torch.float32)


def test_what_a_first_step_leaves_in_the_allocator_is_given_back_once() -> None:
    class Told(Arena):
        num_tidied = 0

        def tidy(self) -> None:
            self.num_tidied += 1

    allocations, arena, counts = Allocations([], 512), Told(CPU), []
    for _ in range(4):
        allocations.begin(arena)
        counts.append(arena.num_tidied)
    assert counts == [1, 2, 2, 2]  # before the pool is taken, and after the first step


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def test_generated_functions_get_their_tensors_from_the_step_whatever_inductor_puts_around_them() -> None:
    from torch._inductor.utils import align_inputs_from_check_idxs
    from torch.utils._ordered_set import OrderedSet

    from zerofx.torch_private.inductor.compile import replace_allocator

    names: dict[str, Any] = {"empty_strided_cpu": _empty_strided, "float32": torch.float32}
    lines = ("class Runner:", "  def call(self, args):", "    args[0].add_(1)",
             "    return (empty_strided_cpu((3,), (1,), float32), args[0])")  # fmt: skip
    exec("\n".join(lines), names)
    plain = names["Runner"]().call
    given = torch.full((3,), 7.0)
    for call in (plain, align_inputs_from_check_idxs(plain, [0], OrderedSet([0]))):
        generated = replace_allocator(SimpleNamespace(current_callable=call), lambda *args: given)
        written = torch.zeros(9)[1:]  # which begins where no kernel for CUDA expects it
        taken, _ = generated([written])
        assert taken is given and written.eq(1).all()
        assert call([written])[0] is not given  # others who call it allocate as before
    assert replace_allocator(SimpleNamespace(current_callable=lambda inputs: inputs), torch.empty_strided) is None


def test_tensors_of_a_pool_have_storages_of_their_own() -> None:
    arena = Arena(CPU)
    arena.reserve(2048)
    first = arena.tensor(512, (3, 5), (1, 3), torch.bfloat16)
    assert first.storage_offset() == 0 and first.stride() == (1, 3)
    assert first.untyped_storage().nbytes() == 30
    other = arena.tensor(512, (4,), (1,), torch.bool)
    assert other.data_ptr() == first.data_ptr() and arena.tensor(512, (4,), (1,), torch.bool) is other
    arena.reserve(1024)
    assert arena.num_bytes == 2048


def _stage_values(order: str, *, arena: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model, generator = CASE.model(), torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"mesh": {"pipe": 2}, "accumulate": 8, "order": order}
    step = zerofx.compile(model, sgd(model), backend="inductor", arena=arena, **options)
    losses = [step(*_tokens(generator)[0]).clone() for _ in range(2)]
    values = [*losses, *(value.clone() for value in step.full_state_dict().values())]
    step.close()
    return values


def _two_stages() -> dict[str, bool]:
    from zerofx.runtime import executor

    orders = ("layer", "micro-batch", "zero-bubble")
    expected = [_stage_values(order, arena=False) for order in orders]
    with mock.patch.object(executor, "Arena", _Poisoned):
        trained = [_stage_values(order, arena=True) for order in orders]
    return {
        order: all(map(torch.equal, first, second))
        for order, first, second in zip(orders, expected, trained, strict=True)
    }


@pytest.mark.slow
def test_stages_receive_in_the_pool() -> None:
    assert run_ranks(_two_stages, 2, timeout=1800.0) == [{"layer": True, "micro-batch": True, "zero-bubble": True}] * 2
