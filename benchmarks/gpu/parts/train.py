"""Part (b): the demo GPT and an unmodified Llama of transformers, next to plain torch from the same values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.gpu.case import Case, Entry, worker
from benchmarks.gpu.setup import Setup

WAYS = {"masters in fp32": True, "all in bf16": False}


def cases(setup: Setup, entries: Mapping[str, Entry]) -> Iterator[Case]:
    """Computation in bfloat16 with fp32 masters first, which is how models are trained."""
    for way, masters in WAYS.items():
        for model in ("gpt", "llama"):
            for backend in setup.sizes.backends:
                request = {
                    "model": model, "backend": backend, "masters": masters, "num_steps": setup.sizes.num_steps,
                    "num_sequences": setup.sizes.num_sequences, "device": setup.device,
                }  # fmt: skip
                needs = ("transformers",) if model == "llama" else ()
                yield worker(f"{model}, {backend}, {way}", "train_worker", request, needs=needs)
