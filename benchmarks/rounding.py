"""The rounding errors of 8 bits on the wire, integer and floating point, by distribution of the values in a block.

    python -m benchmarks.rounding

- **error**: the norm of all that is rounded off, as a part of the norm of the values.
- **typical**: half of the values that are not zero are off by at most this part of themselves.
- **lost**: the part of the values that are not zero and come back as zero.

Gradients and parameters are those of a small GPT on the standard library's source, after ``--steps`` steps of AdamW.
Prints a Markdown table; ``docs/wire.md`` shows one.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor

from zerofx.ir.op_kernels.quantise import BLOCK, dequantise, quantise

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 128  # of a sequence
NUM_BLOCKS = 1024
COMPARED = ("int8", "fp8")


def made_up() -> dict[str, Tensor]:
    """Blocks of float32 from flat to heavy-tailed, seeded."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_BLOCKS, BLOCK)
    normal = torch.randn(shape, generator=generator)
    with_outlier = normal.clone()
    with_outlier[:, 0] = 100.0
    chi_square = torch.randn((2, *shape), generator=generator).square().sum(0)
    return {
        "uniform from -1 to 1": 2 * torch.rand(shape, generator=generator) - 1,
        "normal": normal,
        "Student's t, 2 degrees of freedom": torch.randn(shape, generator=generator) / (chi_square / 2).sqrt(),
        "normal, and one value of 100 in a block": with_outlier,
        "log-normal, sigma 3": (3 * torch.randn(shape, generator=generator)).exp(),
    }


def of_training(num_steps: int) -> dict[str, Tensor]:
    """Gradients and parameters of a small GPT after some steps, each flat, in whole blocks."""
    from gpt import GPT  # of the examples' folder
    from text import VOCAB, Batches, load_source

    torch.manual_seed(0)
    model = GPT(VOCAB, 128, 4, 4, TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for tokens, targets in itertools.islice(Batches(load_source()[0], TOKENS, 4), num_steps):
        optimizer.zero_grad()
        model(tokens, targets).backward()
        optimizer.step()
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return {f"gradients of a GPT, step {num_steps}": _flat(gradients), "its parameters": _flat(parameters)}


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return flat[: flat.numel() // BLOCK * BLOCK]


def rounded_off(values: Tensor, encoding: str) -> dict[str, float]:
    """What ``values``, whole blocks, lose: see the module's docstring."""
    back = dequantise(quantise(values.flatten(), 1, encoding), 1, encoding, values.dtype).view_as(values)
    off, is_nonzero = (back - values).abs(), values != 0
    return {
        "error": float(off.norm() / values.norm()),
        "typical": float((off[is_nonzero] / values[is_nonzero].abs()).median()),
        "lost": float((back[is_nonzero] == 0).double().mean()),
    }


def table(examples: Mapping[str, Tensor]) -> str:
    """A row for each of ``examples`` as Markdown, a column for each measure and encoding."""
    columns = [(measure, encoding) for measure in ("error", "typical", "lost") for encoding in COMPARED]
    rows = []
    for name, values in examples.items():
        errors = {encoding: rounded_off(values, encoding) for encoding in COMPARED}
        rows.append([name, *(f"{errors[encoding][measure]:.2%}" for measure, encoding in columns)])
    headers = ["values", *(f"{measure}, {encoding}" for measure, encoding in columns)]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="of the GPT")
    options = parser.parse_args()
    sys.path.append(str(ROOT / "examples"))
    print(table({**made_up(), **of_training(options.steps)}))


if __name__ == "__main__":
    main()
