"""What is made for GPUs is the same on every rank, and is what it has to be, on stand-ins for them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from tests.lib.checkout import ROOT

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("guard") / "guard.so"
    headers = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    libraries = [f(folder) for folder in cpp_extension.library_paths() for f in ("-L{}".format, "-Wl,-rpath,{}".format)]
    flags = ["-shared", "-fPIC", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    source = str(HERE / "guard.cpp")
    command = ["g++", *flags, *headers, source, *libraries, "-lc10", "-ltorch_cpu", "-o", str(built)]
    subprocess.run(command, check=True, timeout=300)
    return built


def _printed(program: str, library: Path, folder: Path, *arguments: str) -> Any:
    settings = {"ZEROFX_CACHE_DIR": "0", "TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.compiled.cuda_stand_in.{program}", str(library), *arguments],
        env=os.environ | settings, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def graphs(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _printed("graphs", library, tmp_path_factory.mktemp("inductor"))


@pytest.mark.days(3)
def test_ranks_agree_whatever_their_devices(graphs: Any) -> None:
    first, second = graphs["of devices"]
    for what, found in first.items():
        assert found == second[what], what
    assert "device=cuda," in first["captured graph"] and 'torch.device("cuda")' in first["emitted step"]


# With as many rows Inductor reduces over both dimensions in one kernel, and leaves the rest to the wrapper.
MANY = {"stage": 0, "world_size": 1, "max_grad_norm": 1.0, "sequences": 256}


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("asked", [{"stage": 3, "world_size": 2}, MANY], ids=["few rows", "many rows"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor uses what torch itself deprecates
def test_regions_sum_in_one_order_and_within_what_is_planned_for_them(
    asked: dict[str, Any], library: Path, tmp_path: Path
) -> None:
    from zerofx.torch_private.inductor.compile import misshapes_reductions

    for found in _printed("regions", library, tmp_path, json.dumps(asked)):
        kernels = "".join(found["sources"].values())
        assert (".sum(dim=0)" in kernels) == (asked is MANY and not misshapes_reductions())
        assert len(found["sources"]) >= 6
        assert "tl.atomic_add" not in kernels
        assert kernels.count("'deterministic': True") == kernels.count("'deterministic':") > 0
        assert "embedding_gradient" in kernels
        assert found["compiled peak"] <= found["planned peak"]
        # All that the wrappers allocate can be given a place in an arena.
        assert all(in_source == recorded for in_source, recorded in found["num blocks"].values()), found["num blocks"]
        assert found["num takes"] > len(found["num blocks"])
        assert found["arena"]["least_bytes"] <= found["arena"]["pool_bytes"] <= 1.1 * found["arena"]["least_bytes"]
        assert any(
            "attention" in name or "embedding" in name or "backward" in name for name in found["arena"]["outside"]
        )


@pytest.mark.days(3)
def test_a_graph_that_is_captured_for_an_absent_gpu_is_the_one_that_it_captures(graphs: Any) -> None:
    for on_gpu, for_gpu in graphs["absent"]:
        assert on_gpu == for_gpu
        assert "device=cuda" in on_gpu[0]
