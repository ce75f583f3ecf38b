"""Ranks on several nodes with a slow network between them, on one machine: zerofx next to FSDP2, HSDP and DDP.

    python -m benchmarks.nodes                                   # 2 nodes of one rank, 200 Mbit/s and 1 Gbit/s
    python -m benchmarks.nodes --nodes 2 --ranks-per-node 2 --rates 200mbit
    python -m benchmarks.nodes --only zerofx                     # contenders whose name has one of these words
    python -m benchmarks.nodes --accumulate 8 --only pipe chosen # micro-batches, of which stages on ranks take turns

A node is a network namespace, joined to the others by a pair of virtual interfaces and a bridge; what leaves it passes
a token bucket of the rate (`tc ... tbf`). Its ranks have a host name and processes of their own (`unshare --uts
--pid`), so that nothing takes a short cut through shared memory; messages are plain gloo's. Needs root, `ip`, `tc` and
`unshare`.

Contenders live side by side, each with its step compiled, and rounds go through all of them in turn. zerofx plans for
the machine as `Machine.measure()` finds it there, its links included; the seconds of a step that it predicts stand next
to those that were measured.

Writes ``benchmarks/results/nodes.json`` and a Markdown table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.lib.json_file import write_json
from benchmarks.lib.models import SHAPES
from benchmarks.lib.processes import RESULTS, Ranks
from benchmarks.lib.turn import turn

_PREFIX = f"zerofx-{os.getpid()}"  # of namespaces, which other runs have too
_HUB = f"{_PREFIX}-hub"
_BASELINE = "FSDP2 + compile"


def contenders(num_nodes: int, ranks_per_node: int, accumulate: int) -> dict[str, dict[str, Any]]:
    """What each contender's workers are told, by name."""
    ours = {"family": "zerofx", "stage": 3, "measures": True, "accumulate": accumulate}
    num_ranks = num_nodes * ranks_per_node
    fsdp2 = {"family": "fsdp2", "compile": True, "accumulate": accumulate}
    # All ranks are given one batch where some may share it.
    in_stages = {
        "zerofx, pipe": {**ours, "mesh": {"pipe": num_ranks}, "shared": True},
        "zerofx, chosen mesh": {**ours, "mesh": "auto", "shared": True},
    }
    mesh = {"replicate": num_nodes, "shard": ranks_per_node}
    hsdp = {"FSDP2 over replicas + compile": {**fsdp2, "shard": ranks_per_node}}
    on_mesh = {"zerofx, replicate x shard": {**ours, "mesh": mesh}}
    return {
        _BASELINE: fsdp2,
        **(hsdp if ranks_per_node > 1 else {}),
        "DDP + compile": {"family": "ddp", "compile": True, "accumulate": accumulate},
        "zerofx": ours,
        **(on_mesh if ranks_per_node > 1 else {}),
        "zerofx, stage 1": {**ours, "stage": 1},
        **(in_stages if accumulate > 1 else {}),
        "zerofx, wire int8": {**ours, "wire": "int8"},
        "zerofx, wire int4": {**ours, "wire": "int4"},
    }


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def network(num_nodes: int, rate: str) -> Iterator[list[str]]:
    """Namespaces of nodes that send at ``rate`` (as `tc` has it); gives their names, and removes them in the end."""
    names = [f"{_PREFIX}-node{node}" for node in range(num_nodes)]
    try:
        _run("ip", "netns", "add", _HUB)
        _run("ip", "-n", _HUB, "link", "add", "hub", "type", "bridge")
        _run("ip", "-n", _HUB, "link", "set", "hub", "up")
        for node, name in enumerate(names):
            _run("ip", "netns", "add", name)
            port = f"port{node}"
            _run("ip", "-n", name, "link", "add", "net0", "type", "veth", "peer", "name", port, "netns", _HUB)
            _run("ip", "-n", _HUB, "link", "set", port, "master", "hub", "up")
            _run("ip", "-n", name, "addr", "add", f"10.231.0.{node + 1}/24", "dev", "net0")
            _run("ip", "-n", name, "link", "set", "net0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            bucket = ("tbf", "rate", rate, "burst", "128kb", "latency", "50ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", "net0", "root", *bucket)
        yield names
    finally:
        for name in (*names, _HUB):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start(node: str) -> list[str]:
    """The command in front of a rank's own: on a node, with its host name, and ended with its parent."""
    named = f'hostname {node}; exec "$@"'
    return [
        "ip", "netns", "exec", node, "unshare", "--uts", "--pid", "--fork", "--kill-child", "sh", "-c", named, "sh",
    ]  # fmt: skip


def measure(options: argparse.Namespace, rate: str, cache: Path) -> dict[str, dict[str, Any]]:
    """Seconds of steps of each contender, and what it said of itself, by name."""
    results: dict[str, dict[str, Any]] = {}
    ready: list[Ranks] = []
    num_ranks = options.nodes * options.ranks_per_node
    with network(options.nodes, rate) as nodes:
        commands = [start(nodes[rank // options.ranks_per_node]) for rank in range(num_ranks)]
        variables = {"GLOO_SOCKET_IFNAME": "net0", "ZEROFX_CACHE_DIR": str(cache / "zerofx")}
        try:
            for name, request in contenders(options.nodes, options.ranks_per_node, options.accumulate).items():
                if options.only and not any(word in name for word in (*options.only, _BASELINE)):
                    continue
                message = {"shape": options.shape, "device": "cpu", "dtype": "float32", "contender": request}
                ranks = Ranks(
                    name, "benchmarks.peers.worker", message, num_ranks, 1, cache, variables, commands,
                    options.ranks_per_node,
                )  # fmt: skip
                ready.append(ranks)
                results[name] = {"facts": ranks.read()[0], "seconds": []}
                sys.stderr.write(f"{rate}: {name} is ready\n")
            for _ in range(options.rounds):
                with turn(whole_machine=True):
                    for ranks in ready:
                        # The first step of a turn finds cold caches.
                        steps = ranks.run(options.steps + 1)[1:]
                        results[ranks.name]["seconds"] += [seconds for seconds, _ in steps]
        finally:
            for ranks in ready:
                ranks.close()
    return results


def table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """All that was measured, as Markdown."""
    rows = []
    for case, by_name in results.items():
        seconds = {name: statistics.median(result["seconds"]) for name, result in by_name.items()}
        batches = {name: result["facts"].get("num_batches", 1) for name, result in by_name.items()}
        for name, result in by_name.items():
            predicted = result["facts"].get("predicted_seconds")
            times = seconds[name] / seconds[_BASELINE] * batches[_BASELINE] / batches[name]
            mesh = result["facts"].get("mesh", "")
            rows.append([
                case, f"{name} ({mesh})" if mesh else name, f"{seconds[name]:.2f}", f"{times:.2f}",
                "" if predicted is None else f"{predicted:.2f}",
                "" if predicted is None else f"{seconds[name] / predicted:.2f}",
                f"{result['facts']['wire_bytes'] / 1e6:.0f}",
            ])  # fmt: skip
    headers = [
        "network", "", "step, s", f"a batch, over {_BASELINE}", "predicted, s", "measured over predicted",
        "sent by a rank, MB",
    ]  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"], help="of what leaves a node, as tc has it")
    parser.add_argument("--accumulate", type=int, default=1, metavar="M", help="micro-batches of a step")
    parser.add_argument("--shape", choices=SHAPES, default="27m")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="contenders whose name has one of these")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each contender in a round")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        parser.error(f"expected root, ip, tc and unshare, found no {', '.join(missing) or 'root'}")
    path = options.out / "nodes.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for rate in options.rates:
        with tempfile.TemporaryDirectory(prefix="nodes-cache-") as cache:
            case = f"{options.shape}, {options.nodes} x {options.ranks_per_node}, {rate}"
            case += f", {options.accumulate} micro-batches" if options.accumulate > 1 else ""
            results[case] = measure(options, rate, Path(cache))
        write_json(path, results)
    text = table(results)
    path.with_suffix(".md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
