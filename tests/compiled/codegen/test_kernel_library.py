"""C++ kernels of one region are built together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib import compiling
from tests.lib.fakes import fake_like
from zerofx.codegen.inductor.kernel_library import KernelLibrary
from zerofx.errors import CompilerError
from zerofx.torch_private.inductor.cpp import cache_dir

pytestmark = compiling.regions

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
HELPER = "static float changed(float x) {{ return {}; }}\n"
FILL = (
    'extern "C"  void  kernel(float* out, const int64_t num)\n{ for (int i = 0; i < num; i++) out[i] = changed(i); }\n'
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def num_built() -> int:
    return len(list(Path(cache_dir()).rglob("*.main.so")))


def test_kernels_with_helpers_of_one_name_are_one_library() -> None:
    library = KernelLibrary()
    types = ["float*", "const int64_t"]
    scope: dict[str, Any] = {
        name: library.add(types, HEADER + HELPER.format(value) + FILL)
        for name, value in {"twice": "2 * x", "next": "x + 1", "square": "x * x"}.items()
    }
    before = dict(scope)
    library.begin(scope)
    library.finish()
    x = torch.arange(4.0)
    for name, expected in {"twice": 2 * x, "next": x + 1, "square": x * x}.items():
        for function in (before[name], scope[name]):
            out = torch.full((5,), -1.0)
            function(out, 4)
            assert out.tolist() == [*expected.tolist(), -1.0], name
        assert scope[name] is not before[name]
    assert num_built() == 1


def test_the_kernels_of_a_region_are_one_library() -> None:
    from zerofx.codegen.inductor.compile import compile_region

    def chained(inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        (x,) = inputs
        inputs.clear()
        for _ in range(3):
            x = torch.mm(torch.sin(x), x)
        return (x,)

    compiled = compile_region(chained, [fake_like([4, 4], [4, 1], torch.float32, "cpu")], "chained")
    compiled.finish()
    assert num_built() == 1
    x = torch.randn(4, 4)
    (found,) = compiled.call([x])
    torch.testing.assert_close(found, chained([x])[0])


def test_a_kernel_that_cannot_be_built_is_reported_when_its_region_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerofx.codegen.inductor import compile as inductor
    from zerofx.codegen.inductor import kernel_library

    monkeypatch.setattr(kernel_library, "library_text", lambda *_: f'{HEADER}#error "as asked"\n')
    fake = fake_like([3, 7], [7, 1], torch.float32, "cpu")
    compiled = inductor.compile_region(lambda given: (torch.sin(given[0]) * 5,), [fake], "failing")
    with pytest.raises(CompilerError, match=r"region failing could not be compiled: (?s:.*)as asked"):
        compiled.finish()
