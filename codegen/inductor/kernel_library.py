"""Inductor's C++ kernels of one region, built together as one library.

Inductor has the compiler called for each kernel. What that does for any kernel (it reads headers, writes out what they
ask for, links) takes ten times as long as the kernel itself, so that all kernels of a file are one text here, each in a
namespace of its own and under a name of its own::

    #include <torch/csrc/inductor/cpp_prefix.h>         #include <torch/csrc/inductor/cpp_prefix.h>
    extern "C" void kernel(float* out) { ... }          namespace zerofx_kernel {
                                                        extern "C" void kernel(float* out) { ... } }
    #include <torch/csrc/inductor/cpp_prefix.h>    =>   #define kernel kernel1
    extern "C" void kernel(const float* in) { ... }     namespace zerofx_kernel1 {
                                                        extern "C" void kernel(const float* in) { ... } }

It is built while the next region is lowered. Kernels that steps of several lengths share are built one by one
(``shared_kernels.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from zerofx.codegen.inductor.cpp import retry_damaged_libraries
from zerofx.torch_private.inductor.cpp import begin_library, bindings

Kernel = Callable[..., None]


class KernelLibrary:
    """The kernels of a file, each by argument types and text."""

    def __init__(self) -> None:
        self._kernels: list[tuple[Sequence[str], str]] = []
        self._scope: MutableMapping[str, Any] = {}
        self._functions: Callable[[], Sequence[Kernel]] | None = None

    def add(self, types: Sequence[str], source: str) -> LateKernel:
        """One more kernel, which can be called once the library is begun."""
        self._kernels.append((types, source))
        return LateKernel(self, len(self._kernels) - 1)

    def begin(self, scope: MutableMapping[str, Any]) -> None:
        """Begin to build them; ``scope`` has the names by which the file calls them."""
        self._scope = scope
        if self._kernels:
            names = [f"kernel{number or ''}" for number in range(len(self._kernels))]
            self._functions = begin_library(library_text(self._kernels, names), names)

    def finish(self) -> None:
        """Have the file call what is built.

        Raises:
            Exception: the compiler's, or the loader's.
        """
        for name, value in list(self._scope.items()):
            if isinstance(value, LateKernel):
                self._scope[name] = self.function(value.index)

    def function(self, index: int) -> Kernel:
        """The kernel that was added as number ``index``, built."""
        assert self._functions is not None, "the file has been loaded"
        return retry_damaged_libraries(self._functions)[index]


class LateKernel:
    """A kernel of a library that is being built."""

    def __init__(self, library: KernelLibrary, index: int) -> None:
        self._library, self.index = library, index

    def __call__(self, *args: Any) -> None:
        self._library.function(self.index)(*args)


def library_text(kernels: Sequence[tuple[Sequence[str], str]], names: Sequence[str]) -> str:
    """One text of kernels, with what Python calls each by."""
    headers: dict[str, None] = {}
    parts = []
    for (types, source), name in zip(kernels, names, strict=True):
        lines = f"{source}\n{bindings(types, name)}".splitlines()
        lifted = [line for line in lines if line.startswith(_FOR_HEADERS)]
        headers |= dict.fromkeys(lifted)
        rest = [line for line in lines if not line.startswith(_FOR_HEADERS)]
        parts += [f"#define kernel {name}", f"namespace zerofx_{name} {{", *rest, "}", "#undef kernel"]
    return "\n".join((*headers, *parts, ""))


# Headers are read once, outside of namespaces, after what tells Python's how sizes are given.
_FOR_HEADERS = ("#include ", "#define PY_SSIZE_T_CLEAN")


class Loading:
    """The libraries of the files that are loaded."""

    def __init__(self) -> None:
        self._begun: list[KernelLibrary] = []

    def begin(self, library: KernelLibrary, scope: MutableMapping[str, Any]) -> None:
        """Begin to build a library."""
        library.begin(scope)
        self._begun.append(library)

    @contextlib.contextmanager
    def libraries(self) -> Iterator[list[KernelLibrary]]:
        """While open, libraries that are begun are put into what is given."""
        before, self._begun = self._begun, []
        try:
            yield self._begun
        finally:
            self._begun = before


@functools.cache
def loading() -> Loading:
    """That of this process."""
    return Loading()
