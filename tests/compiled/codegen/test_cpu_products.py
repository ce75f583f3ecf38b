"""Matrix products on a CPU: as near to float64 as ATen's, of any shape, in counted memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.lib import compiling
from zerofx.codegen.cpu.extras import PRODUCTS
from zerofx.codegen.cpu.products import build
from zerofx.ir import ops
from zerofx.ir.op_kernels import products as facts
from zerofx.scheduler.cost.cpu.peaks import CpuPeak
from zerofx.scheduler.cost.cpu.workspace import workspace_bytes

aten = torch.ops.aten
pytestmark = [
    *compiling.regions,
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"),
]
DEPTH, LEFT, RIGHT = facts.DEPTH, facts.LEFT_COLUMNS, facts.RIGHT_COLUMNS
# Rows, inner size, columns: blocks that fit and blocks that do not, on every level.
SHAPES = [
    (2 * LEFT, DEPTH, RIGHT),
    (LEFT + 1, DEPTH + 1, RIGHT + 1),
    (LEFT - 1, 2 * DEPTH + 3, 2 * RIGHT - 1),
    (8, 8, 140_001),
    (140_001, 8, 8),
    (9, 131_071, 11),
    (333, 257, 129),
]
named = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def operands(shape: tuple[int, int, int], form: str) -> tuple[Tensor, Tensor]:
    """Left and right operand, each row by row ("n") or column by column ("t")."""
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = (shape[:2], shape[1:])
    rows = [
        torch.randn(*(size if way == "n" else size[::-1]), generator=generator)
        for size, way in zip(sizes, form, strict=True)
    ]
    left, right = (one if way == "n" else one.t() for one, way in zip(rows, form, strict=True))
    return left, right


def check(found: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> None:
    """Against the same in float64, to within what ATen's product errs by."""
    exact = left.double() @ right.double() + (0 if bias is None else bias.double())
    theirs = left @ right + (0 if bias is None else bias)
    allowed = 4 * float((theirs - exact).abs().max()) + 2e-6 * float(exact.abs().max())
    assert float((found - exact).abs().max()) <= allowed
    assert found.is_contiguous()


@named
@pytest.mark.parametrize("form", ["nn", "nt", "tn"])
def test_products_are_as_exact_as_atens(shape: tuple[int, int, int], form: str) -> None:
    left, right = operands(shape, form)
    assert facts.has_kernel(left, right, None) == (form != "nn" or shape[1] <= facts.LONGEST)
    check(ops.product(left, right, None), left, right)
    if form != "tn":
        bias = torch.randn(shape[2])
        check(ops.product(left, right, bias), left, right, bias)


@named
def test_a_product_is_written_into_its_place_and_nowhere_else(shape: tuple[int, int, int]) -> None:
    left, right = operands(shape, "tn")
    buffer = torch.full((shape[0] * shape[2] + 14,), 7.0)
    ops.product_into(buffer[5:-9].view(shape[0], shape[2]), left, right)
    check(buffer[5:-9].view(shape[0], shape[2]), left, right)
    assert bool((buffer[:5] == 7).all()) and bool((buffer[-9:] == 7).all())


@named
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_kernel_stays_in_its_scratch(shape: tuple[int, int, int], num_threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        numel = facts.scratch_numel(shape[1])
    finally:
        torch.set_num_threads(before)
    (rows, depth, columns), (left, right) = shape, operands(shape, "tn")
    into, scratch = torch.empty(rows, columns), torch.full((numel + 64,), 7.0)
    build()(left, right, into, scratch, torch.tensor([depth, rows, columns, rows, columns, columns, num_threads]))
    check(into, left, right)
    assert bool((scratch[numel:] == 7).all())


def test_a_weights_gradient_is_the_same_in_any_part_and_on_any_number_of_threads() -> None:
    left, right = operands((2 * LEFT + 40, DEPTH + 60, RIGHT + 50), "tn")
    whole, before = ops.product(left, right, None), torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(ops.product(left, right, None), whole)
    finally:
        torch.set_num_threads(before)
    part = ops.product(left[30:210].t().contiguous().t(), right[:, 77:401].contiguous(), None)
    assert torch.equal(part, whole[30:210, 77:401])


@named
@pytest.mark.parametrize("form", ["nn", "nt", "tn"])
def test_what_a_product_holds_is_within_what_is_counted(shape: tuple[int, int, int], form: str) -> None:
    left, right = operands(shape, form)
    ops.product(left, right, None)
    with CpuPeak() as peak:
        found = ops.product(left, right, None)
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("left", "right")]
    for node, one in zip(nodes, (left, right), strict=True):
        node.meta["val"] = one
    node = graph.call_function(ops.product, (*nodes, None))
    node.meta["val"] = found
    assert peak.num_bytes - found.nbytes <= workspace_bytes(node)
    if form == "tn":
        assert peak.num_bytes - found.nbytes >= workspace_bytes(node)


