"""Has Inductor write the kernels of a step's regions for an H100, builds none, and prints what it wrote, as JSON."""

from __future__ import annotations

import ctypes
import json
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

H100 = {
    "name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "multi_processor_count": 132,
    "total_memory": 85_000_000_000, "regs_per_multiprocessor": 65_536, "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024, "warp_size": 32, "gcnArchName": "", "L2_cache_size": 50 << 20,
    "shared_memory_per_block": 49_152, "shared_memory_per_block_optin": 232_448,
    "shared_memory_per_multiprocessor": 233_472, "clock_rate": 1_980_000, "uuid": "stand-in",
}  # fmt: skip


def stand_in(stack: ExitStack) -> None:
    """Until ``stack`` closes, torch and Triton take this process for one with an H100; kernels are not built."""
    import torch
    import torch._dynamo.device_interface
    import torch._inductor.async_compile
    import torch.utils._triton
    import triton
    from triton.backends.compiler import GPUTarget

    properties = SimpleNamespace(**H100)

    def answers(where: Any, **values: Any) -> None:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(where, name, lambda *args, _value=value, **kwargs: _value))

    state = torch.zeros(16, dtype=torch.uint8)
    answers(
        torch.cuda, is_available=True, get_device_properties=properties, current_device=0, device_count=1,
        get_device_capability=(9, 0), get_device_name=properties.name, is_bf16_supported=True, _lazy_init=None,
        synchronize=None, set_device=None, get_rng_state=state, set_rng_state=None, _exchange_device=0,
        _maybe_exchange_device=0, empty_cache=None,
    )  # fmt: skip
    for name in ("getCurrentRawStream", "setDevice", "getDevice", "exchangeDevice", "maybeExchangeDevice"):
        stack.enter_context(mock.patch.object(torch._C, f"_cuda_{name}", create=True, return_value=0))
    stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
    answers(torch.accelerator, is_available=True, current_device_index=0)
    interface = torch._dynamo.device_interface.CudaInterface
    for where, names in (
        (interface, {"get_raw_stream": 0, "is_available": True, "raise_if_triton_unavailable": None}),
        (interface, {"get_device_properties": properties}),
        (interface.Worker, {"get_device_properties": properties, "current_device": 0}),
    ):
        for name, value in names.items():
            answer = staticmethod(lambda *args, _value=value, **kwargs: _value)
            stack.enter_context(mock.patch.object(where, name, answer))
    answers(torch.utils._triton, has_triton=True, has_triton_package=True)
    kernel = SimpleNamespace(run=lambda *args, **kwargs: None)
    answers(torch._inductor.async_compile.AsyncCompile, triton=kernel)
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    triton.runtime.driver.set_active(driver)


def written(options: dict[str, Any]) -> dict[str, Any]:
    """What Inductor writes for the regions of a step, by name, and the step's peak in bytes before and after it."""
    import torch

    from tests.compiled.cuda_stand_in.model import plan
    from zerofx.codegen.inductor import compile as inductor
    from zerofx.codegen.inductor.compile import compile_region
    from zerofx.codegen.inductor.memory_record import memory_record
    from zerofx.codegen.kernels.table import kernels_in_use
    from zerofx.codegen.region_facts import region_facts
    from zerofx.codegen.regions import regions_of
    from zerofx.codegen.step_file import load_source
    from zerofx.json_format import to_data
    from zerofx.lowering.load import apply_memory

    planned = plan(0, **options)
    lowered = planned.lowered
    namespace = load_source(lowered.emitted.source, "step.py")
    kernels = kernels_in_use(None, torch.device("cuda", 0))
    sources: dict[str, str] = {}
    memory = {}
    num_blocks: dict[str, list[int]] = {}
    for region in region_facts(regions_of(lowered.instructions), with_updates=False):
        if region.is_update or not region.inputs or region.key in memory:
            continue
        name = lowered.emitted.functions[region.key]

        with mock.patch.object(inductor, "memory_record", wraps=memory_record) as recorded:
            compiled_region = compile_region(namespace[name], region.inputs, name, kernels)
        memory[region.key], sources[name] = compiled_region.memory, recorded.call_args.args[0]
        num_blocks[name] = [
            sources[name].count("= empty_strided_cuda("),
            sum(event.num_bytes >= 0 and event.block is not None and event.output is None
                for event in compiled_region.memory if event.freed is None),
        ]  # fmt: skip
        assert compiled_region.replace_allocator is not None
    compiled, _ = apply_memory(lowered, planned.layout, memory, in_arena=False)
    in_arena, takes = apply_memory(lowered, planned.layout, memory, in_arena=True)
    return {
        "num blocks": num_blocks,
        "num takes": sum(take is not None for take in takes),
        "arena": to_data(in_arena.plan.arena),
        "sources": sources,
        "planned peak": planned.plan.peak_bytes["device"],
        "compiled peak": compiled.plan.peak_bytes["device"],
    }


if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    with ExitStack() as patches:
        stand_in(patches)
        print(json.dumps([written(json.loads(options)) for options in sys.argv[2:]]))
