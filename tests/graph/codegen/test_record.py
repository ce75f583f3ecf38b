"""What a generated wrapper takes and gives back, from its text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from zerofx.codegen.inductor.memory_record import memory_record
from zerofx.errors import InternalError
from zerofx.scheduler.cost.liveness import MemoryEvent

KERNELS = """
cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*'], '')
triton_fused_0 = async_compile.triton('triton_fused_0', '', device_str='cuda')
"""


def record(body: str, inputs: list[tuple[int, ...]], owners: list[int]) -> list[tuple[int, int | None]]:
    """Bytes and freed input of each event of a wrapper with ``body``, given contiguous inputs."""
    return [(event.num_bytes, event.freed) for event in events(body, inputs, owners) if event.output is None]


def events(body: str, inputs: list[tuple[int, ...]], owners: list[int]) -> tuple[MemoryEvent, ...]:
    """The events of a wrapper with ``body``, given contiguous inputs."""
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    mode = FakeTensorMode()
    with mode:
        given: list[Any] = [torch.empty(shape) for shape in inputs]
    source = f"{KERNELS}class Runner:\n    def call(self, args):\n{lines}\n"
    recorded: tuple[MemoryEvent, ...] = memory_record(source, given, owners, mode)
    return recorded


def test_buffers_live_from_their_allocation_to_their_last_name() -> None:
    body = """
x, = args
args.clear()
buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
cpp_fused_0(x, buf0)
del x
buf1 = buf0; del buf0  # reuse
buf2 = reinterpret_tensor(buf1, (8, 4), (1, 8), 0); del buf1  # reuse
del buf2
return ()
"""
    assert record(body, [(4, 8)], [0]) == [(128, None), (0, 0), (-128, None)]


def test_what_the_wrapper_allocates_is_numbered_and_outputs_say_where_they_lie() -> None:
    body = """
x, = args
args.clear()
buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
buf1 = empty_strided_cpu((2, ), (1, ), torch.float32)
cpp_fused_0(x, buf0, buf1)
buf2 = torch.ops.aten.max.dim(x, 1)
buf3 = buf2[0]
del buf2
del buf0
buf4 = empty_strided_cpu((8, ), (1, ), torch.float32)
buf5 = empty_strided_cpu_pinned((8, ), (1, ), torch.float32)
return (buf3, reinterpret_tensor(buf4, (2, 4), (4, 1), 0), buf1, x, )
"""
    numbered = [event for event in events(body, [(4, 8)], [0]) if event.block is not None]
    assert numbered == [
        MemoryEvent(128, block=0), MemoryEvent(8, block=1), MemoryEvent(-128, block=0), MemoryEvent(32, block=2),
        MemoryEvent(block=2, output=1), MemoryEvent(block=1, output=2),
    ]  # fmt: skip


def test_an_input_is_freed_with_the_last_view_of_it() -> None:
    body = """
x, view_0 = args
args.clear()
del x
del view_0
return ()
"""
    assert record(body, [(2, 2), (2, 2)], [0, 0]) == [(0, 0)]


def test_a_reduction_is_added_up_from_what_its_programs_left() -> None:
    body = """
x, = args
args.clear()
workspace_0 = empty_strided_cpu((64, ), (1, ), torch.float32)
triton_fused_0.run(x, workspace_0, stream=stream0)
buf0 = workspace_0[0 * (4) * (8) : (0 + 1) * (4) * (8)].view(4, 8).sum(dim=0).view([1, 1, 8]).to(torch.bfloat16)
buf1 = workspace_0[1 * (4) * (8) : (1 + 1) * (4) * (8)].view(4, 8).amax(dim=0)
del workspace_0
del x
return (buf0, buf1, )
"""
    assert record(body, [(2, 2)], [0]) == [
        (256, None), (32, None), (16, None), (-32, None), (32, None), (-256, None), (0, 0),
    ]  # fmt: skip


def test_an_operator_left_to_aten_makes_its_own_outputs() -> None:
    body = """
x, y = args
args.clear()
buf0 = torch.ops.aten.max.dim(x, 1)
buf1 = buf0[0]
del buf0
extern_kernels.mm(x, y, out=x)
buf2 = extern_kernels.mm(x, y)
return (buf1, buf2, )
"""
    assert record(body, [(8, 8), (8, 8)], [0, 1]) == [(32, None), (64, None), (-64, None), (256, None)]


def test_an_operator_is_called_with_what_it_takes_by_name_only() -> None:
    body = """
