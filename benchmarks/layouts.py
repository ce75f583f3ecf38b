"""The layout that a plan chooses on the model axis and those that people write by hand, as the simulator has them.

    python -m benchmarks.layouts                          # a GPT and a Llama on 2, 4 and 8 ranks
    python -m benchmarks.layouts --models gpt --ranks 2

Nothing runs: each row is a plan of four layers of the GPT of 22B of Korthikanti et al. (2205.05198), or of Llama 3 8B,
in bfloat16 on H100s. Layouts are pinned with ``shardings=``, and what is not named is the plan's choice then too: where
tokens are shared, whether attention is exchanged for heads (Ulysses) or keys and values are gathered.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from tabulate import tabulate
from torch import nn

import zerofx
from benchmarks.lib.models import Shape, llama
from zerofx.units import format_bytes, format_seconds

CHOSEN: Final = "chosen"

Pins = dict[str, str]
"""Where operators and parameters lie, by patterns of their names."""


@dataclass(frozen=True)
class Named:
    """A model, with the names that people pin: products by columns and by rows."""

    shape: Shape
    columns: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def between(self) -> tuple[str, ...]:
        """What is between those: norms, and what layers give."""
        digits = range(1, len(str(self.shape.depth - 1)) + 1)
        return ("*norm*", *(f"*layers.{'?' * number}" for number in digits))


MODELS: Final[Mapping[str, Named]] = {
    "gpt": Named(
        Shape("gpt", vocab=51_200, dim=6144, depth=4, num_heads=64, tokens=2048, sequences=4),
        ("*.qkv", "*.up"),
        ("*.out",),
    ),
    "llama": Named(
        Shape("llama", 128_256, 4096, 4, 32, tokens=8192, sequences=1, inner=14_336, num_kv_heads=8),
        ("*.[qkv]_proj", "*.gate_proj", "*.up_proj"),
        ("*.o_proj", "*.down_proj"),
    ),
}


def layouts(named: Named) -> dict[str, Pins]:
    """What is pinned, by what people call it; nothing in the plan's own layout."""
    by_features = dict.fromkeys(named.columns, "column") | dict.fromkeys(named.rows, "row")
    return {
        CHOSEN: {},
        "tensor parallel": by_features | dict.fromkeys(named.between, "replicated"),
        "tensor and sequence parallel": by_features | dict.fromkeys(named.between, "sequence"),
        "tokens": {"*layers.*": "sequence"},
        "replicated": {"*": "replicated"},
    }


def planned(shape: Shape, pins: Pins, **options: Any) -> zerofx.PlannedStep:
    """A model's step, which lies as is pinned; ``options`` as for ``zerofx.plan``."""
    with torch.device("meta"):
        model = _gpt(shape) if shape.family == "gpt" else llama(shape)
    ids = torch.zeros(shape.sequences, shape.tokens, dtype=torch.int64)
    batch = {"tokens": ids, "targets": ids} if shape.family == "gpt" else {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options = {"machine": "h100-sxm", "precision": "bf16", **options}
    return zerofx.plan(model, optimizer, batch, shardings=pins, **options)


def _gpt(shape: Shape) -> nn.Module:
    from gpt import GPT  # of the examples' folder

    model: nn.Module = GPT(shape.vocab, shape.dim, shape.depth, shape.num_heads, shape.tokens)
    return model


def rows(names: list[str], ranks: list[int]) -> Iterator[list[str]]:
    for name in names:
        for num_ranks in ranks:
            least = None
            for layout, pins in layouts(MODELS[name]).items():
                try:
                    plan = planned(MODELS[name].shape, pins, mesh={"model": num_ranks}).plan
                except zerofx.UsageError as error:
                    yield [name, str(num_ranks), layout, str(error).splitlines()[0][:60]]
                    continue
                least = least or plan.step_seconds
                yield [
                    name, str(num_ranks), layout, format_seconds(plan.step_seconds),
                    f"{plan.step_seconds / least:.2f}", format_seconds(plan.exposed_seconds),
                    format_bytes(plan.wire_bytes), format_bytes(plan.peak_bytes["device"]),
                ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], metavar="T")
    options = parser.parse_args()
    headers = ["", "ranks", "layout", "step", "of the chosen", "exposed", "sent by a rank", "peak"]
    print(tabulate(rows(options.models, options.ranks), headers=headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
