"""Inductor's C++ compiler: what Inductor does once in a process before it builds code, and what is built with it."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from zerofx.codegen.inductor.background import Background
from zerofx.disk.cache import DiskCache, key_of
from zerofx.disk.own_files import UnsafeError, notify_once, own_folder, private_folder, unsafe_reason
from zerofx.errors import CompilerError
from zerofx.settings import read_settings, user_cache
from zerofx.torch_private.inductor.cpp import (
    CacheBase,
    CppBuilder,
    CppPythonBindingsCodeCache,
    CppTorchDeviceOptions,
    CppTorchOptions,
    VecISA,
    cache_dir,
    default_cache_dir,
    get_compiler_version_info,
    get_cpp_compiler,
    get_interface_for_device,
    header_to_precompile,
    is_gcc,
    library_flags,
    pick_vec_isa,
    precompile_header,
    supported_vec_isa_list,
    torch_key,
    valid_vec_isa_list,
    x86_isa_checker,
)
from zerofx.torch_private.inductor.cpp import config as inductor_config

Built = TypeVar("Built")


def inductor_cache_folder() -> Path:
    """The folder of Inductor's cache, as the environment sets it."""
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())


def _use_own_cache() -> None:
    """Have Inductor keep what it builds, and load from it, in a folder that nobody else can write to.

    Its own folder, where it is one; made for the user alone where there is none yet.
    """
    try:
        with own_folder(inductor_cache_folder(), make=True):
            return
    except UnsafeError as error:
        base = user_cache()
        own = base / "inductor" if base is not None and not unsafe_reason(base / "inductor") else private_folder()
        notify_once(
            f"Inductor runs the code that it finds in its cache, and {error}: it is given {own} instead. Set "
            f"TORCHINDUCTOR_CACHE_DIR to a folder that only you can write to"
        )
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own)
    except OSError:
        return  # which Inductor reports where it has to write


def check_compiler(device: torch.device) -> None:
    """Check that Inductor can build code for ``device``, and that nobody else's is in its cache.

    Raises:
        CompilerError: says what to install, or which backend needs nothing.
    """
    _use_own_cache()
    if device.type == "cpu":
        try:
            compiler = get_cpp_compiler()
            is_there = shutil.which(compiler) is not None
        except RuntimeError:  # torch's InvalidCxxCompiler
            is_there = False
        if not is_there:
            raise CompilerError(
                "backend='inductor' expects a C++ compiler, found none (looked for $CXX, g++ and clang++): install one "
                "(Debian and Ubuntu: apt-get install g++), or use backend='eager'"
            )
        _check_folders()
    else:
        get_interface_for_device(device.type)


def _check_folders() -> None:
    """Inductor's command lines do not quote the folder of torch's libraries, nor that of its cache."""
    libraries = Path(torch.__file__).parent / "lib"
    for folder, remedy in (
        (libraries, "install torch (the virtual environment) elsewhere"),
        (inductor_cache_folder(), "set TORCHINDUCTOR_CACHE_DIR to another"),
    ):
        if len(str(folder).split()) > 1:
            raise CompilerError(
                f"backend='inductor' expects folders without a space in their path, as torch hands them to the C++ "
                f"compiler unquoted; found {folder}: {remedy}, or use backend='eager'"
            )


def build_cpp(argument_types: Sequence[str], source: str) -> Callable[..., None]:
    """Build ``kernel`` of a C++ text, with the flags and in the cache of generated code; returns a function to call it.

    Args:
        argument_types: as in C++. Pointers are called with tensors: null is an empty one.
        source: the text.
    """
    loaded: Callable[..., None] = retry_damaged_libraries(
        lambda: CppPythonBindingsCodeCache.load_pybinding(list(argument_types), source)
    )
    return loaded


def retry_damaged_libraries(build: Callable[[], Built]) -> Built:
    """``build()``, which is called again for each library of Inductor's cache that it could not load and is deleted.

    Inductor has the linker write where it loads from, so that a process which is killed leaves half a library there.
    """
    deleted: set[Path] = set()
    while True:
        try:
            return build()
        except Exception as error:
            library = _find_damaged_library(error)
            if library is None or library in deleted:
                raise
            deleted.add(library)
            library.unlink(missing_ok=True)


def _find_damaged_library(error: BaseException) -> Path | None:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ImportError) and cause.path is not None:
            path = Path(cause.path)
            return path if path.is_relative_to(cache_dir()) and path.is_file() else None
        cause = cause.__cause__ or cause.__context__
    return None


