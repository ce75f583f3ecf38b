"""``python -m tests.compat`` runs tests and the demo with each torch and writes docs/compatibility.md.

Each version gets an environment of its own under ``build/compat``, which is deleted after it; ``--python
2.11=/path/to/python`` takes one that is there. What a version brings back is written when it is done with, and what
fails is a row: it goes on with the next. A version takes some 6 GB and half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.lib.checkout import ROOT

PAGE = ROOT / "docs" / "compatibility.md"
RESULTS = ROOT / "benchmarks" / "results" / "compatibility.json"
FOLDER = ROOT / "build" / "compat"
MINUTES = 30  # for one part
DEMO = "demo"

VERSIONS = {"2.11": "2.11.0", "2.12": "2.12.1", "2.13": "2.13.0", "2.14": "2.14.1", "2.15": "2.15.0"}
"""Versions of torch that zerofx is tested with, and which release of each."""

_EXACT = "tests/ranks/training/test_exact.py"
PARTS: Mapping[str, tuple[str, ...]] = {
    "graphs": ("tests/graph",),
    "planning": ("tests/plan",),
    "eager": (f"{_EXACT}::test_one_process_trains_like_eager_mode", "tests/train/capture", "tests/train/cost"),
    "ranks": (
        f"{_EXACT}::test_two_ranks_train_like_distributed_data_parallel",
        f"{_EXACT}::test_two_ranks_take_any_batch_and_find_the_loss_in_any_output",
        "tests/ranks/tiers/test_offload.py",
    ),
    "inductor": ("tests/compiled/codegen", "tests/compiled/training"),
    "kernels": ("tests/compiled/kernels",),
}
"""The quick tests by what they are of; ``ranks`` are two processes over gloo, ``kernels`` are zerofx's own."""

_HEAD = """\
# Versions of torch

zerofx runs with torch 2.11 to 2.15. What a version lacks takes away what depends on it, never correctness:
`zerofx doctor` says what, and the functions of `zerofx/torch_private/` say why. `make compat` runs the quick tests with
each version in an environment of its own and writes this page; a cell has the tests that passed, failed and were
skipped.
"""


@dataclass(frozen=True)
class Result:
    """What one part brought back: counts, the names of what failed, and the reasons of what was skipped."""

    passed: int = 0
    failed: tuple[str, ...] = ()
    skipped: Mapping[str, int] | None = None
    error: str = ""


@dataclass(frozen=True)
class Row:
    """One version: what runs it, what became of the demo, results by part, and what zerofx leaves out there."""

    python: str
    torch: str
    demo: str
    parts: Mapping[str, Result]
    left_out: tuple[str, ...]


def read_junit(path: Path) -> Result:
    """The counts in a file that pytest wrote with ``--junit-xml``."""
    passed, failed, skipped = 0, [], Counter[str]()
    for case in ElementTree.parse(path).iter("testcase"):
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if outcome is None:
            passed += 1
        elif outcome.tag == "skipped":
            skipped[outcome.get("message", "")] += 1
        else:
            failed.append(f"{case.get('classname', '')}::{case.get('name', '')}")
    return Result(passed, tuple(failed), dict(skipped))


