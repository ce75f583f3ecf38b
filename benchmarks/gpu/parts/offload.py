"""Part (g): the largest model that trains on one GPU: plain torch, with host memory, and with NVMe too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.gpu.case import OUT, Case, Entry, worker
from benchmarks.gpu.setup import Setup
from benchmarks.largest_trainable.search import Search, Trial, next_size
from benchmarks.lib.models import SHAPES, Shape

DEVICE_SHARE = 0.92  # of the device's memory: the rest is for libraries and for what blocks do not fill
TORCH_BYTES, TIER_BYTES = 8, 6  # for each parameter in bfloat16: value, moments and, in plain torch, gradient
START_SHARE = 0.8  # of what memory has by that count: the first size is one that should train


@dataclass(frozen=True)
class Contender:
    """``tier`` is the slowest that it may use; None for plain torch."""

    name: str
    tier: str | None
    needs: tuple[str, ...] = ()


ON_CUDA = (
    Contender("zerofx, host", "host"),
    Contender("torch, fused AdamW", None),
    Contender("zerofx, host and NVMe", "nvme", ("drive",)),
)
ON_CPU = (Contender("torch, fused AdamW", None), Contender("zerofx, NVMe", "nvme"))


def cases(setup: Setup, entries: Mapping[str, Entry]) -> Iterator[Case]:
    """A trial of each contender in turn, and then what the drive and the host's update do alone."""
    shape = SHAPES[setup.sizes.deep]
    searches = {
        contender: Search(contender.name, "layers") for contender in (ON_CUDA if setup.device == "cuda" else ON_CPU)
    }
    for _ in range(setup.sizes.num_trials):
        for contender, search in searches.items():
            size = next_size(search, first_layers(contender, shape, setup))
            if size is None or search.ended:
                continue
            case = trial_case(contender, size, setup)
            yield case
            note(search, size, entries[case.name])
    yield Case(
        "the drive alone",
        ("-m", "benchmarks.nvme_throughput", "--folder", str(setup.drive), "--out", OUT, *setup.sizes.drive_arguments),
        needs=("drive",),
    )
    update = ("--threads", str(setup.machine["cores"]), "--out", OUT, *setup.sizes.drive_arguments)
    yield Case("the update on the host alone", ("-m", "benchmarks.host_update", *update))


def trial_case(contender: Contender, num_layers: int, setup: Setup) -> Case:
    """``num_layers`` of the deep shape."""
    request = {
        "shape": setup.sizes.deep, "changes": {"depth": num_layers}, "tier": contender.tier, "device": setup.device,
        "dtype": setup.dtype, "budget": int(DEVICE_SHARE * setup.device_bytes), "host_budget": setup.host_bytes,
        "drive_bytes": setup.drive_bytes,
    }  # fmt: skip
    return worker(
        f"{contender.name}, {num_layers} layers",
        "largest_worker",
        request,
        seconds=420.0,
        least_seconds=60.0,
        needs=("transformers", *contender.needs),
        variables={"ZEROFX_NVME_DIR": str(setup.drive)},
    )


def first_layers(contender: Contender, shape: Shape, setup: Setup) -> int:
    """Layers of a model that should train, by a count of bytes."""
    width = shape.dim * shape.num_kv_heads // shape.num_heads
    layer = 2 * shape.dim**2 + 2 * shape.dim * width + 3 * shape.dim * shape.inner
    num_bytes = DEVICE_SHARE * setup.device_bytes
    if contender.tier is not None and setup.device == "cuda":
        num_bytes += setup.host_bytes
    if contender.tier == "nvme":
        num_bytes += setup.drive_bytes
    each = TORCH_BYTES if contender.tier is None else TIER_BYTES
    most = (num_bytes / each - 2 * shape.vocab * shape.dim) / layer
    return max(1, min(int(START_SHARE * most), setup.sizes.most_layers))


def note(search: Search, size: int, entry: Entry) -> None:
    """Add a trial that was run to its search; what could not be run ends it."""
    if entry.status in ("lacking", "not run"):
        search.ended = entry.why
        return
    results = entry.results
    trained = entry.status == "ran" and not results.get("reason")
    search.trials.append(
        Trial(
            size,
            results.get("num_parameters", 0),
            trained,
            entry.seconds,
            0,
            results.get("reserved_bytes", 0),
            results.get("losses", []),
            results.get("reason", "") or entry.why,
        )
    )