x, = args
args.clear()
buf0 = torch.ops.aten.sort.stable(x, stable=True, dim=1, descending=False)
buf1 = buf0[1]
return (buf1, )
"""
    made = [num_bytes for num_bytes, _ in record(body, [(8, 8)], [0])]
    assert made[-2:] == [8 * 8 * 4, 8 * 8 * 8]  # values, and indices of 64 bits


def test_a_convolution_holds_what_onednn_packs() -> None:
    body = """
x, w = args
args.clear()
buf0 = extern_kernels.convolution(x, w, stride=(1, 1), padding=(1, 1), dilation=(1, 1), transposed=False, \
output_padding=(0, 0), groups=1, bias=None)
return (buf0, )
"""
    (most, _), (back, _), (kept, _) = record(body, [(4, 16, 16, 16), (16, 16, 3, 3)], [0, 1])
    assert kept == 4 * 16 * 16 * 16 * 4
    assert most == -back > 2 * kept  # images and result in oneDNN's layout


def test_statements_in_a_device_guard_count() -> None:
    body = """
x, = args
with torch.cuda._DeviceGuard(0):
    stream0 = get_raw_stream(0)
    buf0 = empty_strided_cpu((2, ), (1, ), torch.float64)
    triton_fused_0.run(x, buf0, 2, stream=stream0)
    del x
return (buf0, )
"""
    assert record(body, [(2,)], [0]) == [(16, None), (0, 0)]


def test_a_wrapper_for_cuda_binds_its_inputs_again_where_they_are_first_read() -> None:
    body = """
x, view_0 = args
args.clear()
with torch.cuda._DeviceGuard(0):
    torch.cuda.set_device(0)
    x = copy_if_misaligned(x)
    view_0 = copy_if_misaligned(view_0)
    buf0 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
    extern_kernels.mm(reinterpret_tensor(x, (4, 2), (2, 1), 0), reinterpret_tensor(view_0, (2, 4), (4, 1), 0), out=buf0)
    del x
    del view_0
return (buf0, )
"""
    assert record(body, [(2, 4), (2, 4)], [0, 1]) == [(64, None), (0, 0), (0, 1)]


def test_an_operator_that_writes_into_what_it_is_given_holds_its_workspace() -> None:
    body = """
x, values = args
args.clear()
buf0 = empty_strided_cpu((64, 32), (32, 1), torch.int64)
aten.scatter_reduce_.two(x, 0, buf0, values, reduce='mean', include_self=True)
return (x, )
"""
    made, taken, back = (num_bytes for num_bytes, _ in record(body, [(64, 32), (64, 32)], [0, 1]))
    assert made == 64 * 32 * 8
    assert taken == -back >= 2 * 64 * 32 * 4  # how many of each there are, twice


def test_views_of_allocations_and_methods_that_write_take_nothing_more() -> None:
    body = """
x, = args
args.clear()
buf0 = empty_strided_cpu((4, 16), (16, 1), torch.float32).as_strided((4, 12), (16, 1))
buf0.copy_(x, False)
buf1 = aten.view.dtype(buf0, torch.int32)
del buf0
buf2 = empty_strided_cpu((8, ), (1, ), torch.uint8)
buf2.zero_()
buf3 = torch.ops.aten.full.default([2], -inf, dtype=torch.float32, device=device(type='cpu'), pin_memory=False)
extern_kernels.bias_addmm(x, x, x, alpha=1, beta=1, out=x)
return (buf1, )
"""
    assert record(body, [(4, 12)], [0]) == [(256, None), (8, None), (8, None)]


@pytest.mark.parametrize(
    "statement",
    [
        "buf0 = a_new_way_to_allocate((4, 8), (8, 1), torch.float32)",
        "buf0 = alloc_from_pool(x, 0, torch.float32, (4,), (1,))",
        "buf0 = torch.empty_like(x)",
        "buf0 = x.clone()",
        "buf0 = x if True else x",
        "buf0, buf1 = torch.ops.aten.max.dim(x, 1)",
        "buf0 = buf1 = x",
        "buf0: object = x",
        "cpp_fused_1(x)",
        "triton_fused_1.run(x, 2, stream=0)",
        "extern_kernels.a_new_kernel(x, out=x)",
        "extern_kernels.bias_addmm(x, x, x)",
        "self.partitions[0]([x])",
        "del buf7",
        "with torch.cuda.stream(0): pass",
        "if True: pass",
        "for one in (x,): pass",
        "assert not x.isnan().any().item()",
    ],
)
def test_a_statement_that_is_not_known_is_refused(statement: str) -> None:
    """To skip it would give a peak that is too low."""
    with pytest.raises(InternalError, match=rf"(?s)found `.*` with torch {torch.__version__[:4]}") as raised:
        record(f"x, = args\nargs.clear()\n{statement}", [(4, 8)], [0])
    named = str(raised.value).split("`")[1]
    assert named.splitlines()[0] in statement
