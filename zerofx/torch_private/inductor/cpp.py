"""Inductor's C++ compiler: its settings, its cache, and its checks before it builds anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._dynamo.device_interface import get_interface_for_device as get_interface_for_device
from torch._inductor import codecache
from torch._inductor import config as config
from torch._inductor.async_compile import AsyncCompile as AsyncCompile
from torch._inductor.codecache import CacheBase as CacheBase
from torch._inductor.codecache import CppPythonBindingsCodeCache as CppPythonBindingsCodeCache
from torch._inductor.codecache import torch_key as torch_key
from torch._inductor.cpp_builder import CppBuilder as CppBuilder
from torch._inductor.cpp_builder import CppTorchDeviceOptions as CppTorchDeviceOptions
from torch._inductor.cpp_builder import CppTorchOptions as CppTorchOptions
from torch._inductor.cpp_builder import get_compiler_version_info as get_compiler_version_info
from torch._inductor.cpp_builder import get_cpp_compiler as get_cpp_compiler
from torch._inductor.cpp_builder import is_gcc as is_gcc
from torch._inductor.cpu_vec_isa import VecISA as VecISA
from torch._inductor.cpu_vec_isa import pick_vec_isa as pick_vec_isa
from torch._inductor.cpu_vec_isa import supported_vec_isa_list as supported_vec_isa_list
from torch._inductor.cpu_vec_isa import valid_vec_isa_list as valid_vec_isa_list
from torch._inductor.cpu_vec_isa import x86_isa_checker as x86_isa_checker
from torch._inductor.runtime.cache_dir_utils import cache_dir as cache_dir
from torch._inductor.runtime.cache_dir_utils import default_cache_dir as default_cache_dir

precompile_header = codecache._precompile_header
"""Builds a header once for all kernels, and gives its path; the first kernel does it where nobody has before."""


def library_flags() -> tuple[str, ...]:
    """Flags for several kernels in one text, besides Inductor's, which turns GCC's vectors for loops off already.

    With those for straight code, GCC 12 compiles torch's ``transpose_mxn`` of bfloat16 wrongly where several kernels of
    a text call it: parts of the result are never written.
    """
    return ("-fno-tree-slp-vectorize",) if is_gcc() else ()


def header_to_precompile() -> str | None:
    """The header that generated code for CPUs begins with; None if there is none."""
    header: str | None = CppPythonBindingsCodeCache._get_uncompiled_header("cpu")
    return header


def bindings(argument_types: Sequence[str], name: str) -> str:
    """C++ by which Python calls ``kernel``, as the function ``name`` of a module of that name."""
    maker = CppPythonBindingsCodeCache
    parsed = (f"parse_arg<{each.replace('const ', '')}>(args, {n})" for n, each in enumerate(argument_types))
    return maker.suffix_template.format(
        arg_len=len(argument_types), call_entry_func=maker.call_entry_function.format(", ".join(parsed)),
        entry_func=name, extra_parse_arg=maker.extra_parse_arg,
    )  # fmt: skip


def begin_library(source: str, names: Sequence[str]) -> Callable[[], list[Callable[..., None]]]:
    """Begin to build a text with ``bindings`` of these names, ``kernel`` first; waits for it, and loads it."""
    load = CppPythonBindingsCodeCache.load_async(source, submit_fn=AsyncCompile.submit, extra_flags=library_flags())

    def functions() -> list[Callable[..., None]]:
        first: Any = load()
        loaders: list[Any] = [type("Loader", (CppPythonBindingsCodeCache,), {"entry_function": name}) for name in names]
        modules = (loader._load_library(first.__file__, first.key) for loader in loaders)
        return [getattr(module, name) for module, name in zip(modules, names, strict=True)]

    return functions
