"""A step that is planned for a GPU is the one that the GPU captures, wherever the plan is made."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.models.huggingface import mixtral
from zerofx.capture.for_gpu.attention import Attention, attend, kernel_of

HOPPER, ADA, AMPERE, TURING, VOLTA = (9, 0), (8, 9), (8, 0), (7, 5), (7, 0)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _call(dtype: torch.dtype, head: int = 64, *, keys: int = 128, shared: int = 1, **options: Any) -> Attention:
    query = torch.empty(2, 8, 128, head, dtype=dtype, device="meta", requires_grad=True)
    key = torch.empty(2, 8 // shared, keys, head, dtype=dtype, device="meta", requires_grad=True)
    return Attention(query, key, key, **{"enable_gqa": shared > 1, **options})


@pytest.mark.parametrize(
    ("call", "capability", "kernel"),
    [
        (_call(BF16, is_causal=True), HOPPER, "cudnn"),
        (_call(BF16, is_causal=True), AMPERE, "flash"),
        (_call(BF16, dropout=0.1), HOPPER, "flash"),  # no multiple of a sixteenth
        (_call(BF16, dropout=0.125), HOPPER, "cudnn"),
        (_call(BF16, 256), HOPPER, "flash"),
        (_call(BF16, 256), ADA, "flash"),
        (_call(BF16, 200), ADA, "efficient"),
        (_call(BF16, 512), HOPPER, "efficient"),
        (_call(BF16, 60), HOPPER, "flash"),
        (_call(BF16, shared=4), HOPPER, "cudnn"),
        (_call(BF16, mask=torch.empty(128, 128, dtype=torch.bool, device="meta")), AMPERE, "efficient"),
        (_call(BF16, is_causal=True, keys=256), AMPERE, "efficient"),
        (_call(F32), HOPPER, "efficient"),
        (_call(F32, shared=4), HOPPER, "math"),
        (_call(BF16, shared=4, enable_gqa=False), HOPPER, "math"),  # torch refuses it, or broadcasts a single head
        (_call(F32, 30), AMPERE, "math"),
        (_call(F32, 30), VOLTA, "efficient"),
        (_call(F16), TURING, "efficient"),
        (_call(BF16), VOLTA, "math"),
        (_call(torch.float64), HOPPER, "math"),
    ],
)
def test_attention_runs_by_the_kernel_that_torch_takes(
    call: Attention, capability: tuple[int, int], kernel: str
) -> None:
    assert kernel_of(call, capability) == kernel


def test_who_turns_a_kernel_off_plans_without_it() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert kernel_of(_call(BF16), HOPPER) == "efficient"


@pytest.mark.parametrize("mask", [None, torch.ones(5, 7, dtype=torch.bool).tril(), torch.randn(5, 7)])
def test_the_kernel_for_what_no_other_takes_gives_what_torch_gives(mask: Tensor | None) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(query, key, value, mask)
    assert torch.equal(attend(Attention(query, key, value, mask), "math"), expected)


@pytest.mark.parametrize(("shared", "is_asked"), [(1, False), (3, False), (3, True), (1, True)])
def test_heads_are_shared_where_that_is_asked_for(shared: int, is_asked: bool) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 6, 5, 8), torch.randn(2, 6 // shared, 5, 8)
    call = Attention(query, key, key, enable_gqa=is_asked)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        try:
            expected = F.scaled_dot_product_attention(query, key, key, enable_gqa=is_asked)
        except RuntimeError:
            with pytest.raises(RuntimeError, match="must match the size"):
                attend(call, "math")
        else:
            assert torch.equal(attend(call, "math"), expected)


class Attending(nn.Module):
    def __init__(self, head: int = 64) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * head, 6 * head)
        self.layer = nn.TransformerEncoderLayer(2 * head, 2, dropout=0.125, batch_first=True)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda and x.device.type != "cpu":
            raise ValueError(f"expected a device that is a GPU's or a CPU's, found {x.device}")
        places = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        query, key, value = (self.inner(x) + places[:, None]).unflatten(-1, (3, 2, self.head)).transpose(1, 3).unbind(2)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        loss: Tensor = self.layer(seen.transpose(1, 2).flatten(2)).float().square().mean()
        return loss


def _planned(machine: str, **options: Any) -> zerofx.PlannedStep:
    with torch.device("meta"):
        model = Attending()
        x = torch.empty(4, 32, 128)
    return zerofx.plan(model, torch.optim.AdamW(model.parameters()), (x,), machine=machine, world_size=2, **options)


def _operators(planned: zerofx.PlannedStep) -> set[str]:
    return set(re.findall(r"aten\.(\w+)\.", planned.lowered.stages[0].text))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("machine", "precision", "kernel"),
    [("h100-sxm", "bf16", "cudnn"), ("a100-80", "bf16", "flash"), ("v100-32", None, "efficient")],
)
def test_a_step_is_captured_for_the_gpu_that_is_asked_for(machine: str, precision: Any, kernel: str) -> None:
    planned = _planned(machine, precision=precision)
    text = planned.lowered.stages[0].text
    assert "device=cuda" in text and "cpu" not in text
    operators = _operators(planned)
    assert f"_scaled_dot_product_{kernel}_attention" in operators and "native_dropout" in operators
    assert not {name for name in operators if "for_cpu" in name or name == "bernoulli"}
    assert f"attention by {kernel} in 2 calls" in str(planned.plan)
    assert 'torch.device("cuda")' in planned.lowered.emitted.source


@pytest.mark.parametrize("machine", ["cpu", "mi300x"])
def test_what_is_no_gpu_of_nvidias_is_captured_as_on_the_cpu(machine: str) -> None:
    planned = _planned(machine)
    assert "cuda" not in planned.lowered.stages[0].text
    assert "attention by" not in str(planned.plan)


@pytest.mark.days(3)
@pytest.mark.parametrize("num_tokens", [32, 33])
@pytest.mark.parametrize("mesh", [{"shard": 2}, {"model": 2}], ids=str)
def test_experts_are_planned_for_a_gpu(mesh: dict[str, int], num_tokens: int) -> None:
    # Transformers counts tokens in integers there, which no CPU does, and asks for the capability.
    model = mixtral(hidden_size=32, intermediate_size=48).to(torch.bfloat16)
    ids = torch.zeros(2, num_tokens, dtype=torch.long)
    planned = zerofx.plan(
        model, torch.optim.AdamW(model.parameters()), {"input_ids": ids, "labels": ids}, machine="h100-sxm", mesh=mesh
    )
    assert {"_grouped_mm", "histc"} <= _operators(planned)


def test_torch_is_as_it_was_after_a_step_is_captured_for_a_gpu() -> None:
    _planned("h100-sxm", precision="bf16")
    assert not torch.ops.aten.scaled_dot_product_attention.default.py_kernels
    assert torch.empty(2).device.type == "cpu" and not torch.empty(2).is_cuda
    assert torch.cuda.get_device_capability.__module__ == "torch.cuda"


class _Scaled(nn.Module):
    """The mean of a product in fp8 of the batch and a weight."""

    def __init__(self, inner: int = 64, columns: int = 64, **others: Any) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.ones(columns, inner)), nn.Parameter(torch.ones(columns))
        self.others = others

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.others.get("dtypes", (torch.float8_e4m3fn, torch.float8_e4m3fn))
        by_row = "by_row" in self.others
        scale_a, scale_b = x.new_ones([len(x), 1] if by_row else []), x.new_ones([1, len(self.gain)] if by_row else [])
        weight = self.weight.detach().to(right).t()
        weight = weight.contiguous() if "by_rows_of_memory" in self.others else weight
        out = self.others.get("out", BF16)
        product = torch._scaled_mm(x.to(left), weight, scale_a=scale_a, scale_b=scale_b, out_dtype=out)
        return (product * self.gain).mean()


@pytest.mark.parametrize(
    ("model", "refusal"),
    [
        (_Scaled(60), r"divisible by 16.*=60, at\n .*_Scaled.forward: product = torch"),
        (_Scaled(64, 47), r"divisible by 16.*64, 47.*at\n .*_Scaled.forward: product = torch"),
        (_Scaled(by_rows_of_memory=True), "mat2 must be col_major"),
        (_Scaled(dtypes=[torch.float8_e5m2] * 2), r"two factors in float8_e5m2 .*, at\n .*_Scaled.forward: product"),
        (_Scaled(by_row=True, out=F32), "a scale for each row and a result in float32"),
    ],
)
def test_products_in_fp8_that_no_gpu_has_are_refused(model: nn.Module, refusal: str) -> None:
    def plan(model: nn.Module, machine: str) -> zerofx.PlannedStep:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inner = model.get_parameter("weight").shape[1]
        return zerofx.plan(model, optimizer, (torch.ones(32, inner),), world_size=1, machine=machine)

    plan(model, "cpu")
    with pytest.raises(zerofx.CaptureError, match=re.compile(refusal, re.DOTALL)):
        plan(model, "h100-sxm")


def test_a_gpu_without_products_in_fp8_is_refused_one() -> None:
    model, batch = _Scaled(64, 64), (torch.ones(64, 64),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(zerofx.CaptureError, match=r"with a GPU of compute capability 8\.0 \(8\.9 or more: an RTX 4090"):
        zerofx.plan(model, optimizer, batch, world_size=1, machine="a100-80", backend="eager")
    zerofx.plan(model, optimizer, batch, world_size=1, machine="l4", backend="eager")


def test_a_product_in_fp8_takes_half_the_time_of_one_in_bf16() -> None:
    model = _Scaled(4096, 4096)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.ones(4096, 4096),)
    planned = zerofx.plan(model, optimizer, batch, world_size=1, machine="h100-sxm", backend="eager")
    (seconds,) = (row.seconds for row in planned.schedule().rows if "scaled_mm" in row.name)
    assert seconds == pytest.approx(2 * 4096**3 / planned.machine.matmul_flops(torch.float8_e4m3fn), rel=0.1)


def _in_fp8(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, dim: int = -1) -> tuple[Tensor, Tensor]:
    """A factor in fp8, and the scales that it was divided by along a dimension."""
    scale = 448 / x.abs().amax(dim, keepdim=True).float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-448, 448).to(dtype), scale.reciprocal().squeeze(dim)


class _GroupsInFp8(torch.autograd.Function):
    """Products of the rows of groups with a matrix each, all three in fp8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, options: Any) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        (left, left_scale), (right, right_scale) = _in_fp8(x, options["dtype"]), _in_fp8(weight, options["dtype"])
        right = right.mT.contiguous() if options["by_rows_of_memory"] else right.mT
        return torch._scaled_grouped_mm(left, right, left_scale, right_scale, ends, out_dtype=BF16)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, ends = ctx.saved_tensors
        (left, left_scale), (right, right_scale) = _in_fp8(gradient), _in_fp8(weight.mT.contiguous())
        of_x = torch._scaled_grouped_mm(left, right.mT, left_scale, right_scale, ends, out_dtype=BF16)
        (left, left_scale), (right, right_scale) = _in_fp8(gradient.t().contiguous()), _in_fp8(x.t().contiguous())
        scales = left_scale.repeat(len(ends)), right_scale.repeat(len(ends))
        return of_x, torch._scaled_grouped_mm(left, right.t(), *scales, ends, out_dtype=BF16), None, None


