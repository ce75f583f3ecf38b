"""Updates on the host, block by block: the bits of whole tensors, one pass, and which updates have no blocks."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.lib.models import CASES as CASES_OF_MODELS
from tests.lib.optimizers import CASES, FUSED_CASES, Make, Runner
from tests.lib.runs.offloads import placing, prepare_case
from tests.lib.runs.training import differences, train_compiled, train_plain
from zerofx.codegen.cpu.update_blocks import BlockUpdate, NoBlocksError, make_block_update
from zerofx.lowering import load
from zerofx.optimizers import UpdateProgram, blocks, has_fused
from zerofx.optimizers.program import run_graph

aten = torch.ops.aten

SMALL = 256  # elements of a block, where a test has few: a multiple of every vector's length
ENDS = [SMALL - 37, 3 * SMALL, 3 * SMALL + 37]

Region = Callable[[list[Any]], Any]


def region_of(program: UpdateProgram) -> Region:
    """The update as a step's file has it on the host: a gradient cast to the master's dtype, new values in bfloat16."""
    names = [spec.name for spec in (*program.states, *program.tensor_scalars)]

    def update(inputs: list[Any]) -> tuple[()]:
        grad, low, param, scalars, *states = inputs
        inputs.clear()
        cast = aten._to_copy.default(grad, dtype=program.dtype)
        own = [scalars[number] for number in range(program.num_scalars)]
        run_graph(program, param, cast, dict(zip(names, states, strict=True)), own)
        aten.copy_.default(low, param)
        return ()

    return update


class Trained:
    """A flat buffer that is stepped with gradients in bfloat16, each update made of its region by ``make``."""

    def __init__(self, case: Make, length: int, dtype: torch.dtype, fused: bool, make: Callable[..., Region]) -> None:
        self._make, self.regions = make, list[Region]()
        generator = torch.Generator().manual_seed(1)
        self.low = torch.zeros(length, dtype=torch.bfloat16)
        start = torch.randn(length, generator=generator).to(dtype)
        optimizer = case([torch.nn.Parameter(torch.randn(5, 3).to(dtype))])
        self.runner = Runner(optimizer, start, fused=fused, run=self._run)
        for _ in range(5):
            self.runner.step(torch.randn(length, generator=generator).bfloat16())

    def _run(
        self,
        program: UpdateProgram,
        param: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        scalars: tuple[float, ...],
    ) -> None:
        names = [spec.name for spec in (*program.states, *program.tensor_scalars)]
        inputs = [grad, self.low, param, scalars, *(states[name] for name in names)]
        self.regions.append(self._make(region_of(program), inputs))
        with torch.no_grad():
            self.regions[-1](inputs)
        assert not inputs


def _whole(function: Region, inputs: list[Any]) -> Region:
    return function


@pytest.mark.days(3)
@pytest.mark.sweep(60)
@pytest.mark.parametrize("length", ENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "fused"), [*((name, False) for name in CASES), *((name, True) for name in FUSED_CASES)]
)
def test_blocks_have_the_bits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, name: str, fused: bool, dtype: torch.dtype, length: int
) -> None:
    if fused and not has_fused(CASES[name]([torch.nn.Parameter(torch.ones(3, dtype=dtype))]), "cpu", dtype):
        pytest.skip("torch's kernel is wrong for this dtype")
    monkeypatch.setattr(blocks, "BLOCK", SMALL)
    expected = Trained(CASES[name], length, dtype, fused, _whole)
    found = Trained(CASES[name], length, dtype, fused, make_block_update)
    assert all(isinstance(region, BlockUpdate) for region in found.regions)
    assert torch.equal(found.low, expected.low) and torch.equal(found.runner.param, expected.runner.param)
    for state, values in expected.runner.states.items():
        assert torch.equal(found.runner.states[state], values), state
    assert found.runner.scalars == expected.runner.scalars


def _adamw(numel: int) -> tuple[Region, list[Any]]:
    """AdamW's fused update of a bucket in bfloat16 with float32 masters, and its inputs."""
    master, first, second = (torch.full((numel,), 0.5) for _ in range(3))
    grad, low = (torch.full((numel,), 0.5, dtype=torch.bfloat16) for _ in range(2))

    def update(inputs: list[Any]) -> tuple[()]:
        grad, master, first, second, step, low = inputs
        inputs.clear()
        cast = aten._to_copy.default(grad, dtype=torch.float32)
        aten._fused_adamw_.default(
            [master], [cast], [first], [second], [], [step], amsgrad=False, beta1=0.9, beta2=0.999, eps=1e-8, lr=1e-3,
            maximize=False, weight_decay=0.01,
        )  # fmt: skip
        aten.copy_.default(low, master)
        return ()

    return update, [grad, master, first, second, torch.tensor(3.0), low]


