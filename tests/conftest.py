"""What all tests share: golden texts, one thread, a fixed seed, a drive, parts of sweeps, skipped GPU tests."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import functools
import itertools
import math
import os
import random
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.lib.captures import SWITCH, own_captures, shared_captures
from tests.lib.resident import lock_libraries

GOLDEN = Path(__file__).parent / "golden"
# Which part of each sweep is run, and which of the costly tests: a number that changes from day to day, or is given.
PART = "ZEROFX_TESTS_PART"
OLDER_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected texts under tests/golden")


def pytest_configure(config: pytest.Config) -> None:
    # What an earlier run has left is no part of a test, nor of the processes that it starts.
    os.environ["ZEROFX_CACHE_DIR"] = "0"
    os.environ.setdefault(PART, str(datetime.datetime.now(datetime.UTC).date().toordinal()))
    # Nor are generated steps to be left in the folder of whoever runs tests. Triton builds in the home folder
    # otherwise, which may be one that cannot be written to. All workers of a run have the folders that the first
    # process has made, and removes.
    for variable in ("ZEROFX_DUMP_DIR", "TRITON_CACHE_DIR", SWITCH):
        if variable not in os.environ:
            folder = os.environ[variable] = tempfile.mkdtemp(prefix="zerofx-tests-")
            config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    # Of a run by several processes, in the one that outlives them.
    if getattr(config.option, "numprocesses", None):
        lock_libraries()


# First, so that `-m golden` sees the marker.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sweeps: dict[tuple[str, int], list[pytest.Function]] = {}
    for item in items:
        if (sweep := item.get_closest_marker("sweep")) and not item.get_closest_marker("slow"):
            assert isinstance(item, pytest.Function) and hasattr(item, "callspec"), f"{item.nodeid} has no cases"
            sweeps.setdefault((item.nodeid.partition("[")[0], *sweep.args), []).append(item)
        if "golden" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.golden)
        if item.path.parent.name == "capture":
            item.add_marker(pytest.mark.captures)
        if item.get_closest_marker("gpu"):
            # What torch warns of depends on the kind of GPU: of float32 products without TensorFloat32, say.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    for (name, num), cases in sweeps.items():
        values = [{argument: id(value) for argument, value in case.callspec.params.items()} for case in cases]
        # Tests of one file that have the same arguments, perhaps those of a costly fixture, run with the same values.
        seed = f"{name.partition('::')[0]} {sorted(values[0])}"
        part = part_of_sweep(seed, values, num, int(os.environ[PART]))
        for index in set(range(len(cases))) - set(part):
            cases[index].add_marker(pytest.mark.slow)
    for item in items:
        days = item.get_closest_marker("days")
        if days is not None and not is_day_of(item.nodeid, int(days.args[0]), int(os.environ[PART])):
            item.add_marker(pytest.mark.slow)


def is_day_of(test: str, num_days: int, part: int) -> bool:
    """True once in so many parts, for each test."""
    return (zlib.crc32(test.encode()) + part) % num_days == 0


def part_of_sweep(seed: str, cases: Sequence[Mapping[str, int]], num: int, part: int) -> list[int]:
    """The places of ``num`` cases, each the values of its arguments, by what identifies them.

    One after the other, the next of those that have most values and pairs of values which no case before has. Which one
    is the first goes through all cases from part to part.
    """
    order = random.Random(seed).sample(range(len(cases)), len(cases))
    step = next(step for step in itertools.count(num) if math.gcd(step, len(cases)) == 1)
    start = part * step % len(cases)
    left = order[start:] + order[:start]
    chosen: list[int] = []
    covered: set[object] = set()
    while left and len(chosen) < num:
        values = {index: cases[index].items() for index in left}
        of_case = {index: {*values[index], *itertools.combinations(sorted(values[index]), 2)} for index in left}
        best = max(left, key=lambda index: len(of_case[index] - covered))
        chosen.append(best)
        covered |= of_case[best]
        left.remove(best)
    return chosen


# Around the whole of a test, with the fixtures of its module.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    # Several test processes share the cores, and results must not depend on how many there are. Each test is told so,
    # since libraries that an earlier one has called (Lightning) set it for the whole process.
    torch.set_num_threads(1)
    with own_captures() if item.get_closest_marker("captures") else shared_captures():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with _skipped_where_torch_lacks_it():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with _skipped_where_torch_lacks_it():
        return (yield)


@contextlib.contextmanager
def _skipped_where_torch_lacks_it() -> Iterator[None]:
    """What fails inside since an older torch has no rules for a mesh's axis `model` is skipped, for that reason."""
    try:
        yield
    except Exception as error:
        if OLDER_TORCH and "for a mesh with a model axis" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the nvme tier."""
    monkeypatch.setenv("ZEROFX_NVME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass is followed by all checks of the graph."""
    monkeypatch.setenv("ZEROFX_VERIFY", "2")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`golden(text, part="")` compares with tests/golden/<test file>/<test name>[.<part>].txt.

    With --update-golden it rewrites that file instead. A test that compares more than one text names the parts.
    """
    seen: set[Path] = set()

    def compare(text: str, part: str = "") -> None:
        name = re.sub(r"[^\w.-]+", "-", request.node.name).strip("-")
        path = GOLDEN / request.path.stem / f"{name}{'.' if part else ''}{part}.txt"
        assert path not in seen, f"{path.name} is compared twice: name the parts"
        seen.add(path)
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"{path} does not exist: make it with --update-golden", pytrace=False)
        expected = path.read_text(encoding="utf-8")
        if OLDER_TORCH:
            expected, text = _renumbered(expected), _renumbered(text)
        if text != expected:
            diff = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), "expected " + path.name, "found", lineterm=""
            )
            pytest.fail("\n".join([*diff, f"if this is meant: --update-golden rewrites {path}"]), pytrace=False)

    return compare


def _renumbered(text: str) -> str:
    """``text`` with the numbers at the ends of names in the order in which they come: fx of torch 2.11 and 2.12 counts
    names that have gone."""
    numbers: dict[str, dict[str, int]] = {}

    def replaced(match: re.Match[str]) -> str:
        known = numbers.setdefault(match[1], {})
        return f"{match[1]}_{known.setdefault(match[2], len(known))}"

    return re.sub(r"\b(\w*[A-Za-z_])_(\d+)\b", replaced, text)