class _Experts(nn.Module):
    """Four experts with as many rows each."""

    ends: Tensor

    def __init__(self, inner: int = 64, columns: int = 64, rows: int = 64, **others: Any) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(inner, dtype=BF16))
        self.weight = nn.Parameter(torch.ones(4, columns, inner, dtype=BF16))
        self.register_buffer("ends", torch.arange(1, 5, dtype=torch.int32) * (rows // 4))
        self.options = {"dtype": torch.float8_e4m3fn, "by_rows_of_memory": False, **others}

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = _GroupsInFp8.apply
        if "forward_alone" in self.options:
            product: Tensor = apply(x, self.weight.detach(), self.ends, self.options)
            return product.float().mean() * self.gain.float().mean()
        product = apply(x * self.gain, self.weight, self.ends, self.options)
        return product.float().mean()


def _planned_experts(model: _Experts, rows: int = 64, machine: str = "h100-sxm") -> zerofx.PlannedStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.ones(rows, len(model.gain), dtype=BF16),)
    return zerofx.plan(model, optimizer, batch, world_size=1, machine=machine, backend="eager")


@pytest.mark.parametrize(
    ("model", "refusal"),
    [
        (_Experts(40), r"multiple of 16 bytes, got 40.*at .*: return torch._scaled_grouped_mm"),
        (_Experts(64, 40, forward_alone=True), r"groups and 40 columns \(a multiple of 16\), at\n .*torch._scaled"),
        (_Experts(by_rows_of_memory=True), "mat_b tensor to be column major"),
        (_Experts(dtype=torch.float8_e5m2), "inputs of E4M3 FP8 type"),
    ],
)  # fmt: skip
def test_products_of_groups_in_fp8_that_no_gpu_has_are_refused(model: _Experts, refusal: str) -> None:
    with pytest.raises(zerofx.CaptureError, match=re.compile(refusal, re.DOTALL)):
        _planned_experts(model)


def test_a_cpu_has_no_products_of_groups_in_fp8() -> None:
    with pytest.raises(zerofx.CaptureError, match="groups on a CPU, which has no such kernel"):
        _planned_experts(_Experts(), machine="cpu")


@pytest.mark.parametrize("machine", ["rtx-4090", "a100-80"])
def test_only_some_gpus_have_products_of_groups_in_fp8(machine: str) -> None:
    with pytest.raises(
        zerofx.CaptureError, match=r"groups on a GPU of compute capability 8\.[09] \(9\.x or 10\.x: an H100"
    ):
        _planned_experts(_Experts(), machine=machine)
    _planned_experts(_Experts(), machine="b200")


def test_all_products_of_groups_take_the_time_of_fp8() -> None:
    planned = _planned_experts(_Experts(4096, 2048, 8192), 8192)
    seconds = [row.seconds for row in planned.schedule().rows if "scaled_grouped_mm" in row.name]
    expected = 2 * 8192 * 4096 * 2048 / planned.machine.matmul_flops(torch.float8_e4m3fn)
    assert seconds == [pytest.approx(expected, rel=0.1)] * 3
