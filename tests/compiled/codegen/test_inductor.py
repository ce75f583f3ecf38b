"""Regions compiled by Inductor: the same values within tolerance, and memory that adds up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.lib import compiling
from tests.lib.fakes import fake_like
from tests.lib.graphs import DIM, Prepared, prepare
from zerofx.codegen.emit import emit
from zerofx.codegen.inductor.background import Background
from zerofx.codegen.regions import Region, cut
from zerofx.codegen.step_file import load_source
from zerofx.errors import CompilerError
from zerofx.ir.aliasing import storage_bytes
from zerofx.ir.facts import Phase, tensor, value
from zerofx.scheduler.cost.liveness import liveness

pytestmark = [pytest.mark.slow, *compiling.regions]


def _first(prepared: Prepared, phase: Phase) -> tuple[Region, Any]:
    """The first region of a repeated layer in ``phase``, and its function from the emitted file."""
    instructions = cut(prepared.step)
    emitted = emit(prepared.step, instructions, liveness(prepared.step, on_cpu=True), "")
    region = next(r for r in instructions if isinstance(r, Region) and r.unit and r.origin.phase is phase)
    return region, load_source(emitted.source, "tiny_step.py")[emitted.functions[region.key]]


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_a_compiled_region_gives_what_eager_gives_and_frees_what_it_takes(phase: Phase) -> None:
    from zerofx.codegen.inductor.compile import compile_region

    region, function = _first(prepare().run(), phase)
    compiled = compile_region(function, [value(node) for node in region.inputs], "tiny")
    given_inputs = [torch.randn(tensor(node).shape) for node in region.inputs]
    # A backward region also writes gradients into a buffer that it is given.
    copies = [given.clone() for given in given_inputs]
    expected, found = function(list(given_inputs)), compiled.call(list(copies))
    assert len(expected) == len(found) == len(region.outputs)
    for one, other in zip((*expected, *given_inputs), (*found, *copies), strict=True):
        torch.testing.assert_close(one, other)
    outputs = sum(storage_bytes(tensor(node)) for node in region.outputs)
    assert sum(event.num_bytes for event in compiled.memory) == outputs
    freed = [event.freed for event in compiled.memory if event.freed is not None]
    assert sorted(freed) == sorted(set(freed)) and set(freed) <= set(range(len(region.inputs)))


def test_inputs_that_share_a_fake_value_stay_apart() -> None:
    from zerofx.codegen.inductor.compile import compile_region

    def weighted(inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        x, y = inputs
        inputs.clear()
        return (x + 10 * y,)

    region, _ = _first(prepare().run(), Phase.FORWARD)
    fake = value(region.inputs[0])  # a node and its copies have one
    x, y = torch.randn(tensor(region.inputs[0]).shape), torch.randn(tensor(region.inputs[0]).shape)
    (found,) = compile_region(weighted, [fake, fake], "weighted").call([x, y])
    torch.testing.assert_close(found, x + 10 * y)


def test_a_result_is_laid_out_as_planned_where_a_decomposition_lays_it_out_otherwise() -> None:
    from zerofx.codegen.inductor.compile import compile_region

    def joined(inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        nothing, x = inputs
        inputs.clear()
        found = torch.ops.aten.cat.default([nothing, x.transpose(1, 2)], -2)
        return found, 2 * found.view(8, 3)

    inputs = [fake_like([0], [1], torch.float32, "cpu"), fake_like([2, 3, 4], [12, 4, 1], torch.float32, "cpu")]
    compiled = compile_region(joined, inputs, "joined")
    given = [torch.randn(0), torch.randn(2, 3, 4)]
    for one, other in zip(joined(list(given)), compiled.call(list(given)), strict=True):
        torch.testing.assert_close(one, other, check_stride=True)


def test_a_compiled_region_empties_its_list() -> None:
    from zerofx.codegen.inductor.compile import compile_region

    region, function = _first(prepare().run(), Phase.FORWARD)
    compiled = compile_region(function, [value(node) for node in region.inputs], "tiny")
    given_inputs: list[Any] = [torch.randn(tensor(node).shape) for node in region.inputs]
    compiled.call(given_inputs)
    assert given_inputs == []


def test_a_region_that_cannot_be_compiled_is_named() -> None:
    from zerofx.codegen.inductor.compile import compile_region

    def broken(inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        return (torch.mm(inputs[0], torch.ones(DIM + 1, 1)),)

    region, _ = _first(prepare().run(), Phase.FORWARD)
    with pytest.raises(CompilerError, match="region broken_forward could not be compiled"):
        compile_region(broken, [value(node) for node in region.inputs], "broken_forward")


def test_a_result_that_lies_otherwise_than_its_fake_tensor_says_is_reported() -> None:
    from zerofx.codegen.inductor.compile import compile_region

    @torch.library.custom_op("zerofx_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return (2 * x).t().contiguous().t()

    @doubled.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def twice(inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        (x,) = inputs
        inputs.clear()
        return (torch.ops.zerofx_tests.doubled.default(x) + 1,)

    compiled = compile_region(twice, [fake_like([4, 6], [6, 1], torch.float32, "cpu")], "tiny_backward")
    with pytest.raises(CompilerError, match=r"region tiny_backward .*stride 1==6(?s:.*)doubled(?s:.*)backend='eager'"):
        compiled.call([torch.ones(4, 6)])


def test_a_region_compiled_before_comes_from_the_cache_on_disk_and_a_changed_one_does_not() -> None:
    from torch._dynamo.utils import counters

    from zerofx.codegen.inductor.compile import compile_region

    region, function = _first(prepare().run(), Phase.FORWARD)
    inputs = [value(node) for node in region.inputs]

    def changed(given: list[Any]) -> tuple[torch.Tensor, ...]:
        return tuple(one * 1.25 for one in function(given))

    compile_region(function, inputs, "tiny")
    before = counters["inductor"]["fxgraph_cache_hit"]
    again = compile_region(function, inputs, "tiny")
    assert counters["inductor"]["fxgraph_cache_hit"] == before + 1
    assert sum(event.num_bytes for event in again.memory) == sum(storage_bytes(tensor(n)) for n in region.outputs)
    with torch.no_grad():
        given = [torch.randn(tensor(node).shape) for node in region.inputs]
        expected = [1.25 * one for one in again.call(list(given))]
        for one, other in zip(expected, compile_region(changed, inputs, "changed").call(list(given)), strict=True):
            torch.testing.assert_close(one, other)


def test_no_region_is_compiled_before_the_compiler_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerofx.codegen.inductor import compile as inductor

    may_end = threading.Event()
    background = Background("test", [may_end.wait])
    background.resume()
    monkeypatch.setattr(inductor, "preparation", lambda _: background)
    region, function = _first(prepare().run(), Phase.FORWARD)
    inputs = [value(node) for node in region.inputs]
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(inductor.compile_region, function, inputs, "tiny")
        with pytest.raises(TimeoutError):
            compiled.result(0.5)
        may_end.set()
        compiled.result()


def test_a_kernel_that_cannot_be_built_beside_a_region_is_reported_when_it_is_finished() -> None:
    from zerofx.codegen.inductor.compile import CompiledRegion

    def fail() -> None:
        raise RuntimeError("no compiler")

    background = Background("test", [fail])
    background.resume()
    region = CompiledRegion("layers_forward", lambda _: (), (), background)
    with pytest.raises(CompilerError, match=r"layers_forward .*RuntimeError: no compiler"):
        region.finish()
