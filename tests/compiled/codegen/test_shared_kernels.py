"""C++ kernels that differ in whole numbers alone are built once, and give the bits that each of them gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zerofx
from gpt import GPT
from tests.lib import compiling
from tests.lib.models import adamw
from zerofx.codegen.inductor.shared_kernels import SharedKernel, SharedKernels
from zerofx.disk.cache import DiskCache
from zerofx.torch_private.inductor.cpp import cache_dir

KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(float* out)
{
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(SIZEL); x0+=static_cast<int64_t>(1L))
    {
        out[static_cast<int64_t>(x0)] = static_cast<int64_t>(x0) % static_cast<int64_t>(PARTL) + FIRSTL;
    }
}
"""
RUNGS = (16, 32, 48)

pytestmark = compiling.regions


def num_built() -> int:
    return len(list(Path(cache_dir()).rglob("*.main.so")))


def kernel(kernels: SharedKernels, size: int, part: int, first: int) -> SharedKernel:
    text = KERNEL.replace("SIZE", str(size)).replace("PART", str(part)).replace("FIRST", str(first))
    return kernels.kernel(["float*"], text)


def check(found: SharedKernel, size: int, part: int, first: int) -> None:
    out = torch.full((32,), -1.0)
    found(out)
    expected = torch.full((32,), -1.0)
    expected[:size] = torch.arange(size) % part + first
    assert torch.equal(out, expected)


def test_kernels_of_other_sizes_are_one_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    cache = DiskCache(tmp_path / "zerofx")
    kernels = SharedKernels(cache)
    cases = [(8, 5, 2), (16, 5, 3), (24, 5, 4), (32, 5, 5)]
    made = [kernel(kernels, *case) for case in cases[:3]]
    for found, case in zip(made, cases[:3], strict=True):
        check(found, *case)
    assert num_built() == 1
    # What is divided by stays a constant.
    check(kernel(kernels, 8, 7, 2), 8, 7, 2)
    assert num_built() == 2
    # A later start is told which numbers vary: one kernel alone is built as all are.
    later = SharedKernels(cache)
    check(kernel(later, *cases[3]), *cases[3])
    assert num_built() == 2


def test_a_number_that_varies_later_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    kernels = SharedKernels(DiskCache(None))
    for case in [(8, 6, 2), (16, 6, 2), (16, 6, 3)]:
        check(kernel(kernels, *case), *case)
    assert num_built() == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a batch of another shape is captured")
def test_a_rung_has_the_bits_of_a_step_for_one_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("ZEROFX_CACHE_DIR", "0")

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT(vocab=64, dim=32, depth=2, heads=2, block=max(RUNGS))

    shared_model = model()
    shared = zerofx.compile(shared_model, adamw(shared_model), lengths=RUNGS)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(64, (3, rung), generator=generator) for rung in RUNGS]
    shared.prepare(batches[-1], batches[-1])
    of_all = num_built()
    found = [shared(ids, ids) for ids in batches]
    assert num_built() == of_all, "all is built by prepare"
    shared.close()
    # Files of regions are read from where they were written: elsewhere each is written anew, with kernels of its own.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "apart"))
    expected_model = model()
    fixed = zerofx.compile(expected_model, adamw(expected_model))
    expected = [fixed(batches[0], batches[0])]
    of_one = num_built()
    expected += [fixed(ids, ids) for ids in batches[1:]]
    assert torch.equal(torch.stack(found), torch.stack(expected))
    fixed.close()
    for name, parameter in expected_model.named_parameters():
        assert torch.equal(parameter, shared_model.get_parameter(name)), name
    assert of_all < len(RUNGS) * of_one, f"{of_all} kernels for three rungs, {of_one} for one"
