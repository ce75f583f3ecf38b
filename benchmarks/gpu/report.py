"""Tables, plots and the README's rows of what ``make gpu`` has measured.

    python -m benchmarks.gpu.report build/gpu
    python -m benchmarks.gpu.report build/gpu --results elsewhere      # also of what was measured on a CPU

Writes ``gpu.md``, ``gpu.json`` and, with matplotlib, plots to ``benchmarks/results/``, where cases that have not run
again stay as they are, each with its commit. What was measured on a CPU, to try the code, goes to the folder that is
given and not into the README.
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

from benchmarks.gpu.case import ROOT
from benchmarks.gpu.case_list import PARTS
from benchmarks.gpu.code import commit_of
from benchmarks.gpu.readme_rows import ROWS
from benchmarks.gpu.tables import TABLES, not_run, provenance
from benchmarks.lib.json_file import write_json

RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- make gpu-report writes this -->", "<!-- to here -->"


def read(path: Path) -> dict[str, Any]:
    """The results in a file; each of its cases with the commit of its code, where there is one."""
    data: dict[str, Any] = json.loads(path.read_text())
    commits: dict[str, str] = {}
    for case in data["cases"]:
        code = case["code"]
        case["commit"] = case["commit"] or commits.setdefault(code, commit_of(code))
    return data


def merge(before: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` with what only ``before`` has measured."""
    named = {case["name"]: case for case in before.get("cases", [])}
    for case in data["cases"]:
        if case["results"] or case["name"] not in named or not named[case["name"]]["results"]:
            named[case["name"]] = case
    return {**data, "cases": list(named.values())}


def of_part(data: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    return [case for case in data["cases"] if case["part"] == part]


def machine_line(data: Mapping[str, Any]) -> str:
    machine = data["machine"]
    gpus = machine["gpus"]
    where = f"{len(gpus)} x {gpus[0]['name']}" if data["device"] == "cuda" else "a CPU"
    cuda = f", CUDA {machine['cuda']}" if machine["cuda"] else ""
    return f"{where}, {machine['cores']} cores, torch {machine['torch']}{cuda}, Python {machine['python']}"


def markdown(data: Mapping[str, Any]) -> str:
    """A section for each part: its table, where its rows come from, and what has failed or was not run."""
    texts = [f"# On a GPU\n\n`make gpu`, and `make gpu-report` for this page. On {machine_line(data)}.\n"]
    for part, what in PARTS.items():
        if cases := of_part(data, part):
            texts.append(f"## {part}: {what}\n\n{TABLES[part](cases)}\n{provenance(cases)}\n{not_run(cases)}")
    return "\n".join(texts)


def readme_text(data: Mapping[str, Any]) -> str:
    """A table of a few numbers, each with the commit that it was measured at: what has none is left out."""
    rows = []
    for part in PARTS:
        cases = [case for case in of_part(data, part) if case["commit"]]
        for commit in dict.fromkeys(case["commit"] for case in cases):
            of_commit = [case for case in cases if case["commit"] == commit]
            rows += [[row.what, row.number, f"`{commit}`"] for row in ROWS[part](of_commit)]
    table = tabulate(rows, ["what", "number", "commit"], tablefmt="github", disable_numparse=True)
    return f"By `make gpu`, on {machine_line(data)}:\n\n{table}"


def with_rows(readme: str, text: str) -> str:
    """The README with ``text`` between the two marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END} in the README, found {'one' if begin or end else 'neither'}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with gpu.json")
    parser.add_argument("--results", type=Path, help=f"default: {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args()
    data = read(options.folder / "gpu.json")
    on_cuda = data["device"] == "cuda"
    if not any(case["results"] for case in data["cases"]) or not (on_cuda or options.results):
        print(f"nothing that a GPU has measured is in {options.folder}: nothing written")
        return 0
    folder = options.results or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gpu.json"
    data = merge(read(path) if path.exists() else {}, data)
    write_json(path, data)
    (folder / "gpu.md").write_text(markdown(data))
    print(f"{folder / 'gpu.md'}: {len(data['cases'])} cases")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: expected matplotlib, found none")
    else:
        from benchmarks.gpu.plots import PLOTS

        for part, plot in PLOTS.items():
            if cases := of_part(data, part):
                plot(cases, folder / f"gpu_{part}.png")
    if on_cuda:
        options.readme.write_text(with_rows(options.readme.read_text(), readme_text(data)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
