"""Tables, plots and the README's rows of what ``make gpu`` has measured.

    python -m benchmarks.gpu.report build/gpu
    python -m benchmarks.gpu.report build/gpu --results elsewhere      # also of what was measured on a CPU

Writes ``gpu.md``, ``gpu.json`` and, with matplotlib, plots to ``benchmarks/results/``, where parts that are not in the
folder stay as they are. What was measured on a CPU, to try the code, goes to the folder that is given and not into the
README.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.gpu.__main__ import PARTS
from benchmarks.gpu.case import ROOT
from benchmarks.gpu.readme_rows import ROWS
from benchmarks.gpu.tables import TABLES, not_run

RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- make gpu-report writes this -->", "<!-- to here -->"


def read(folder: Path) -> dict[str, Any]:
    """The parts that have run, in order, without those for which there was no device."""
    parts = {}
    for part in PARTS:
        path = folder / f"{part}.json"
        if path.exists():
            data = json.loads(path.read_text())
            if any(case["results"] or case["status"] != "lacking" for case in data["cases"]):
                parts[part] = data
    return parts


def machine_line(data: Mapping[str, Any]) -> str:
    machine = data["machine"]
    gpus = machine["gpus"]
    where = f"{len(gpus)} x {gpus[0]['name']}" if data["device"] == "cuda" else "a CPU"
    cuda = f", CUDA {machine['cuda']}" if machine["cuda"] else ""
    return f"{where}, {machine['cores']} cores, torch {machine['torch']}{cuda}, Python {machine['python']}"


def markdown(parts: Mapping[str, Any]) -> str:
    """A section for each part: its table, and what has failed or was not run."""
    texts = ["# On a GPU\n\n`make gpu`, and `make gpu-report` for this page.\n"]
    for part, data in parts.items():
        cases = data["cases"]
        texts.append(f"## {part}: {PARTS[part]}\n\n{machine_line(data)}\n\n{TABLES[part](cases)}\n{not_run(cases)}")
    return "\n".join(texts)


def readme_text(parts: Mapping[str, Any]) -> str:
    """A table of a few numbers, each with its command."""
    rows = [
        [row.what, row.number, f"`make gpu-{part}`"]
        for part, data in parts.items()
        for row in ROWS[part](data["cases"])
    ]
    return f"On {machine_line(next(iter(parts.values())))}:\n\n" + tabulate(
        rows, ["what", "number", "command"], tablefmt="github", disable_numparse=True
    )


def with_rows(readme: str, text: str) -> str:
    """The README with ``text`` between the two marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END} in the README, found {'one' if begin or end else 'neither'}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, help=f"default: {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args()
    parts = read(options.folder)
    on_cuda = {part: data for part, data in parts.items() if data["device"] == "cuda"}
    shown = on_cuda or (parts if options.results else {})
    if not shown:
        print(f"nothing that a GPU has measured is in {options.folder}: nothing written")
        return 0
    folder = options.results or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    before = json.loads((folder / "gpu.json").read_text()) if (folder / "gpu.json").exists() else {}
    shown = {part: shown.get(part) or before[part] for part in PARTS if part in shown or part in before}
    (folder / "gpu.json").write_text(json.dumps(shown, indent=1))
    (folder / "gpu.md").write_text(markdown(shown))
    print(f"{folder / 'gpu.md'}: {', '.join(shown)}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: expected matplotlib, found none")
    else:
        from benchmarks.gpu.plots import PLOTS

        for part, plot in PLOTS.items():
            if part in shown:
                plot(shown[part]["cases"], folder / f"gpu_{part}.png")
    if on_cuda:
        options.readme.write_text(with_rows(options.readme.read_text(), readme_text(shown)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