class Preparation:
    """Inductor's one-time work in a process before it builds or loads code for a device type, done in the background.

    It reads all of torch's and Triton's files for the keys of its cache, asks which vector instructions there are, in
    processes that it waits for, and precompiles its headers: a model is captured meanwhile. What fails here fails
    again, and is reported, where the first region is built.

    No region may be lowered before ``wait`` has returned: Inductor's question about vector instructions is not to be
    asked twice at a time, or the answer, and with it the compiler's flags, depends on timing. The headers are not
    waited for: who needs them waits for the lock on their file.
    """

    def __init__(self, device_type: str) -> None:
        self._keys = Background("zerofx-inductor-keys", [torch_key, CacheBase.get_system])
        self._headers = Background("zerofx-inductor-headers")
        self._vectors = Background("zerofx-inductor-vectors")
        if device_type == "cpu":
            self._vectors.append(self._begin_vectors)

    def begin(self) -> None:
        """Begin, or go on where it was stopped."""
        for entry in (self._vectors, self._headers, self._keys):
            entry.resume()

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Begin, and where the block fails begin nothing further; what the compiler is at is not interrupted."""
        self.begin()
        try:
            yield
        except BaseException:
            for entry in (self._vectors, self._headers, self._keys):
                entry.stop()
            raise

    def wait(self) -> None:
        """Wait until a region can be lowered."""
        self.begin()
        for entry in (self._vectors, self._keys):
            entry.wait()

    def _begin_vectors(self) -> None:
        VectorInstructions(DiskCache(read_settings().cache_dir), self._vectors, self._headers).begin()


@functools.cache
def preparation(device_type: str) -> Preparation:
    """The one of this process."""
    return Preparation(device_type)


class VectorInstructions:
    """Lets Inductor find the vector instructions that compiler and processor have, and precompile headers for them.

    For each kind Inductor builds and loads a program that uses torch's vectors, and programs that use what is
    particular to the kind. Where the former has been seen to work, or the same program has (kinds differ by flags that
    may change nothing besides ``-march=native``), Inductor is told so. What it finds, and
    in what order, is the same.

    Args:
        cache: where it is kept that the programs of all kinds of the processor work with this compiler and torch.
        background: what the steps are appended to.
        headers: what precompiling is appended to, as soon as it is known which kind code is generated for.
    """

    def __init__(self, cache: DiskCache, background: Background, headers: Background) -> None:
        self._cache, self._background, self._headers = cache, background, headers
        processor = x86_isa_checker()
        # Whoever has set vec_isa_ok has answered for all.
        asked = inductor_config.cpp.vec_isa_ok is None
        kinds = [kind for kind in supported_vec_isa_list if all(flag in processor for flag in str(kind).split())]
        self._kinds = kinds if asked else []
        compiler = get_cpp_compiler()
        settings = [
            (name, entry) for name, entry in inductor_config.save_config_portable().items() if name.startswith("cpp")
        ]
        parts = [compiler, get_compiler_version_info(compiler), *map(str, kinds), repr(sorted(settings))]
        self._key = key_of("vectors", parts)
        self._all_work = bool(self._kinds) and cache.read(self._key) is not None
        self._programs: set[str] = set()
        self._is_known_what_is_picked = False

    def begin(self) -> None:
        """Append a step for each kind, and one for what follows from all."""
        for kind in self._kinds:
            self._background.append(functools.partial(self._ask, kind))
        self._background.append(self._conclude)

    def _ask(self, kind: VecISA) -> None:
        # Where all are known to work, no compiler has to be asked about any.
        program = "" if self._all_work else _program(kind)
        with self._patch_vector_check(self._all_work or program in self._programs):
            works = bool(kind)
        if not works:
            return
        self._programs.add(program)
        # Of those that work the first is picked, unless the user has said which.
        if inductor_config.cpp.simdlen is None and "ATEN_CPU_CAPABILITY" not in os.environ:
            self._precompile(kind)

    def _conclude(self) -> None:
        with self._patch_vector_check(self._all_work):
            working = valid_vec_isa_list()
        if self._kinds and working == self._kinds and not self._all_work:
            self._cache.write(self._key, str([*map(str, working)]))
        self._precompile(pick_vec_isa())

    def _patch_vector_check(self, works: bool) -> Any:
        """Tell Inductor, on this thread alone, that programs which use torch's vectors work, if they do."""
        return inductor_config.patch({"cpp.vec_isa_ok": True} if works else {})

    def _precompile(self, kind: VecISA) -> None:
        if not self._is_known_what_is_picked:
            self._is_known_what_is_picked = True
            self._headers.append(functools.partial(_precompile_headers, kind, self._cache))


_PRECOMPILED = (".gch", ".pch")  # what gcc and clang append to the name of a header


def _program(kind: VecISA) -> str:
    """The text on which, for all kinds, the program that tries torch's vectors depends: Inductor's command line, with
    the flags for this machine as the compiler expands them."""
    options = CppTorchOptions(vec_isa=kind, warning_all=False)
    words = shlex.split(CppBuilder("program", ["program.cpp"], options).get_command_line())
    if not is_gcc():
        return shlex.join(words)
    machine = [word for word in words if word.startswith("-m")]
    asked = [get_cpp_compiler(), *machine, "-Q", "--help=target"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return shlex.join(word for word in words if word not in machine) + answer


def _precompile_headers(kind: VecISA, cache: DiskCache) -> None:
    """Precompile the headers of generated code with vectors of ``kind``, as Inductor does ahead of the first kernel.

    Inductor runs the preprocessor to see whether that has been done. Where ``cache`` has the path of what was made, and
    it is still there, that is left to the first kernel that is built: a second start of a program builds none.
    """
    header = header_to_precompile()
    if header is None or not inductor_config.cpp_cache_precompile_headers:
        return
    command: dict[str, Any] = {
        **CppPythonBindingsCodeCache.cpp_compile_command_flags,
        "device_type": "cpu",
        "extra_flags": library_flags(),
        "use_relative_path": False,
        "vec_isa": kind,
    }
    options = CppTorchDeviceOptions(compile_only=False, min_optimize=False, **command)
    line = CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
    key = key_of("headers", [header, line, get_compiler_version_info(get_cpp_compiler())])
    precompiled = cache.read(key)
    if precompiled is None or not any(Path(precompiled + suffix).is_file() for suffix in _PRECOMPILED):
        cache.write(key, precompile_header(header, line, min_optimize=False, **command))
