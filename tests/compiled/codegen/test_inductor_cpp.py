"""What Inductor does once in a process: each question is asked once, and answered as it would be without us."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib import compiling
from zerofx.codegen.inductor.background import Background
from zerofx.disk.cache import NOT_KEPT, DiskCache
from zerofx.disk.own_files import unsafe_reason
from zerofx.errors import CompilerError, ZeroFXWarning

pytestmark = compiling.regions

ASKED: list[tuple[str, bool | None]] = []
PRECOMPILED: list[str] = []


@dataclass
class Kind:
    """Vector instructions that work or not; ``program``: what is built to find out."""

    name: str
    program: str
    works: bool = True

    def __bool__(self) -> bool:
        from torch._inductor import config

        told = config.cpp.vec_isa_ok
        ASKED.append((self.name, told))
        return self.works

    def __str__(self) -> str:
        return self.name


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Finds those of some kinds that work; returns them as Inductor alone, asked after, finds them."""
    from zerofx.codegen.inductor import cpp as inductor_cpp

    ASKED.clear()
    PRECOMPILED.clear()

    def find(kinds: list[Kind], cache: DiskCache = NOT_KEPT, picked: int = 0) -> None:
        listed = [kind for kind in kinds if kind.works]
        monkeypatch.setattr(inductor_cpp, "x86_isa_checker", lambda: [kind.name for kind in kinds])
        monkeypatch.setattr(inductor_cpp, "supported_vec_isa_list", kinds)
        monkeypatch.setattr(inductor_cpp, "valid_vec_isa_list", lambda: listed)
        monkeypatch.setattr(inductor_cpp, "pick_vec_isa", lambda: listed[picked] if listed else Kind("none", ""))
        monkeypatch.setattr(inductor_cpp, "_program", lambda kind: kind.program)
        monkeypatch.setattr(inductor_cpp, "_precompile_headers", lambda kind, _: PRECOMPILED.append(str(kind)))
        background, headers = Background("asking"), Background("headers")
        inductor_cpp.VectorInstructions(cache, background, headers).begin()
        assert background.wait() is None
        assert headers.wait() is None

    return find


def test_each_kind_is_asked_once_and_told_where_its_program_has_been_seen_to_work(found: Any) -> None:
    found([Kind("amx", "wide"), Kind("avx512", "wide"), Kind("avx2", "narrow")])
    assert ASKED == [("amx", None), ("avx512", True), ("avx2", None)]
    assert PRECOMPILED == ["amx"]


def test_nobody_is_told_by_a_kind_that_does_not_work(found: Any) -> None:
    found([Kind("amx", "wide", works=False), Kind("avx512", "wide"), Kind("avx2", "narrow")])
    assert ASKED == [("amx", None), ("avx512", None), ("avx2", None)]
    assert PRECOMPILED == ["avx512"]


def test_where_none_works_headers_are_precompiled_for_none(found: Any) -> None:
    found([Kind("avx2", "narrow", works=False)])
    assert PRECOMPILED == ["none"]