def run_part(python: Path, paths: Sequence[str], report: Path) -> Result:
    """Run the quick tests of ``paths`` with an interpreter."""
    options = ["-q", "-n", "2", "--dist", "worksteal", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    try:
        ended = _run(python, "-m", "pytest", *options, f"--junit-xml={report}", *paths)
    except subprocess.TimeoutExpired:
        return Result(error=f"did not end within {MINUTES} minutes")
    if not report.exists():
        return Result(error=_last_line(ended.stdout + ended.stderr))
    return read_junit(report)


def run_demo(python: Path) -> str:
    """What became of a few steps of the demo on two ranks."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    try:
        ended = _run(python, *launch, "examples/train_gpt.py", "--steps", "4")
    except subprocess.TimeoutExpired:
        return f"did not end within {MINUTES} minutes"
    return "runs" if ended.returncode == 0 else f"fails: {_last_line(ended.stdout + ended.stderr)}"


def run_version(python: Path, parts: Sequence[str], before: Row | None) -> Row:
    """The demo and some parts with one version, and what it brought back ``before`` of the others."""
    facts = "import platform, torch; print(platform.python_version(), torch.__version__)"
    python_version, torch_version = _run(python, "-c", facts).stdout.split()
    lines = _run(
        python, "-c", "from zerofx.torch_private.versions import limitations; print(*limitations(), sep='\\n')"
    )
    demo = run_demo(python) if DEMO in parts else "not run"
    with tempfile.TemporaryDirectory() as folder:
        results = {part: run_part(python, PARTS[part], Path(folder, f"{part}.xml")) for part in parts if part != DEMO}
    if before is not None and before.torch == torch_version:
        demo = demo if DEMO in parts else before.demo
        results = {**before.parts, **results}
    return Row(python_version, torch_version, demo, results, tuple(filter(None, lines.stdout.splitlines())))


def make_environment(version: str) -> Path:
    """An environment with a release of torch and what tests need, in a folder that is made anew; its interpreter."""
    folder = FOLDER / version
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [name for name in project["dependencies"] if not name.startswith("torch")]
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", f"torch=={VERSIONS[version]}"]
    subprocess.run([*install, *needed, *extras["test"]], check=True)
    return python


def page(rows: Mapping[str, Row]) -> str:
    """The page in Markdown for the rows of some versions."""
    lines = [_HEAD, f"| torch | Python | demo | {' | '.join(PARTS)} |", f"|---|---|---|{'---|' * len(PARTS)}"]
    for row in rows.values():
        cells = [_cell(row.parts[part]) if part in row.parts else "not run" for part in PARTS]
        lines.append(f"| {row.torch} | {row.python} | {row.demo} | {' | '.join(cells)} |")
    lines += ["", "Parts:", ""]
    lines += [f"- {part}: {', '.join(f'`{path}`' for path in paths)}" for part, paths in PARTS.items()]
    for row in rows.values():
        lines += ["", f"## torch {row.torch}", "", *(f"- Left out: {line}." for line in row.left_out)]
        for part, result in row.parts.items():
            lines += [f"- {part}, failed: `{name}`" for name in result.failed]
            reasons = sorted((result.skipped or {}).items())
            lines += [f"- {part}, skipped: {count} x {' '.join(why.split())}" for why, count in reasons]
            lines += [f"- {part}: {result.error}"] if result.error else []
        if lines[-1] == "":
            lines.append("- Nothing is left out, and what ran has passed.")
    return "\n".join(lines) + "\n"


def _cell(result: Result) -> str:
    counts = f"{result.passed} / {len(result.failed)} / {sum((result.skipped or {}).values())}"
    return "did not run" if result.error else counts


def _run(python: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(python), *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60 * MINUTES
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "said nothing"


def read_rows() -> dict[str, Row]:
    """The rows that were written, by version."""
    if not RESULTS.exists():
        return {}
    rows = {}
    for version, fields in json.loads(RESULTS.read_text(encoding="utf-8")).items():
        parts = {part: Result(**{**of, "failed": tuple(of["failed"])}) for part, of in fields.pop("parts").items()}
        rows[version] = Row(**{**fields, "parts": parts, "left_out": tuple(fields["left_out"])})
    return rows


def write_rows(rows: Mapping[str, Row]) -> None:
    """Write the rows, and the page."""
    ordered = {version: rows[version] for version in VERSIONS if version in rows}
    RESULTS.write_text(json.dumps({version: asdict(row) for version, row in ordered.items()}, indent=1) + "\n")
    PAGE.write_text(page(ordered), encoding="utf-8")


def main() -> None:
    """Run the versions that are asked for, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=list(VERSIONS), help=f"of {', '.join(VERSIONS)} (default: all)")
    parser.add_argument("--python", action="append", default=[], metavar="VERSION=PATH", help="an environment to use")
    parser.add_argument("--parts", nargs="+", choices=[DEMO, *PARTS], default=[DEMO, *PARTS], help="default: all")
    args = parser.parse_args()
    interpreters = dict(entry.split("=", 1) for entry in args.python)
    for version in args.versions:
        try:
            python = Path(interpreters[version]) if version in interpreters else make_environment(version)
            row = run_version(python, args.parts, read_rows().get(version))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            print(f"torch {version} did not run: {error}", flush=True)
        else:
            write_rows({**read_rows(), version: row})
            print(
                f"torch {version}: {', '.join(f'{p} {_cell(result)}' for p, result in row.parts.items())}", flush=True
            )
        finally:
            shutil.rmtree(FOLDER / version, ignore_errors=True)


if __name__ == "__main__":
    main()
