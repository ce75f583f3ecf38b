"""An optimizer's step is tried on whole parameters: what it combines, draws, keeps and takes is known beforehand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lib.runs.whole_optimizers import ByAllNorms, ByNorms, Drawing
from zerofx.errors import OptimizerError
from zerofx.optimizers.outside import OptimizerRest, optimizer_rest
from zerofx.optimizers.whole.trial import CombinesError, check_combined, check_separable, shrink, try_shape

F32 = torch.float32
SAMPLES = {0: [((4, 7), F32), ((4, 7), F32), ((7,), F32)]}
MATRICES = {0: [((4, 7), F32), ((7, 4), F32)]}


def _rest(kind: Any, **options: Any) -> OptimizerRest:
    return optimizer_rest(kind([torch.nn.Parameter(torch.ones(4, 7))], **options))


class Remembering(ByAllNorms):
    """A step that keeps what it computes of one parameter in its group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        super().step()
        self.param_groups[0]["last"] = self.param_groups[0]["params"][-1].grad.norm()


def test_ranks_find_the_same_scratch_whatever_addresses_they_have() -> None:
    library = pytest.importorskip("pytorch_optimizer", reason="its SOAP has many states of other shapes")
    sizes = {try_shape(_rest(library.SOAP), 0, (8, 5), F32, {})[0].scratch_bytes for _ in range(8)}
    assert len(sizes) == 1


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor, ByNorms])
def test_what_treats_each_parameter_by_itself_is_separable(kind: Any) -> None:
    check_separable(_rest(kind), MATRICES if kind is torch.optim.Muon else SAMPLES)


def test_a_norm_of_all_gradients_combines_parameters_by_numbers() -> None:
    rest = _rest(ByAllNorms)
    with pytest.raises(CombinesError, match="ByAllNorms does something else to several"):
        check_separable(rest, SAMPLES)
    check_combined(rest, SAMPLES)


def test_random_numbers_are_refused_by_name() -> None:
    with pytest.raises(OptimizerError, match=r"Drawing does: .*would draw others than one process does"):
        check_separable(_rest(Drawing), SAMPLES)


def test_what_is_kept_of_one_parameter_in_a_group_is_refused() -> None:
    with pytest.raises(OptimizerError, match=r"Remembering to keep what it computes of one parameter in state\[p\]"):
        check_combined(_rest(Remembering), SAMPLES)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
@pytest.mark.parametrize("ns_steps", [3, 5])
def test_muon_takes_the_products_of_newton_and_schulz(shape: tuple[int, int], ns_steps: int) -> None:
    def flops(number: int) -> int:
        return try_shape(_rest(torch.optim.Muon, ns_steps=number), 0, shape, F32, {})[0].flops

    short, long = sorted(shape)
    each = 2 * short**2 * (2 * long + short)
    # Besides products a step of Newton and Schulz adds up some matrices, and the update is elementwise.
    assert ns_steps * each <= flops(ns_steps) <= ns_steps * (each + 8 * short * (short + long)) + 40 * short * long
    assert flops(ns_steps + 1) - flops(ns_steps) == flops(ns_steps + 2) - flops(ns_steps + 1) >= each


def test_products_of_muon_are_known_to_be_in_bfloat16() -> None:
    found, _ = try_shape(_rest(torch.optim.Muon), 0, (64, 96), F32, {})
    assert found.flops_in == torch.bfloat16
    assert [(s.path, s.shape, s.dtype) for s in found.states] == [("momentum_buffer", (64, 96), F32)]
    assert found.state_bytes == 64 * 96 * 4 and found.scratch_bytes >= 64 * 96 * 2


def test_bytes_of_states_are_those_that_a_step_leaves() -> None:
    found, _ = try_shape(_rest(ByNorms), 0, (5, 3), F32, {})
    assert {state.path: state.shape for state in found.states} == {"means.0": (5, 3), "means.1": (5,)}
    assert found.state_bytes == 2 * 64  # each at a boundary of 64 bytes
    factored, _ = try_shape(_rest(torch.optim.Adafactor), 0, (40, 9), F32, {})
    assert {s.path: s.shape for s in factored.states} == {"row_var": (40, 1), "col_var": (1, 9)}


def test_small_shapes_have_the_dimensions_and_the_order_of_large_ones() -> None:
    assert len(shrink((512, 2048))) == 2 and shrink((512, 2048))[0] < shrink((512, 2048))[1]
    assert shrink((2048, 512))[0] > shrink((2048, 512))[1] and shrink((1, 512))[0] == 1 and shrink(()) == ()
