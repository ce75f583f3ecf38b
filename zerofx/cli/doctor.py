"""``zerofx doctor``: versions, compiler, devices and switches, as text for a bug report.

Each section is made by itself: what is broken is said in its place, and the others are there all the same.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_LIBRARIES = ("torch", "triton", "numpy", "safetensors", "transformers", "xxhash", "click")
_PREFIXES = ("ZEROFX_", "TORCHINDUCTOR_", "TRITON_", "NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_VISIBLE", "XDG_CACHE")
_RANKS = ("CXX", "CC", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TMPDIR")
_COMPILERS = ("g++", "clang++")
_PATIENCE_SECONDS = 10.0


def examine() -> Iterator[str]:
    """The lines of the text, each as soon as it is known."""
    sections: dict[str, Callable[[], Iterator[str]]] = {
        "versions": _versions, "compiler": _compiler, "devices": _devices, "switches": _switches,
        "folders": _folders, "left out": _unused_parts,
    }  # fmt: skip
    for title, lines in sections.items():
        yield f"{title}:"
        try:
            for line in lines():
                yield f"  {line}"
        except Exception as error:  # noqa: BLE001 - what is broken here is what is asked about
            yield f"  this could not be found out: {type(error).__name__}: {error}"


def _versions() -> Iterator[str]:
    import zerofx

    yield f"zerofx {zerofx.__version__} in {Path(zerofx.__file__).parent}"
    yield f"Python {sys.version.split()[0]}, {platform.platform()}"
    for name in _LIBRARIES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name}: not installed"
    import torch

    yield f"torch's commit {torch.version.git_version}, built for CUDA {torch.version.cuda}, HIP {torch.version.hip}"


def _compiler() -> Iterator[str]:
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else _COMPILERS:
        path = shutil.which(name)
        if path is None:
            yield f"{name}: not found"
            continue
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False
        )
        first = (answer.stdout or answer.stderr).partition("\n")[0]
        yield f"{path}: {first}" + (f" (ended with {answer.returncode})" if answer.returncode else "")
        return
    yield "without a C++ compiler only backend='eager' runs on a CPU"


def _devices() -> Iterator[str]:
    import torch

    from zerofx.scheduler.cost.probe import processor_name, read_kept_machine
    from zerofx.units import format_bytes

    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    capability = torch.backends.cpu.get_cpu_capability()
    yield f"CPU: {processor_name()}, {capability}, {num_cores} core(s) of {os.cpu_count()} for this process"
    yield f"{torch.get_num_threads()} thread(s), {format_bytes(memory)} of memory"
    if not torch.cuda.is_available():
        yield "CUDA: no device" if torch.version.cuda else "CUDA: this torch is built without it"
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        size = format_bytes(about.total_memory)
        yield f"CUDA {index}: {about.name}, {size}, compute capability {about.major}.{about.minor}"
    measured = read_kept_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"), 1)
    yield f"steps of one process are planned for {'what Machine.measure() found' if measured else 'the built-in row'}"


def _folders() -> Iterator[str]:
    from zerofx.settings import read_settings, user_cache

    settings, user = read_settings(), user_cache()
    yield f"cache: {_describe(settings.cache_dir) if settings.cache_dir else 'none, nothing is kept for the next run'}"
    yield f"generated files: {_describe(settings.dump_dir or (user / 'dumps' if user else None))}"
    for folder in settings.nvme_dirs:
        yield f"nvme: {_describe(folder, shared=True)}"
    if not settings.nvme_dirs:
        yield "nvme: none, ZEROFX_NVME_DIR is not set"
    from zerofx.codegen.inductor.cpp import inductor_cache_folder

    yield f"Inductor's cache: {_describe(inductor_cache_folder())}"


def _describe(folder: Path | None, *, shared: bool = False) -> str:
    from zerofx.disk.own_files import unsafe_reason
    from zerofx.units import format_bytes

    if folder is None:
        return "a temporary folder, since the user has no home"
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    space = f"{format_bytes(shutil.disk_usage(there).free)} free"
    if not folder.exists():
        return f"{folder}, not there yet, {space}"
    unsafe = unsafe_reason(folder, shared=shared)
    return f"{folder}, {space}" + (f", NOT USED: {unsafe}" if unsafe else "")


def _switches() -> Iterator[str]:
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES) or name in _RANKS)
    for name in names:
        yield f"{name}={os.environ[name]}"
    if not names:
        yield "none is set"


def _unused_parts() -> Iterator[str]:
    import torch

    from zerofx.codegen.cpu.extras import CPU_KERNELS
    from zerofx.codegen.kernels.table import KERNELS, kernels_in_use
    from zerofx.pipeline import check_disabled
    from zerofx.settings import read_settings
    from zerofx.torch_private import versions

    settings = read_settings()
    check_disabled(settings)
    for line in versions.limitations():
        yield f"{line} (torch {torch.__version__})"
    for name in sorted(settings.disable):
        yield f"{name}: ZEROFX_DISABLE names it"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    used = kernels_in_use(settings.kernels, device)
    reasons = [("cuda", kernel.name, kernel.reason) for kernel in KERNELS]
    slower = "this processor's BLAS is faster, or oneDNN is not there"
    reasons += [("cpu", name, slower) for name in sorted(CPU_KERNELS)]
    for device_type, name, reason in reasons:
        if name in used:
            continue
        if device_type != device.type:
            reason = f"it is for {device_type}"
        elif settings.kernels is not None:
            reason = "ZEROFX_KERNELS does not name it"
        yield f"kernel {name}: {reason}"
    if device.type == "cpu":
        yield "CUDA graphs: there is no CUDA device"
