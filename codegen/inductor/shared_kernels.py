"""Inductor's C++ kernels, built once for what differs in whole numbers alone: steps for batches of several lengths.

Inductor writes the sizes of a batch into the text of a kernel, as bounds of loops and as strides. The kernels of two
lengths are one text with other numbers, which is built once with the numbers that vary as arguments::

    void kernel(float* out) { for (x0 = 0L; x0 < 917504L; ...     |   void kernel(const int64_t n0, float* out)
    void kernel(float* out) { for (x0 = 0L; x0 < 786432L; ...     |   { for (x0 = 0L; x0 < n0; ...

What is computed, in which order and rounded where, is in the rest of the text: results have the same bits. Which
numbers vary is known once two kernels are alike. Until then nothing is built, unless it is asked for; a later start is
told on disk.

Does not handle: numbers that something is divided by, since compilers make a multiplication of division by a constant:
kernels that differ in those are built apart. Kernels for GPUs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from zerofx.codegen.inductor.cpp import retry_damaged_libraries
from zerofx.codegen.inductor.kernel_library import KernelLibrary, loading
from zerofx.disk.cache import DiskCache, key_of
from zerofx.settings import read_settings
from zerofx.torch_private.inductor.cpp import AsyncCompile

Kernel = Callable[..., None]
Numbers = tuple[str, ...]
Groups = tuple[tuple[int, ...], ...]
"""Positions of numbers in a text that vary; those of one group are one number in every kernel."""

# A 64-bit whole number of C++ that nothing is divided by.
_DIVISOR = r"static_cast<int64_t>\("
_NUMBER = re.compile(rf"(?<!% {_DIVISOR})(?<!/ {_DIVISOR})(?<!\), {_DIVISOR})\b(\d+)L\b")


class SharedKernel:
    """A kernel of a region, which is built when it is called first, or by ``SharedKernels.finish``."""

    def __init__(self, alike: Alike, numbers: Numbers) -> None:
        self._alike, self._numbers = alike, numbers
        self._function: Kernel | None = None

    def __call__(self, *args: Any) -> None:
        self.function(*args)

    def begin(self) -> None:
        """Begin to build it."""
        self._alike.begin()

    @property
    def function(self) -> Kernel:
        """The function that runs it."""
        if self._function is None:
            self._function = self._alike.function(self._numbers)
        return self._function


class Alike:
    """Kernels that differ in whole numbers alone: ``texts`` stand around those, ``types`` are their arguments'."""

    def __init__(self, types: Sequence[str], texts: Sequence[str], cache: DiskCache) -> None:
        self._types, self._texts, self._cache = types, texts, cache
        self._known: dict[Numbers, None] = {}
        self._key = key_of("kernel", [*types, *texts])
        self._groups: Groups = cache.read_as(self._key, self._read) or ()
        self._built: dict[tuple[Groups, Numbers], Any] = {}

    def add(self, numbers: Numbers) -> SharedKernel:
        """One more of them. Where that shows which numbers vary, what takes those is begun to be built."""
        self._known[numbers] = None
        columns = list(zip(*self._known, strict=True))
        group_of = {position: index for index, group in enumerate(self._groups) for position in group}
        groups: dict[Any, list[int]] = {}
        for position, column in enumerate(columns):
            if position in group_of or len(set(column)) > 1:
                groups.setdefault((group_of.get(position), column), []).append(position)
        varying = tuple(map(tuple, groups.values()))
        if varying != self._groups:
            self._groups = varying
            self._cache.write(self._key, json.dumps(varying))
            self.begin()
        return SharedKernel(self, numbers)

    def begin(self) -> None:
        """Begin to build what all that are known can run on."""
        self._library(next(iter(self._known)))

    def function(self, numbers: Numbers) -> Kernel:
        """The kernel with ``numbers``, once it is built."""
        library = self._library(numbers)
        kernel: Kernel = retry_damaged_libraries(library.result) if hasattr(library, "result") else library
        return functools.partial(kernel, *(int(numbers[group[0]]) for group in self._groups))

    def _library(self, numbers: Numbers) -> Any:
        varying = {position: f"n{index}" for index, group in enumerate(self._groups) for position in group}
        written = tuple(varying.get(position) or f"{number}L" for position, number in enumerate(numbers))
        if (self._groups, written) not in self._built:
            source = "".join(part for pair in zip(self._texts, (*written, ""), strict=True) for part in pair)
            added = [f"n{index}" for index in range(len(self._groups))]
            declared = "".join(f"const int64_t {name}, " for name in added)
            source = source.replace("kernel(", f"kernel({declared}", 1)
            types = [*("const int64_t" for _ in added), *self._types]
            self._built[self._groups, written] = AsyncCompile().cpp_pybinding(types, source)
        return self._built[self._groups, written]

    def _read(self, text: str) -> Groups:
        groups = tuple(tuple(map(int, group)) for group in json.loads(text))
        positions = [position for group in groups for position in group]
        if len(set(positions)) != len(positions) or not set(positions) <= set(range(len(self._texts) - 1)):
            raise ValueError(f"expected positions of {len(self._texts) - 1} numbers, found {text}")
        return groups


class SharedKernels:
    """Those of this process. ``is_open``: whether kernels that are loaded now are shared."""

    def __init__(self, cache: DiskCache) -> None:
        self._cache = cache
        self._alike: dict[tuple[str, ...], Alike] = {}
        self._waiting: list[tuple[MutableMapping[str, Any], str, SharedKernel]] = []
        self.is_open = False

    @contextlib.contextmanager
    def share_loaded(self) -> Iterator[None]:
        """While open, kernels that are loaded are shared, and not built until they have to be."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def kernel(self, types: Sequence[str], source: str) -> SharedKernel:
        """The kernel of a text."""
        texts = _NUMBER.split(source)
        numbers = tuple(texts[1::2])
        key = (*types, *texts[::2])
        if key not in self._alike:
            self._alike[key] = Alike(types, texts[::2], self._cache)
        return self._alike[key].add(numbers)

    def wait_for(self, scope: MutableMapping[str, Any]) -> None:
        """Have ``finish`` put what runs the kernels among a file's names into their places."""
        self._waiting += [(scope, name, value) for name, value in scope.items() if isinstance(value, SharedKernel)]

    def finish(self) -> None:
        """Build all that waits."""
        for _, _, kernel in self._waiting:
            kernel.begin()
        while self._waiting:
            scope, name, kernel = self._waiting[-1]
            scope[name] = kernel.function
            self._waiting.pop()


@functools.cache
def shared_kernels() -> SharedKernels:
    """Those of this process."""
    return SharedKernels(DiskCache(read_settings().cache_dir))


class FileKernels(AsyncCompile):
    """Makes the kernels of a file of Inductor's; files that Inductor keeps have its name."""

    def __init__(self) -> None:
        super().__init__()
        self._library = KernelLibrary()

    def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
        kernels = shared_kernels()
        return kernels.kernel(argtypes, source_code) if kernels.is_open else self._library.add(argtypes, source_code)

    def wait(self, scope: dict[str, Any]) -> None:
        super().wait(scope)
        shared_kernels().wait_for(scope)
        loading().begin(self._library, scope)
