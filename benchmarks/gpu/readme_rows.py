"""Rows of the README: the few numbers that stand for each part of ``make gpu``, of cases of one commit."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks import one_gpu
from benchmarks.gpu.tables import Cases, differences, kernel_rows, outcomes, results
from benchmarks.peers import report as peers_report


@dataclass(frozen=True)
class Row:
    """What was measured, and the number in words."""

    what: str
    number: str


def row_of_tests(cases: Cases) -> Iterator[Row]:
    listed = sorted(outcome["outcome"] for outcome in outcomes(cases).values())
    if listed:
        counts = ", ".join(f"{listed.count(name)} {name}" for name in dict.fromkeys(listed))
        yield Row("tests that need a GPU", counts)


def row_of_train(cases: Cases) -> Iterator[Row]:
    for backend in ("eager", "inductor"):
        trained = [entry for entry in results(cases) if "losses" in entry[1] and f", {backend}," in entry[0]]
        if trained:
            models = " and ".join(dict.fromkeys(name.partition(",")[0] for name, _ in trained))
            yield Row(
                f"losses of {models} in bf16, {backend}, next to plain torch's: largest difference",
                f"{100 * max(differences(result)[0] for _, result in trained):.2f} %",
            )


def row_of_memory(cases: Cases) -> Iterator[Row]:
    for key, word in (("allocated_bytes", "allocated"), ("reserved_bytes", "reserved")):
        shares = [
            result[key] / result["predicted_bytes"]["device"] - 1 for _, result in results(cases) if result.get(key)
        ]
        if shares:
            shapes = dict.fromkeys(name.partition(",")[0] for name, result in results(cases) if result.get(key))
            yield Row(
                f"peak that was {word} next to the predicted one, {' and '.join(shapes)} within budgets, all cases",
                f"{100 * min(shares):+.1f} % to {100 * max(shares):+.1f} %",
            )
    ratios = [
        result["predicted_seconds"] / statistics.median(result["seconds"])
        for _, result in results(cases)
        if result.get("seconds") and "predicted_seconds" in result
    ]
    if ratios:
        what = "predicted over measured time of a step within budgets, all cases"
        yield Row(what, f"{min(ratios):.2f} to {max(ratios):.2f}")


def row_of_speed(cases: Cases) -> Iterator[Row]:
    for _, result in results(cases):
        if "one_gpu" not in result:
            continue
        data = result["one_gpu"]
        listed = {name: peers_report.rows(group) for name, group in data["groups"].items()}
        for verdict in one_gpu.verdicts(listed, on_cpu=data["device"] == "cpu"):
            if verdict.what.startswith("time"):
                steps = min(row.num_steps for group in listed.values() for row in group)
                what = f"{data['shape']}, {verdict.what}, medians of {steps} steps (less is better)"
                yield Row(what, f"{verdict.measured:.2f}")
        peaks = {row.name: row.peak_bytes for row in listed.get("whole", [])}
        if {"zerofx", one_gpu.COMPILED} <= peaks.keys():
            share = peaks["zerofx"] / peaks[one_gpu.COMPILED]
            yield Row(f"{data['shape']}, peak: zerofx / {one_gpu.COMPILED} (less is better)", f"{share:.2f}")


def row_of_kernels(cases: Cases) -> Iterator[Row]:
    listed = kernel_rows(cases)
    for group in dict.fromkeys(row["group"] for row in listed):
        members = [row for row in listed if row["group"] == group]
        theirs = [row["median_seconds"] for row in members if row["contender"].startswith("torch")]
        ours = [row["median_seconds"] for row in members if not row["contender"].startswith("torch")]
        if ours and theirs:
            yield Row(
                f"kernel {group}: time over the best of torch's and Inductor's (less is better)",
                f"{min(ours) / min(theirs):.2f}",
            )


def row_of_offload(cases: Cases) -> Iterator[Row]:
    largest: dict[str, int] = {}
    for name, result in results(cases):
        if result.get("losses") and "num_layers" in result:
            contender = name.rpartition(",")[0]
            largest[contender] = max(largest.get(contender, 0), result["num_parameters"])
    for contender, number in largest.items():
        yield Row(f"the largest Llama that trains in bfloat16, {contender}", f"{number / 1e9:.1f} billion parameters")


def row_of_measure(cases: Cases) -> Iterator[Row]:
    for _, result in results(cases):
        for what, rates in result.get("host_rates", {}).items():
            if what.startswith("update"):
                threads, rate = max(rates.items(), key=lambda item: item[1])
                yield Row(f"{what} on the host, with {threads} threads", f"{rate / 1e9:.0f} GB/s")


ROWS: Mapping[str, Callable[[Cases], Iterator[Row]]] = {
    "tests": row_of_tests,
    "train": row_of_train,
    "memory": row_of_memory,
    "speed": row_of_speed,
    "kernels": row_of_kernels,
    "offload": row_of_offload,
    "measure": row_of_measure,
}
