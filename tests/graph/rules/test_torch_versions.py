"""What torch's versions make necessary, held against the torch that is installed: each is needed where it says."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import flop_registry

from tests.lib.checkout import ROOT
from zerofx.errors import UsageError
from zerofx.torch_private import capture, distributed, operators, optimizers
from zerofx.torch_private.versions import TORCH, limitations

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor uses what torch itself deprecates


def test_the_oldest_torch_is_what_the_project_asks_for() -> None:
    assert '"torch>=2.11"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert TORCH >= (2, 11)


def test_what_is_left_out_is_said_where_it_is() -> None:
    assert (limitations() == ()) == (TORCH >= (2, 13))


def test_rules_of_operators_have_come_with_torch_2_13() -> None:
    given = (torch.empty(4, device="meta"), torch.empty(4, device="meta"))
    refused = contextlib.nullcontext() if TORCH >= (2, 13) else pytest.raises(UsageError, match="or later for a mesh")
    with refused:
        assert distributed.single_dim_rules(aten.add.Tensor, given, {}, 1)


def test_a_tag_for_out_has_come_with_torch_2_13() -> None:
    assert hasattr(torch.Tag, "out") == (TORCH >= (2, 13))
    assert operators.is_out(aten.mm.out) and not operators.is_out(aten.mm.default)
    assert not operators.is_out(aten.add_.Tensor)


def test_single_tensors_are_gathered_under_the_name_that_torch_has() -> None:
    assert hasattr(dist, "all_gather_single") == hasattr(dist, "reduce_scatter_single") == (TORCH >= (2, 13))
    assert "single" in getattr(distributed.gather_single, "__name__", "") or TORCH < (2, 13)


def test_adagrad_is_fused_on_gpus_from_torch_2_12_on() -> None:
    """Before, there is a kernel that torch's own optimizer refuses to use."""
    refuses = "cuda_unsupported=True" in inspect.getsource(torch.optim.Adagrad)
    assert optimizers.has_adagrad_for_gpus() == (not refuses)


def test_checks_of_linear_algebra_are_left_out_of_traces_to_torch_2_12() -> None:
    from torch._higher_order_ops.effects import _get_effect

    assert (_get_effect("aten::_linalg_check_errors") is None) == capture.leaves_out_checks()


