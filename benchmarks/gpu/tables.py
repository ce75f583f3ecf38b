"""Tables of the parts' results, each from the cases of one part as its JSON has them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from benchmarks import host_update, launch_cost, nvme_throughput, one_gpu
from benchmarks.kernels import measure as kernels
from benchmarks.memory_frontier import measure as memory_frontier
from benchmarks.peers import report as peers_report
from zerofx.scheduler.cost.machine import Machine

Cases = Sequence[Mapping[str, Any]]
NUM_LAST = 10  # steps whose mean loss is a run's


def results(cases: Cases) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names and results of the cases that have some, also of what was cut off."""
    yield from ((case["name"], case["results"]) for case in cases if case["results"])


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True) + "\n" if rows else ""


def not_run(cases: Cases) -> str:
    """What has failed, could not run or found no time, and why."""
    return "".join(f"- {case['name']}: {case['status']}: {case['why']}\n" for case in cases if case["status"] != "ran")


def provenance(cases: Cases) -> str:
    """How each case came by its numbers."""
    words = {True: "yes", False: "no", None: ""}
    rows = [
        [
            case["name"], case["commit"] or "none", f"{case['seconds']:.0f}", case["cache"], words[case["alone"]],
            "" if case["neighbours"] is None else str(case["neighbours"]),
        ]
        for case in cases
        if case["results"]
    ]  # fmt: skip
    return table(["case", "commit", "s", "compiler's cache", "alone while timed", "cases next to it"], rows)


def gigabytes(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e9:.3f}"


def off(measured: float, predicted: float) -> str:
    """How far what was measured is from what was predicted."""
    return f"{100 * (measured / predicted - 1):+.1f} %"


def of_tests(cases: Cases) -> str:
    known = outcomes(cases)
    rows = [
        [name, outcome["outcome"], f"{outcome['seconds']:.1f}", last_line(outcome["text"])]
        for name, outcome in known.items()
    ]
    collected = [name for _, result in results(cases) for name in result["collected"]]
    missing = [[name, "not run", "", ""] for name in collected if name not in known]
    return table(["test", "outcome", "s", ""], rows + missing)


def outcomes(cases: Cases) -> dict[str, dict[str, Any]]:
    """What each test came to."""
    return {name: outcome for _, result in results(cases) for name, outcome in result.get("outcomes", {}).items()}


