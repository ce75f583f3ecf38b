"""What a generated wrapper takes and gives back, from its text."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from zerofx.codegen.inductor.memory_record import memory_record
from zerofx.scheduler.cost.liveness import MemoryEvent


def record(body: str, inputs: list[tuple[int, ...]], owners: list[int]) -> list[tuple[int, int | None]]:
    """Bytes and freed input of each event of a wrapper with ``body``, given contiguous inputs."""
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    mode = FakeTensorMode()
    with mode:
        given: list[Any] = [torch.empty(shape) for shape in inputs]
    source = f"class Runner:\n    def call(self, args):\n{lines}\n"
    events: tuple[MemoryEvent, ...] = memory_record(source, given, owners, mode)
    return [(event.num_bytes, event.freed) for event in events]


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


def test_an_input_is_freed_with_the_last_view_of_it() -> None:
    body = """
x, view_0 = args
args.clear()
del x
del view_0
return ()
"""
    assert record(body, [(2, 2), (2, 2)], [0, 0]) == [(0, 0)]


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
