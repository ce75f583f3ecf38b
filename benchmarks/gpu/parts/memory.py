"""Part (c): predicted next to measured peaks, for budgets of shares of what a step takes without one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu.case import Case, Entry, worker
from benchmarks.gpu.setup import Setup

# In order of worth, for what a time limit cuts off: the whole range first.
SHARES = (1.0, 0.6, 0.3, 0.8, 0.4, 0.5)
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def cases(setup: Setup, entries: Mapping[str, Entry]) -> Iterator[Case]:
    """1B and 8B with compiled regions, then 1B on ATen, and with segments that grow."""
    sizes = setup.sizes
    *others, backend = sizes.backends
    yield from budgets(setup, entries, sizes.shape, {}, backend, SHARES)
    yield from budgets(setup, entries, sizes.deep, {"depth": sizes.deep_layers}, backend, SHARES)
    for other in others:
        yield from budgets(setup, entries, sizes.shape, {}, other, (1.0, 0.6, 0.3))
    yield from budgets(setup, entries, sizes.shape, {}, backend, (1.0, 0.6), SEGMENTS, ", expandable segments")


def budgets(
    setup: Setup,
    entries: Mapping[str, Entry],
    shape: str,
    changes: Mapping[str, int],
    backend: str,
    shares: tuple[float, ...],
    variables: Mapping[str, str] | None = None,
    suffix: str = "",
) -> Iterator[Case]:
    """The first without a budget: the others are shares of what is predicted for it."""
    prefix = named(shape, changes, backend) + suffix
    for share in shares:
        budget = None if share == 1.0 else share
        yield step_case(prefix, shape, changes, backend, budget, setup, entries, variables=variables or {})


def named(shape: str, changes: Mapping[str, int], backend: str) -> str:
    """What the cases of a shape are called before their budget."""
    layers = f", {changes['depth']} layers" if changes else ""
    return f"{shape}{layers}, {backend}"


def step_case(
    prefix: str,
    shape: str,
    changes: Mapping[str, int],
    backend: str,
    share: float | None,
    setup: Setup,
    entries: Mapping[str, Entry],
    *,
    variables: Mapping[str, str] | None = None,
    machine: str | None = None,
) -> Case:
    """A step within a share of what the case of the same ``prefix`` without a budget is predicted to take.

    ``machine``: what it is planned for, as ``Machine.to_json`` has it; None for the built-in row.
    """
    request: dict[str, Any] = {
        "shape": shape, "changes": changes, "backend": backend, "device": setup.device, "dtype": setup.dtype,
        "host_budget": setup.host_bytes, "machine": machine,
    }  # fmt: skip
    whole_name, blocked = f"{prefix}, no budget", ""
    if share is not None:
        whole = entries[whole_name].results.get("predicted_bytes")
        blocked = "" if whole else f"{whole_name}: {entries[whole_name].status}"
        request["budget"] = int(share * whole["device"]) if whole else None
    return worker(
        whole_name if share is None else f"{prefix}, {share} of that",
        "step_worker",
        request,
        needs=("transformers",) if "llama" in shape else (),
        blocked=blocked,
        variables=variables or {},
    )
