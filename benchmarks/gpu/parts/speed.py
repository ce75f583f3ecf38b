"""Part (d): step time next to ``torch.compile``, and under a cap next to other libraries that offload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.gpu.case import OUT, Case, Entry, caches
from benchmarks.gpu.setup import Setup


def cases(setup: Setup, entries: Mapping[str, Entry]) -> Iterator[Case]:
    """``benchmarks.one_gpu`` on each shape, what launches cost, peaks against time, and all GPUs at once."""
    sizes = setup.sizes
    common = ("--device", setup.device, "--dtype", setup.dtype, "--out", OUT)
    cache = ("--cache", str(caches()["TORCHINDUCTOR_CACHE_DIR"]))
    rounds = ("--rounds", str(sizes.rounds), *cache, *common)
    first, *others = sizes.speed_shapes
    yield one_gpu(f"{first}, whole", ("--shape", first, "--groups", "whole", *rounds))
    yield one_gpu(f"{first}, capped", ("--shape", first, "--groups", "capped", "--cap", sizes.cap, *rounds))
    for shape in others:
        yield one_gpu(f"{shape}, whole", ("--shape", shape, "--groups", "whole", *rounds))
    frontier = (
        "-m", "benchmarks.memory_frontier", "--device", setup.device, "--out", OUT, "--rounds", str(sizes.rounds),
        "--together", "1", *sizes.frontier_arguments,
    )  # fmt: skip
    launch = ("-m", "benchmarks.launch_cost", "--shape", first, *common)
    yield Case(f"{first}, launches", launch, needs=_needs(first))
    yield Case("peaks against time", frontier, seconds=480.0, least_seconds=120.0, needs=("matplotlib",))
    peers = ("-m", "benchmarks.peers", "--shape", first, "--groups", "sharded", "replicated", *rounds)
    yield Case(f"{first}, all GPUs", peers, seconds=480.0, needs=("2 GPUs", *_needs(first)))


def one_gpu(name: str, arguments: tuple[str, ...]) -> Case:
    """A case that may take all the time there is: it writes as it goes."""
    command = ("-m", "benchmarks.one_gpu", *arguments)
    return Case(name, command, seconds=480.0, least_seconds=60.0, needs=_needs(name))


def _needs(name: str) -> tuple[str, ...]:
    return ("transformers",) if "llama" in name else ()