def test_an_update_makes_no_pages_and_nothing_of_the_buckets_size() -> None:
    whole, inputs = _adamw(16 << 20)
    update = make_block_update(whole, inputs)
    update(list(inputs))  # makes what it keeps
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    update(list(inputs))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000
    assert sum(tensor.numel() for tensor in update.scratch.of_call.values()) == blocks.BLOCK * torch.get_num_threads()


def test_what_is_kept_serves_larger_blocks_when_there_are_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", SMALL)
    whole, inputs = _adamw(5 * SMALL + 3)
    update, expected = make_block_update(whole, inputs), [value.clone() for value in inputs]
    update(list(inputs))
    monkeypatch.setattr(blocks, "BLOCK", 2 * SMALL)
    update(list(inputs))
    for _ in range(2):
        whole(list(expected))
    assert all(map(torch.equal, inputs, expected))


def test_buckets_that_are_updated_at_the_same_time_have_their_own_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", SMALL)
    whole, inputs = _adamw(16 * SMALL)
    buckets = [[value + number if value.dim() else value.clone() for value in inputs] for number in range(2)]
    expected = [[value.clone() for value in bucket] for bucket in buckets]
    update = make_block_update(whole, inputs)

    def train(function: Region, bucket: list[Any]) -> None:
        for _ in range(100):
            function(list(bucket))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, [update] * 2, buckets))
    for bucket, values in zip(buckets, expected, strict=True):
        train(whole, values)
        assert all(map(torch.equal, bucket, values))


def test_a_count_of_steps_is_raised_once() -> None:
    def update(inputs: list[Any]) -> tuple[()]:
        param, step = inputs
        aten.add_.Tensor(step, 1)
        aten.div_.Tensor(param, aten.sqrt.default(step))
        return ()

    inputs = [torch.full((2 * blocks.BLOCK + 5,), 4.0), torch.tensor(3.0)]
    make_block_update(update, inputs)(list(inputs))
    assert inputs[1] == 4 and inputs[0].unique() == 2


def _calling(call: Callable[[Any, Any], object]) -> Region:
    """An update of a flat tensor and a single one, which does ``call``."""

    def update(inputs: list[Any]) -> tuple[()]:
        call(*inputs)
        return ()

    return update


def _changes_late(inputs: list[Any]) -> tuple[()]:
    param, step = inputs
    aten.mul_.Tensor(param, step)
    aten.add_.Tensor(step, 1)
    return ()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda inputs: (aten.mul.Tensor(inputs[0], 2.0),), "a value that it makes is read later"),
        (_calling(lambda x, s: aten.div_.Tensor(x, aten.sum.default(x))), "elementwise"),
        (_calling(lambda x, s: aten.normal_.default(x)), "draws random numbers"),
        (_calling(lambda x, s: aten.sub_.Tensor(s, x)), "for all elements at once"),
        (_changes_late, "changes what the update has read"),
        (lambda inputs: (), "changes nothing"),
    ],
)
def test_what_has_no_blocks_has_a_reason(function: Region, reason: str) -> None:
    with pytest.raises(NoBlocksError, match=reason):
        make_block_update(function, [torch.ones(8), torch.tensor(1.0)])


def test_tensors_that_are_not_flat_have_no_blocks() -> None:
    for shapes in ([(4, 2)], [(8,), (7,)], [(0,)]):
        with pytest.raises(NoBlocksError, match=r"flat|elements"):
            make_block_update(lambda inputs: (), [torch.ones(shape) for shape in shapes])


@pytest.mark.parametrize("name", ["gpt", "mixed dtypes"])
def test_a_steps_updates_on_the_host_run_by_blocks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    updates, whole = list[BlockUpdate](), list[Region]()

    def make(function: Region, inputs: list[Any]) -> BlockUpdate:
        def counted(inputs: list[Any]) -> Any:
            if not isinstance(inputs[0], torch.fx.Proxy):
                whole.append(function)
            return function(inputs)

        updates.append(make_block_update(counted, inputs))
        return updates[-1]

    monkeypatch.setattr(load, "make_block_update", make)
    monkeypatch.setattr(blocks, "BLOCK", SMALL)
    case = CASES_OF_MODELS[name]
    plan = placing(prepare_case(case, 0, 1), "host", "host")
    assert not differences(train_plain(case, 3), train_compiled(case, 0, 3, plan=plan))
    assert updates and not whole
    assert any(update.numel > SMALL for update in updates)