def last_line(text: str) -> str:
    """The line of a text that says most: an error's, or the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("E ").strip() for line in lines if re.match(r"E\s+[\w.]*(Error|Exception)", line)]
    return (errors or lines or [""])[-1][:160].replace("|", "\\|")


def differences(result: Mapping[str, Any]) -> tuple[float, int]:
    """The largest relative difference of two losses of a step, and how many steps from the first have the same bits."""
    pairs = list(zip(result["losses"], result["torch_losses"], strict=True))
    same = next((number for number, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs), same


def of_train(cases: Cases) -> str:
    rows = []
    for name, result in results(cases):
        if "losses" not in result:
            continue
        largest, same = differences(result)
        means = [statistics.fmean(result[key][-NUM_LAST:]) for key in ("torch_losses", "losses")]
        peaks = [gigabytes(result.get(key)) for key in ("predicted_bytes", "measured_bytes")]
        rows.append(
            [
                name, str(len(result["losses"])), f"{result['torch_losses'][0]:.4f}",
                *(f"{mean:.4f}" for mean in means), f"{100 * largest:.3f} %", str(same),
                f"{1e3 * result['torch_seconds']:.1f}", f"{1e3 * result['seconds']:.1f}", *peaks,
            ]
        )  # fmt: skip
    headers = ["", "steps", "first loss", "torch's last", "zerofx's last", "largest difference",
               "steps of the same bits", "torch's ms", "zerofx's ms", "predicted GB", "measured GB"]  # fmt: skip
    return table(headers, rows)


def of_memory(cases: Cases) -> str:
    rows = []
    neighbours = {case["name"]: case["neighbours"] for case in cases}
    for name, result in results(cases):
        if "refused" in result:
            rows.append([name, *[""] * 9, result["refused"][:120]])
            continue
        if "predicted_bytes" not in result:
            continue
        predicted = result["predicted_bytes"]["device"]
        measured = [result.get(key) for key in ("allocated_bytes", "reserved_bytes")]
        compared = [text for size in measured for text in (gigabytes(size), off(size, predicted) if size else "")]
        # Of the whole card is known only what came or went: all of it is this case's where it was the only one.
        is_known = neighbours[name] == 0 and "card_bytes" in result
        beyond = gigabytes(result["card_bytes"] - result["reserved_bytes"]) if is_known else ""
        seconds = statistics.median(result["seconds"]) if result.get("seconds") else None
        rows.append(
            [
                name, gigabytes(result["budget"]), gigabytes(predicted), *compared,
                beyond, str(result["num_recomputed"]),
                f"{result['predicted_seconds']:.3f}", "" if seconds is None else f"{seconds:.3f}", "",
            ]
        )  # fmt: skip
    headers = ["", "budget GB", "predicted GB", "allocated GB", "off by", "reserved GB", "off by", "besides that GB",
               "recomputed", "predicted s", "measured s", "refused"]  # fmt: skip
    return table(headers, rows)


def of_speed(cases: Cases) -> str:
    parts = []
    for name, result in results(cases):
        texts = [
            *([one_gpu.markdown(result["one_gpu"]).replace("## ", "#### ")] if "one_gpu" in result else []),
            *(launch_cost.table(row) + "\n" for key, row in result.items() if key.startswith("launch_cost")),
            *(memory_frontier.table(data["rows"]) + "\n" for key, data in result.items() if "frontier" in key),
            *(peers_report.markdown(data).replace("## ", "#### ") for key, data in result.items() if "peers" in key),
        ]
        parts += [f"### {name}\n", *texts] if texts else []
    return "\n".join(parts)


def kernel_rows(cases: Cases) -> list[dict[str, Any]]:
    return [
        row
        for _, result in results(cases)
        for name, data in result.items()
        if "kernels" in name
        for row in data["rows"]
    ]


def of_kernels(cases: Cases) -> str:
    listed = kernel_rows(cases)
    return kernels.table(listed) + "\n" if listed else ""


def of_offload(cases: Cases) -> str:
    rows, texts = [], []
    for name, result in results(cases):
        if "num_layers" in result:
            predicted = result.get("predicted_bytes", {})
            seconds = result.get("seconds") or [None]
            trained = "yes" if result.get("losses") else result.get("reason", "no")[:120]
            rows.append(
                [
                    name, f"{result['num_parameters'] / 1e9:.2f}", trained,
                    *(gigabytes(predicted.get(tier)) for tier in ("device", "host", "nvme")),
                    gigabytes(result.get("reserved_bytes")), gigabytes(result.get("resident_bytes")),
                    "" if seconds[-1] is None else f"{seconds[-1]:.1f}",
                    f"{result['tokens_per_second']:.0f}" if "tokens_per_second" in result else "",
                ]
            )  # fmt: skip
        elif "nvme_throughput" in result:
            data = result["nvme_throughput"]
            texts.append(f"\nThe drive alone:\n\n{nvme_throughput.table(data['reference'], data['rows'])}\n")
        elif "host_update" in result:
            text = host_update.table(result["host_update"]["row"])
            texts.append(f"\nThe update on the host alone:\n\n{text}\n")
    headers = ["", "parameters, 10^9", "trains", "predicted: device GB", "host GB", "nvme GB", "reserved GB",
               "resident GB", "s a step", "tokens/s"]  # fmt: skip
    return table(headers, rows) + "".join(texts)


def of_measure(cases: Cases) -> str:
    parts: list[str] = []
    for _, result in results(cases):
        if "host_rates" in result:
            counts = list(next(iter(result["host_rates"].values())))
            cells = [
                [what, *(f"{rates[count] / 1e9:.1f}" for count in counts)]
                for what, rates in result["host_rates"].items()
            ]
            parts.append(table(["GB/s of the host, by threads", *counts], cells))
            links = [[what, f"{rate / 1e9:.1f}"] for what, rate in result.get("link_rates", {}).items()]
            parts.append(table(["link", "GB/s each way"], links))
        if "machine" in result and result.get("row"):
            parts.append(
                table(
                    ["", "built-in row, as programs get it", f"measured in {result['seconds']:.0f} s"], speeds(result)
                )
            )
    return "\n".join(parts)


def speeds(result: Mapping[str, Any]) -> list[list[str]]:
    """What a machine does a second, by its row and as measured."""
    import torch

    machines = [Machine.from_json(result[key]) for key in ("row", "machine")]
    quantities: dict[str, Callable[[Machine], float]] = {
        "bf16 products, TFLOP/s": lambda machine: machine.matmul_flops(torch.bfloat16) / 1e12,
        "fp32 products, TFLOP/s": lambda machine: machine.matmul_flops(torch.float32) / 1e12,
        "device memory, GB/s": lambda machine: machine.memory_bandwidth / 1e9,
        "launch, us": lambda machine: 1e6 * machine.device.launch_latency,
        "to the host, GB/s": lambda machine: machine.host.to_host.bandwidth * machine.efficiency.link / 1e9,
        "to the device, GB/s": lambda machine: machine.host.to_device.bandwidth * machine.efficiency.link / 1e9,
        "host memory of a rank, GB": lambda machine: machine.host_bytes_per_rank / 1e9,
    }
    return [[what, *(f"{speed(machine):.1f}" for machine in machines)] for what, speed in quantities.items()]


TABLES: Mapping[str, Callable[[Cases], str]] = {
    "tests": of_tests,
    "train": of_train,
    "memory": of_memory,
    "speed": of_speed,
    "kernels": of_kernels,
    "offload": of_offload,
    "measure": of_measure,
}