def test_the_users_choice_of_instructions_is_waited_for(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    found([Kind("avx512", "wide"), Kind("avx2", "narrow")], picked=1)
    assert [name for name, _ in ASKED] == ["avx512", "avx2"]
    assert PRECOMPILED == ["avx2"]


def test_kinds_that_have_all_been_seen_to_work_are_told_so_in_the_next_process(
    found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config

    from zerofx.codegen.inductor import cpp as inductor_cpp

    cache = DiskCache(tmp_path)
    broken = [Kind("avx512", "wide", works=False), Kind("avx2", "narrow")]
    for _ in range(2):  # one of them does not work: all are tried again
        found(broken, cache)
    kinds = [Kind("avx512", "wide"), Kind("avx2", "narrow")]
    for _ in range(2):
        found(kinds, cache)
    monkeypatch.setattr(inductor_cpp, "get_compiler_version_info", lambda _: "another")
    found(kinds, cache)
    assert [told for name, told in ASKED if name == "avx512"] == [None, None, None, True, None]
    assert config.cpp.vec_isa_ok is None


def test_no_compiler_is_asked_about_kinds_that_all_work(found: Any, tmp_path: Path) -> None:
    kinds = [Kind("avx512", "wide"), Kind("avx2", "narrow")]
    found(kinds, DiskCache(tmp_path))
    for kind in kinds:
        del kind.program  # which asking reads
    found(kinds, DiskCache(tmp_path))
    assert [told for _, told in ASKED] == [None, None, True, True]


def test_headers_that_are_there_are_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    from zerofx.codegen.inductor import cpp as inductor_cpp

    made, times = tmp_path / "header.h", []

    def precompile(*_: Any, **__: Any) -> str:
        times.append(1)
        Path(f"{made}.gch").touch()
        return str(made)

    monkeypatch.setattr(inductor_cpp, "precompile_header", precompile)
    kind, cache = pick_vec_isa(), DiskCache(tmp_path / "cache")
    for _ in range(2):
        inductor_cpp._precompile_headers(kind, cache)
    assert len(times) == 1
    Path(f"{made}.gch").unlink()
    inductor_cpp._precompile_headers(kind, cache)
    assert len(times) == 2
    inductor_cpp._precompile_headers(kind, NOT_KEPT)
    assert len(times) == 3


def test_flags_that_change_what_the_compiler_makes_are_told_apart() -> None:
    from torch._inductor.cpp_builder import is_gcc
    from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512

    from zerofx.codegen.inductor.cpp import _program

    class Same(VecAVX512):
        _arch_flags = f"{VecAVX512._arch_flags} -mfma"

    class Fewer(VecAVX512):
        _arch_flags = f"{VecAVX512._arch_flags} -mno-fma"

    assert (_program(VecAVX512()) == _program(Same())) is is_gcc()
    assert _program(VecAVX512()) != _program(Fewer())
    assert _program(VecAVX512()) != _program(VecAVX2())


@pytest.mark.slow
def test_headers_are_precompiled_as_the_first_kernel_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    from zerofx.codegen.inductor.cpp import _precompile_headers, build_cpp

    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path))
    monkeypatch.setattr(codecache, "_HEADER_LOCK_DIR", str(tmp_path / "locks"))
    codecache._precompile_header.cache_clear()
    _precompile_headers(pick_vec_isa(), NOT_KEPT)
    before = sorted(tmp_path.glob("*.gch"))
    out = torch.zeros(1)
    include = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
    build_cpp(["float*"], f'{include}extern "C" void kernel(float* out) {{ out[0] = 3; }} // {tmp_path}')(out)
    codecache._precompile_header.cache_clear()
    assert out.item() == 3
    assert sorted(tmp_path.glob("*.gch")) == before and len(before) == 1


def test_a_compilation_that_fails_begins_nothing_further(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerofx.codegen.inductor.cpp import Preparation

    preparation = Preparation("meta")
    done: list[int] = []
    begun, may_end = threading.Event(), threading.Event()

    def compile_something() -> None:
        begun.set()
        may_end.wait()

    preparation._vectors.append(compile_something)
    preparation._vectors.append(lambda: done.append(1))

    def fail() -> None:
        with preparation.run():
            assert begun.wait(60)
            raise ValueError("no capture")

    with pytest.raises(ValueError, match="no capture"):
        fail()
    may_end.set()
    assert preparation._vectors.wait() is None
    assert done == []
    preparation.wait()
    assert done == [1]


def _without_damaged_libraries(build: Any) -> Any:
    from zerofx.codegen.inductor.cpp import retry_damaged_libraries

    return retry_damaged_libraries(build)


def _load(library: Path) -> str:
    """What a library gives that is built where there is none."""
    if not library.exists():
        return "built"
    spec = spec_from_file_location("kernel", library)
    assert spec is not None
    module_from_spec(spec)
    return "loaded"


def test_a_library_that_a_killed_process_has_left_unfinished_is_deleted_and_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    libraries = [tmp_path / "one.so", tmp_path / "two.so"]
    for library in libraries:
        library.write_bytes(b"\x7fELF")
    assert _without_damaged_libraries(lambda: [*map(_load, libraries)]) == ["built", "built"]


def test_a_library_that_is_damaged_each_time_it_is_built_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    library = tmp_path / "kernel.so"

    def build() -> str:
        library.write_bytes(b"\x7fELF")
        return _load(library)

    with pytest.raises(ImportError, match=r"kernel\.so"):
        _without_damaged_libraries(build)


def test_a_library_outside_inductors_cache_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    library = tmp_path / "kernel.so"
    library.write_bytes(b"\x7fELF")
    with pytest.raises(ImportError, match=r"kernel\.so"):
        _without_damaged_libraries(lambda: _load(library))
    assert library.exists()


def test_a_cache_that_the_compiler_would_not_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerofx.codegen.inductor.cpp import check_compiler

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/a folder/cache")
    with pytest.raises(CompilerError, match="/a folder/cache: set TORCHINDUCTOR_CACHE_DIR"):
        check_compiler(torch.device("cpu"))


def test_a_cache_that_others_can_write_to_is_not_inductors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zerofx.codegen.inductor.cpp import check_compiler

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(theirs))
    with pytest.warns(ZeroFXWarning, match="Inductor runs the code that it finds in its cache, and others can write"):
        check_compiler(torch.device("cpu"))
    given = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert given != theirs and not given.is_relative_to(theirs) and not unsafe_reason(given)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    check_compiler(torch.device("cpu"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")