def test_fakes_of_grouped_products_have_all_dtypes_of_kernels_from_torch_2_15_on() -> None:
    from torch._meta_registrations import meta_grouped_mm

    operands = torch.empty(4, 8, device="meta"), torch.empty(2, 8, 8, device="meta")
    refuses = operators.refuses_dtypes()
    with pytest.raises(RuntimeError, match="BF16") if refuses else contextlib.nullcontext():
        meta_grouped_mm(*operands, torch.empty(2, dtype=torch.int32, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dims", [(2, 3), (2, 2), (3, 2), (3, 3)], ids=str)
def test_grouped_products_of_fakes_are_as_those_of_kernels(dims: tuple[int, int], dtype: torch.dtype) -> None:
    def product(*tensors: Any) -> object:
        with contextlib.suppress(RuntimeError):
            result = aten._grouped_mm(*tensors)
            return result.shape, result.stride(), result.dtype
        return "refused"

    for *sizes, is_turned in itertools.product((4, 6, 8), (6, 16), (8, 10), (False, True)):
        rows, inner, columns = sizes
        operands = [torch.zeros((2, rows, inner)[-dims[0] :]), torch.zeros((2, inner, columns)[-dims[1] :])]
        operands = [(x.mT.contiguous().mT if is_turned else x).to(dtype) for x in operands]
        in_groups = {(2, 3): rows, (2, 2): inner, (3, 2): columns}.get(dims)
        ends = None if in_groups is None else torch.tensor([2, in_groups], dtype=torch.int32)
        expected = product(*operands, ends)
        with capture.fake_mode() as mode:
            fakes = [None if x is None else mode.from_tensor(x) for x in (*operands, ends)]
            assert product(*fakes) == expected


def test_attention_of_grouped_heads_is_counted() -> None:
    """The registry of torch 2.11 refuses it; later ones count every head of the queries."""
    packet = aten._scaled_dot_product_flash_attention
    query, key = torch.empty(2, 8, 16, 4, device="meta"), torch.empty(2, 2, 16, 4, device="meta")
    assert operators.flop_count(packet, (query, key, key), {}, query) == 2 * (2 * 2 * 8 * 16 * 16 * 4)
    backward = aten._scaled_dot_product_flash_attention_backward
    assert operators.flop_count(backward, (query, query, key, key), {}, query) == 5 * (2 * 2 * 8 * 16 * 16 * 4)
    refusal = pytest.raises(AssertionError) if operators.refuses_grouped_heads() else contextlib.nullcontext()
    with refusal:
        flop_registry[packet](query, key, key, out_val=query)


def test_inductor_knows_passes_over_kernels_from_torch_2_13_on() -> None:
    from torch._inductor import custom_graph_pass

    from zerofx.torch_private.inductor import scheduler

    assert hasattr(custom_graph_pass, "CustomSchedulerPass") == (TORCH >= (2, 13))
    assert {"__call__", "uuid"} <= scheduler.scheduler_pass_class().__abstractmethods__


def test_inductor_forgets_dependencies_in_torch_2_11() -> None:
    """It takes them from the loops anew, and looks at none of those that there were."""
    from torch._inductor.scheduler import SchedulerNode

    from zerofx.torch_private.inductor import scheduler

    keeps = "fake_deps" in inspect.getsource(SchedulerNode.recompute_size_and_body)
    assert scheduler.forgets_dependencies() == (not keeps)


def test_fusions_are_decided_where_inductor_asks() -> None:
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    from zerofx.torch_private.inductor import scheduler

    assert "V.choices.can_fuse(" in inspect.getsource(Scheduler)
    before = type(V.choices)
    with scheduler.keep_dependencies():
        assert (type(V.choices) is not before) == scheduler.forgets_dependencies()
    assert type(V.choices) is before


def test_draws_are_atens_in_regions() -> None:
    """Torch to 2.12 takes some apart whatever it is told."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    from zerofx.torch_private.inductor import compile as inductor

    draws = {aten.rand_like, aten.randn_like, aten.randint_like, aten.rrelu_with_noise_functional}
    with config.patch(fallback_random=True):
        taken_apart = {packet for packet in draws if packet.default in select_decomp_table()}
        assert taken_apart == inductor.operators_with_other_draws()
        assert not {packet.default for packet in draws} & inductor.inductor_decompositions().keys()


def test_reductions_over_both_dimensions_lose_their_shape_before_torch_2_13() -> None:
    """What is added up from a workspace is not viewed in the shape of the result."""
    from torch._inductor import config
    from torch._inductor.codegen.simd import SIMDScheduling

    from zerofx.codegen.inductor.kernel_passes import KERNEL_PASSES
    from zerofx.torch_private.inductor import compile as inductor

    is_viewed = "final_shape" in inspect.getsource(SIMDScheduling)
    assert inductor.misshapes_reductions() == (not is_viewed)
    with inductor.set_up(*KERNEL_PASSES):
        assert config.triton.mix_order_reduction == is_viewed


def test_passes_over_kernels_are_kept_on_disk_with_what_they_made() -> None:
    """Inductor pickles one of them as a setting, where it does not ask for its ``uuid``."""
    from zerofx.codegen.inductor.kernel_passes import KERNEL_PASSES
    from zerofx.torch_private.inductor import scheduler

    assert all(isinstance(kernel_pass, scheduler.CustomSchedulerPass) for kernel_pass in KERNEL_PASSES)
    assert [pickle.loads(pickle.dumps(each)).uuid() for each in KERNEL_PASSES] == [
        each.uuid() for each in KERNEL_PASSES
    ]


def test_adagrad_has_states_before_its_first_step() -> None:
    optimizer: Any = torch.optim.Adagrad(nn.Linear(2, 2).parameters())
    assert all(
        {"step", "sum"} <= optimizer.state[p].keys() for group in optimizer.param_groups for p in group["params"]
    )
