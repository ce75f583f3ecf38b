"""Every kernel, built offline for A100 and H100: within its registers, and without a byte spilled."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.compiled.kernels.interpreted import region_of
from tests.lib.optimizers import CASES
from zerofx.codegen.kernels.update import BLOCK, LAUNCH, load_kernel, make_update_kernel
from zerofx.optimizers import ShadowOptimizer, StandIn

pytest.importorskip("triton")
softmax = import_module("zerofx.codegen.kernels.softmax")

_NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float64: "*fp64"}
_LOW = torch.bfloat16


class Build(NamedTuple):
    """A kernel, the types of its run-time arguments in order, its compile-time arguments, and how it is launched."""

    kernel: Any
    types: Sequence[str]
    constants: Mapping[str, object]
    options: Mapping[str, object]
    max_registers: int  # a thread's, measured with triton 3.7 and rounded up to a multiple of 8


def update(case: str, fused: bool, max_registers: int) -> Build:
    optimizer = CASES[case]([torch.nn.Parameter(torch.zeros(3))])
    shadow, stand_in = ShadowOptimizer(optimizer), StandIn(0, torch.float32, fused=fused)
    program = shadow.forms(stand_in, shadow.programs([stand_in])[stand_in.key])[-1]
    states = [torch.zeros(8) for _ in program.states] + [torch.zeros(()) for _ in program.tensor_scalars]
    inputs = [torch.zeros(8), torch.zeros(8, dtype=_LOW), *states, torch.zeros(8, dtype=_LOW)]
    made = make_update_kernel(region_of(program, _LOW), [*inputs, (0.5,) * program.num_scalars], dying={1})
    types = [_NAMES[inputs[number].dtype] for number in made.pointers] + ["i64"] + ["fp32"] * len(made.scalars)
    return Build(load_kernel(made.source), types, {"BLOCK": BLOCK}, LAUNCH, max_registers)


def chunk(first: bool, max_registers: int) -> Build:
    types = ["*bf16", "*i64", "*fp32", "*fp32", "i32", "i32", "i32", "i32"]
    constants = {"FIRST": first, "COLUMNS": softmax.COLUMNS}
    return Build(softmax.chunk_kernel, types, constants, softmax.LAUNCH, max_registers)


def gradient(max_registers: int) -> Build:
    types = ["*bf16", "*i64", "*fp32", "*fp32", "i32", "i32", "i32", "i32"]
    constants = {"COLUMNS": softmax.COLUMNS}
    return Build(softmax.gradient_kernel, types, constants, softmax.LAUNCH, max_registers)


BUILDS = {
    "adamw": lambda: update("adamw", True, 48),
    "adamw written out": lambda: update("adamw", False, 48),
    "sgd with momentum": lambda: update("sgd_momentum", True, 32),
    "lion": lambda: update("lion", False, 32),
    "first chunk": lambda: chunk(True, 32),
    "another chunk": lambda: chunk(False, 32),
    "gradient": lambda: gradient(32),
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", BUILDS)
def test_a_kernel_builds_within_its_registers(name: str, capability: int, tmp_path: Path) -> None:
    build = BUILDS[name]()
    num_registers, num_spilled = resources(build, capability, tmp_path / "kernel.cubin")
    assert 0 < num_registers <= build.max_registers
    assert num_spilled == 0


def resources(build: Build, capability: int, path: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes of its that spill to memory, as the assembler has put them into the binary."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [name for name in build.kernel.arg_names if name not in build.constants]
    # Triton finds out at each launch that allocations begin at multiples of 16 bytes.
    aligned = {(n,): [["tt.divisibility", 16]] for n, kind in enumerate(build.types) if kind.startswith("*")}
    source = ASTSource(build.kernel, dict(zip(names, build.types, strict=True)), build.constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(build.options))
    path.write_bytes(compiled.asm["cubin"])
    told = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)], check=True, capture_output=True, text=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told)
    assert found is not None, told
    registers, stack, local = map(int, found.groups())
    return registers, stack + local