@pytest.mark.parametrize(
    ("left", "right", "bias"),
    [
        (torch.empty(512, 512, dtype=torch.bfloat16), torch.empty(512, 512, dtype=torch.bfloat16), None),
        (torch.empty(512, 512, dtype=torch.float64), torch.empty(512, 512, dtype=torch.float64), None),
        (torch.empty(512, 513)[:, :512], torch.empty(512, 512), None),
        (torch.empty(1, 512).expand(512, 512), torch.empty(512, 512), None),
        (torch.empty(512, 512), torch.empty(512, 1).expand(512, 512), None),
        (torch.empty(512, 512).t(), torch.empty(512, 512).t(), None),
        (torch.empty(512, 512).t(), torch.empty(512, 512), torch.empty(512)),
        (torch.empty(512, 512), torch.empty(512, 512), torch.empty(512, 512)),
        (torch.empty(512, 512), torch.empty(512, 512), torch.empty(1)),
        (torch.empty(512, 512), torch.empty(512, 512), torch.empty(512, dtype=torch.float64)),
        (torch.empty(128, 128), torch.empty(128, 128), None),
        (torch.empty(4, 4096), torch.empty(4096, 4096), None),
        (torch.empty(512, 16_385), torch.empty(16_385, 512), None),
        (torch.empty(512, 512, device="meta"), torch.empty(512, 512, device="meta"), None),
    ],
)
def test_others_are_left_to_aten(left: Tensor, right: Tensor, bias: Tensor | None) -> None:
    assert not facts.has_kernel(left, right, bias)


def _layer(inputs: list[Any]) -> tuple[Tensor, ...]:
    """A layer, the gradients of its input and weight, one of them into a buffer, as regions have them."""
    grad, x, weight, bias, buffer = inputs
    inputs.clear()
    result = aten.addmm.default(bias, x, weight.t())
    slot = aten.as_strided.default(buffer, [300, 260], [260, 1], 8)
    aten.mm.out(grad.t(), x, out=slot)
    return result, aten.mm.default(grad, weight), aten.mm.default(grad.t(), x)


@pytest.mark.parametrize("kernels", [{PRODUCTS}, set()], ids=["kernel", "ATen"])
def test_a_compiled_region_has_them_where_they_are_in_use(kernels: set[str]) -> None:
    from zerofx.codegen.inductor import compile as inductor
    from zerofx.codegen.inductor.compile import compile_region
    from zerofx.codegen.inductor.memory_record import memory_record

    given = [torch.randn(130, 300), torch.randn(130, 260), torch.randn(300, 260), torch.randn(300), torch.ones(78_016)]
    copies = [one.clone() for one in given]
    with mock.patch.object(inductor, "memory_record", wraps=memory_record) as recorded:
        compiled = compile_region(_layer, given, "layer", frozenset(kernels))
    code = recorded.call_args.args[0]
    for one, other in zip((*compiled.call(list(given)), *given), (*_layer(list(copies)), *copies), strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)
    assert ("zerofx.product.default" in code) == ("zerofx.product_into.default" in code) == bool(kernels)
    assert sum(event.num_bytes for event in compiled.memory) == 4 * (130 * 300 + 130 * 260 + 300 * 260)
