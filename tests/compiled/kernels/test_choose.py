"""Which updates of a step run on a kernel, and that a step with kernels trains as one without."""

from __future__ import annotations

import pytest
import torch

from tests.compiled.kernels.conftest import Interpret
from tests.compiled.kernels.interpreted import compiled_losses, updated
from tests.lib.compiling import needs_compiler
from tests.lib.graphs import prepare
from zerofx.codegen.kernels.choose import function_of, kernels_of_facts, update_kernels
from zerofx.codegen.region_facts import region_facts
from zerofx.codegen.regions import cut, regions_of


@pytest.mark.sweep(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_updates_of_a_step_are_those_of_aten(interpret: Interpret, stage: int, precision: str | None) -> None:
    for _, expected, found in interpret(updated, stage, precision, 1):
        # The interpreter cuts bfloat16 off where a GPU rounds it.
        tolerance = 2**-7 if expected.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-6)


def test_gradients_of_micro_batches_are_averaged_by_the_kernel(interpret: Interpret) -> None:
    for _, expected, found in interpret(updated, 3, None, 2):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_equal_updates_share_a_kernel_and_leave_their_gradient_unwritten() -> None:
    regions = regions_of(cut(prepare().run().step))
    found = update_kernels(regions)
    updates = [region for region in regions if region.is_update]
    assert set(found.kernels) == {region.key for region in updates} and len(found.kernels) < len(updates)
    for region in updates:
        names = [node.name.split("_")[0] for node in region.inputs]
        source = found.kernels[region.key].source
        assert f"tl.store(x{names.index('shard')} + at" in source
        assert f"tl.store(x{names.index('grad')} + at" not in source
    functions = {region.key: function_of(region) for region in updates}
    everything = kernels_of_facts(region_facts(updates, with_updates=True), functions, all_is_read=True)
    assert all("tl.store(x" in kernel.source for kernel in everything.kernels.values())
    assert sum(kernel.source.count("tl.store") for kernel in everything.kernels.values()) > sum(
        kernel.source.count("tl.store") for kernel in found.kernels.values()
    )


@pytest.mark.slow
@needs_compiler
def test_a_compiled_step_with_kernels_trains_as_one_without(interpret: Interpret) -> None:
    expected, _, none = interpret(compiled_losses, "none")
    assert none == 0
    found, reasons, made = interpret(compiled_losses, "update")
    assert made > 0 and set(reasons.values()) == {"a value that it makes is read later"}
    assert found == pytest.approx(expected, rel=1e-5)
