"""All cases of ``make gpu``, of every part, in the order of their worth: what ten minutes are spent on first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.gpu.case import OUT, Case
from benchmarks.gpu.setup import Setup
from benchmarks.kernels.names import CUDA

BUDGET_SHARE = 0.95  # of a cap, as in ``benchmarks.one_gpu``
DEVICE_SHARE = 0.92  # of the device's memory: the rest is for libraries and for what blocks do not fill
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

PARTS: Mapping[str, str] = {
    "tests": "the tests that need a GPU",
    "train": "losses next to plain torch's",
    "memory": "predicted and measured steps within budgets",
    "speed": "step time next to torch.compile, and under a cap next to other libraries",
    "kernels": "own kernels next to Inductor's and torch's",
    "offload": "the largest model that trains, with host and NVMe",
    "measure": "the host and its links, and Machine.measure()",
}


def cases(setup: Setup) -> list[Case]:
    """What the first command is for, then the second: costs add up to what several at a time do in ten minutes each."""
    listed = [*_first(setup), *_second(setup)]
    if setup.sizes.has_each_kind_once:
        listed = list({_kind(case): case for case in reversed(listed)}.values())[::-1]
        listed = [replace(case, device_gb=0.0, host_gb=0.0) for case in listed]
    return [replace(case, cost=setup.sizes.seconds_share * case.cost) for case in listed]


def _kind(case: Case) -> tuple[str, ...]:
    """What of a case decides which code it runs: its module, with the fields of its request or its groups."""
    module, *arguments = case.command[1:]
    if not arguments[0].startswith("{"):
        groups = [word for word in ("whole", "capped", "--ready-again") if word in arguments]
        return module, *groups
    request = json.loads(arguments[0])
    return module, *sorted(key for key, value in {**request, **request.get("options", {})}.items() if value)


def _first(setup: Setup) -> Iterator[Case]:
    sizes, (cap, middle, least) = setup.sizes, setup.sizes.caps
    update = {"device": setup.device, "millions": sizes.bucket_millions, "stream_bytes": sizes.stream_bytes}
    yield _worker("host and links", "measure", 100, 25, "host", update, device_gb=6.0, host_gb=8.0)
    machine = {"device": setup.device, "drive": str(setup.drive)}
    yield _worker("Machine.measure()", "measure", 99, 20, "machine", machine, device_gb=5.0)
    training = "tests/gpu/test_training.py"
    yield _tests("bits of eager mode", 95, 60, training, "-k", "bits_are")
    yield _tests("offload and peaks", 94, 60, training, "-k", "leaves_the_device or predicted")
    yield _tests("compiled regions", 93, 60, training, "-k", "compiled_regions")
    capped = ("--groups", "capped", "--cap", f"{cap:.0f}", "--only", "FSDP2", "zerofx")
    yield _one_gpu(setup, sizes.shape, "capped", 90, capped, cost=75, host_gb=60.0)
    yield _capped_step(setup, 85, cap, clipped=True)
    yield _capped_step(setup, 84, middle)
    yield _capped_step(setup, 83, least)
    yield _step(setup, 80, 0.6, deep=True, cost=69)
    for share in (0.6, 0.3):
        yield _step(setup, 75, share, variables=SEGMENTS, suffix=", expandable segments", cost=38)
        if sizes.backend == "inductor":
            yield _step(setup, 75, share, suffix=", arena", options={"arena": True}, cost=38)
    whole = ("--groups", "whole", "--ready-again")
    yield _one_gpu(setup, sizes.shape, "whole", 70, whole, cost=85, device_gb=70.0)
    for model, backend, masters in (("llama", sizes.backend, True), ("gpt", "eager", False), ("llama", "eager", False)):
        yield _training(setup, 65, model, backend, masters=masters)
    for group in ("update", "loss", "norms"):
        yield _kernel(setup, 60, group)
    yield _tests("CUDA graphs", 55, 40, "tests/gpu/test_cuda_graphs.py")
    yield _tests("kernels and devices", 54, 40, "tests/gpu/test_kernels.py", "tests/gpu/test_devices.py")
    yield _one_gpu(setup, sizes.other, "whole", 50, ("--groups", "whole"), cost=60, device_gb=70.0)
    yield _tests("ranks on one GPU", 45, 40, "tests/gpu/ranks", needs=("tests/gpu/ranks",))


def _second(setup: Setup) -> Iterator[Case]:
    sizes = setup.sizes
    yield _largest(setup, 40, "zerofx, host", "host", sizes.host_layers, cost=139)
    yield _largest(setup, 39, "zerofx, host", "host", sizes.host_layers, cost=150, accumulate=4)
    yield _drive(setup, 38)
    options = {"offload": "nvme"}
    yield _step(setup, 37, 0.3, suffix=", nvme", options=options, cost=60, needs=("drive",))
    frontier = (
        "-m", "benchmarks.memory_frontier", "--device", setup.device, "--out", OUT, "--together", "1",
        *sizes.frontier_arguments,
    )  # fmt: skip
    yield Case(
        "peaks against time", "speed", 36, 90, frontier, prepare_seconds=150.0, device_gb=30.0, needs=("matplotlib",)
    )
    for share in (None, 0.8):
        yield _step(setup, 35, share)
    yield _step(setup, 34, None, deep=True, cost=55)
    yield _largest(setup, 33, "torch, fused AdamW", None, sizes.deep_layers, cost=60)
    deepspeed = ("--groups", "capped", "--cap", f"{sizes.caps[0]:.0f}", "--only", "DeepSpeed", "zerofx")
    yield _one_gpu(setup, sizes.shape, "capped, DeepSpeed", 32, deepspeed, cost=85, host_gb=70.0, needs=("deepspeed",))
    for share in (None, 0.35):
        yield _step(setup, 31, share, suffix=", measured machine", measured=True)
    launch = ("-m", "benchmarks.launch_cost", "--shape", sizes.shape, *_common(setup))
    launch = (*launch, "--backend", sizes.backend)
    yield Case(f"{sizes.shape}, launches", "speed", 30, 48, launch, device_gb=45.0, needs=_needs(sizes.shape))
    for model, backend, masters in (
        ("gpt", sizes.backend, False), ("llama", sizes.backend, False), ("gpt", "eager", True),
        ("gpt", sizes.backend, True), ("llama", "eager", True),
    ):  # fmt: skip
        yield _training(setup, 29, model, backend, masters=masters)
    for group in sorted(set(CUDA) - {"update", "loss", "norms"}):
        yield _kernel(setup, 27, group)
    for share in (0.8, 0.3):
        yield _step(setup, 26, share, deep=True, cost=69)
    for share in (0.6, 0.3):
        yield _step(setup, 25, share)
    for share in (None, 0.6, 0.3):
        yield _step(setup, 24, share, backend="eager")
    yield _largest(setup, 23, "zerofx, host and NVMe", "nvme", sizes.nvme_layers, cost=200, needs=("drive",))
    host_update = ("-m", "benchmarks.host_update", "--threads", str(setup.machine["cores"]), "--out", OUT)
    yield Case("the update on the host alone", "offload", 22, 20, (*host_update, *sizes.drive_arguments))
    peers = ("-m", "benchmarks.peers", "--shape", sizes.shape, "--groups", "sharded", "replicated", "--rounds", "2")
    yield _tests("stages on two GPUs", 21, 60, "tests/gpu/ranks", "-k", "stages", needs=("tests/gpu/ranks", "2 GPUs"))
    needs = ("2 GPUs", *_needs(sizes.shape))
    yield Case(f"{sizes.shape}, all GPUs", "speed", 21, 180, (*peers, *_common(setup)), device_gb=70.0, needs=needs)


def _worker(
    name: str, part: str, worth: int, cost: float, module: str, request: Mapping[str, Any], **options: Any
) -> Case:
    """A case that runs a worker of this folder with ``request`` as its argument."""
    command = ("-m", f"benchmarks.gpu.workers.{module}", json.dumps(request), OUT)
    return Case(name, part, worth, cost, command, **options)


def _tests(name: str, worth: int, cost: float, *arguments: str, needs: tuple[str, ...] = ()) -> Case:
    return _worker(
        name, "tests", worth, cost, "tests", {"arguments": ["-m", "gpu", *arguments]}, device_gb=4.0,
        needs=("pytest", *needs),
    )  # fmt: skip


def _training(setup: Setup, worth: int, model: str, backend: str, *, masters: bool) -> Case:
    request = {
        "model": model, "backend": backend, "masters": masters, "num_steps": setup.sizes.num_steps,
        "num_sequences": setup.sizes.num_sequences, "device": setup.device,
    }  # fmt: skip
    way = "masters in fp32" if masters else "all in bf16"
    return _worker(f"{model}, {backend}, {way}", "train", worth, 25, "train", request, needs=_needs(model))


def _step(
    setup: Setup,
    worth: int,
    share: float | None,
    *,
    deep: bool = False,
    backend: str | None = None,
    suffix: str = "",
    options: Mapping[str, Any] | None = None,
    measured: bool = False,
    cost: float = 40,
    needs: tuple[str, ...] = (),
    variables: Mapping[str, str] | None = None,
) -> Case:
    """A step within a share of what it is predicted to take without a budget; None for none."""
    sizes = setup.sizes
    shape, peak = (sizes.deep, sizes.deep_peak_bytes) if deep else (sizes.shape, sizes.peak_bytes)
    budget = None if share is None else int(share * peak)
    request = {
        "shape": shape, "changes": {"depth": sizes.deep_layers} if deep else {}, "device": setup.device,
        "dtype": setup.dtype, "backend": backend or sizes.backend, "budget": budget, "host_budget": setup.host_bytes,
        "measured": measured, "drive": str(setup.drive), "options": dict(options or {}),
    }  # fmt: skip
    layers = f", {sizes.deep_layers} layers" if deep else ""
    within = "no budget" if share is None else f"{share} of its peak"
    return _worker(
        f"{shape}{layers}, {request['backend']}{suffix}, {within}", "memory", worth, cost, "step", request,
        device_gb=(budget or peak) / 1e9 + 2, host_gb=45.0 if deep else 12.0, needs=(*_needs(shape), *needs),
        variables=variables or {},
    )  # fmt: skip


def _capped_step(setup: Setup, worth: int, cap: float, *, clipped: bool = False) -> Case:
    """zerofx as it is in the comparison under a cap: masters in float32 on the host, computation in bfloat16."""
    options: dict[str, Any] = {"offload": "host", "stage": 3}
    if setup.device == "cuda":
        options["precision"] = "bf16"
    if clipped:
        options["max_grad_norm"] = 1.0
    request = {
        "shape": setup.sizes.shape, "device": setup.device, "dtype": "float32", "backend": setup.sizes.backend,
        "budget": int(BUDGET_SHARE * cap), "host_budget": setup.host_bytes, "options": options,
    }  # fmt: skip
    name = f"{setup.sizes.shape}, host, cap of {cap / 1e9:g} GB{', clipped' if clipped else ''}"
    return _worker(
        name, "memory", worth, 45, "step", request, device_gb=cap / 1e9 + 2, host_gb=25.0,
        needs=_needs(setup.sizes.shape),
    )  # fmt: skip


def _one_gpu(setup: Setup, shape: str, what: str, worth: int, arguments: tuple[str, ...], **options: Any) -> Case:
    sizes = setup.sizes
    command = (
        "-m", "benchmarks.one_gpu", "--shape", shape, "--at-once", "--rounds", str(sizes.rounds), "--steps",
        str(sizes.steps), "--backend", sizes.backend, *arguments, *_common(setup),
    )  # fmt: skip
    options = {"device_gb": 45.0, "own_cache": True, **options, "needs": (*_needs(shape), *options.get("needs", ()))}
    if sizes.backend == "eager":
        options["variables"] = {"TORCHDYNAMO_DISABLE": "1"}  # what torch.compile would build
    return Case(f"{shape}, {what}", "speed", worth, options.pop("cost"), command, **options)


def _kernel(setup: Setup, worth: int, group: str) -> Case:
    """``benchmarks.kernels`` for one group; on a CPU, one of those for CPUs stands for each."""
    name = group if setup.device == "cuda" else "products"
    command = ("-m", "benchmarks.kernels", "--device", setup.device, "--groups", name, "--out", OUT)
    return Case(
        f"kernel {group}", "kernels", worth, 19, (*command, *setup.sizes.kernel_arguments), device_gb=8.0,
        needs=("triton",) if setup.device == "cuda" else (),
    )  # fmt: skip


def _largest(
    setup: Setup, worth: int, name: str, tier: str | None, layers: int, *, cost: float, accumulate: int = 1,
    needs: tuple[str, ...] = (),
) -> Case:  # fmt: skip
    """A model of so many layers of the deep shape, whose building takes longer than a turn may."""
    request = {
        "shape": setup.sizes.deep, "changes": {"depth": layers}, "tier": tier, "device": setup.device,
        "dtype": setup.dtype, "budget": int(DEVICE_SHARE * setup.device_bytes), "host_budget": setup.host_bytes,
        "drive_bytes": setup.drive_bytes, "accumulate": accumulate,
    }  # fmt: skip
    times = f", {accumulate} micro-batches" if accumulate > 1 else ""
    return _worker(
        f"{name}, {layers} layers{times}", "offload", worth, cost, "largest", request, prepare_seconds=180.0,
        device_gb=setup.device_bytes / 1e9, host_gb=setup.host_bytes / 1e9 if tier else 8.0,
        needs=(*_needs(setup.sizes.deep), *needs),
    )  # fmt: skip


def _drive(setup: Setup, worth: int) -> Case:
    command = ("-m", "benchmarks.nvme_throughput", "--folder", str(setup.drive), "--out", OUT)
    return Case("the drive alone", "offload", worth, 30, (*command, *setup.sizes.drive_arguments), needs=("drive",))


def _common(setup: Setup) -> tuple[str, ...]:
    return ("--device", setup.device, "--dtype", setup.dtype, "--out", OUT)


def _needs(name: str) -> tuple[str, ...]:
    return ("transformers",) if "llama" in name else ()
