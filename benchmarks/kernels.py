"""zerofx's kernels beside what torch and Inductor have for the same work, in one run.

    python -m benchmarks.kernels                    # those for CUDA
    python -m benchmarks.kernels --device cpu       # those for CPUs, with this process's threads

- **attention**, on a CPU: forward and backward in float32, of some shapes, causal, under a mask and without:
  ATen's operator and the kernel.
- **products**, on a CPU: a layer, the gradient of its input and that of its weight, in float32, of some sizes: ATen's
  BLAS, and what is taken from it. Operands go round, so that they come from memory.
- **update**: AdamW on one bucket with float32 masters and states, gradient and parameters in bfloat16: unscale, cast,
  update, copy. ATen's four kernels, the same arithmetic written out under ``torch.compile``, and the kernel.
- **quantise**, **sum**: a bucket in bfloat16 to 8 bits and the sum of 8 such parts back: ATen's operators, the same
  under ``torch.compile``, and the kernel.
- **norms**: the sum of the squares of a bucket's gradients in bfloat16: torch's norms of rows, the squares written out
  under ``torch.compile``, and the kernel.
- **loss**: an output layer with its cross-entropy, forward and backward, in bfloat16: whole logits under
  ``torch.compile``, torch's chunked ``linear_cross_entropy`` where torch has it, and tiles of classes.

Rounds alternate between the contenders of a group; times are of CUDA events, or of the clock on a CPU. Ratios are to
the group's first, of medians and of minima: a kernel is worth having below 1. "Of copy" is the share of a plain copy's
bytes a second, where all contenders are given the bytes that one pass has to move. Peak is what the allocator holds
beyond the inputs.

Writes ``benchmarks/results/kernels_<device>.json`` and a Markdown table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks.processes import device_name
from zerofx import norms, ops, quantise
from zerofx.peaks import CpuPeak
from zerofx.products import has_kernel
from zerofx.runtime.allocator import keep_freed_memory

RESULTS = Path(__file__).resolve().parent / "results"
LR, BETA1, BETA2, DECAY, EPS = 1e-3, 0.9, 0.95, 0.1, 1e-8
NUM_PARTS = 8
IGNORED = -100
# Samples, heads, tokens, dim: the benchmarks' GPT, a longer context, and wider heads.
ATTENTION_SHAPES = ((2, 8, 256, 64), (1, 8, 2048, 64), (1, 4, 1000, 128))
# Rows, inputs and outputs of a layer: those of the benchmarks' GPTs and Llama, and the output layer of GPT-2.
LAYERS = (
    (512, 512, 512), (512, 512, 2048), (512, 2048, 512), (512, 512, 8192), (512, 512, 1408), (512, 1408, 512),
    (512, 768, 2304), (512, 768, 3072), (512, 3072, 768), (512, 768, 50_257), (2048, 1024, 4096),
)  # fmt: skip
CACHED_BYTES = 128 << 20  # more than a processor's caches hold
_aten = torch.ops.aten


@dataclass(frozen=True)
class Group:
    """Contenders that do the same work in place of each other, the one that the others are compared with first.

    ``num_bytes``: what one pass over inputs and outputs moves; 0 where products dominate.
    """

    name: str
    contenders: Mapping[str, Callable[[], object]]
    num_bytes: int = 0


@dataclass
class Measured:
    """Seconds by round, and bytes held beyond the inputs."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def adamw_region(inputs: list[Any]) -> tuple[()]:
    """The update as the emitted step has it, on ATen's kernels."""
    master, grad, first, second, step, low, hyper = inputs
    inputs.clear()
    _aten.div_.Tensor(grad, 2)
    cast = _aten._to_copy.default(grad, dtype=torch.float32)
    _aten._foreach_add_.Scalar([step], 1)
    _aten._fused_adamw_.default(
        [master], [cast], [first], [second], [], [step], lr=hyper[0], beta1=hyper[1], beta2=hyper[2],
        weight_decay=hyper[3], eps=hyper[4], amsgrad=False, maximize=False,
    )  # fmt: skip
    _aten.copy_.default(low, master)
    return ()


def adamw_written_out(master: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: Tensor, low: Tensor) -> None:
    """The same arithmetic as operators that a compiler can fuse."""
    scaled = grad.div(2).float()
    step.add_(1)
    master.mul_(1 - LR * DECAY)
    first.lerp_(scaled, 1 - BETA1)
    second.mul_(BETA2).addcmul_(scaled, scaled, value=1 - BETA2)
    root = second.sqrt() / (1 - BETA2**step).sqrt() + EPS
    master.sub_(LR / (1 - BETA1**step) * first / root)
    low.copy_(master)


def update_inputs(numel: int, device: torch.device) -> list[Tensor]:
    """Master, gradient, moments, step and parameters of a bucket."""
    grad = torch.randn(numel, device=device).bfloat16()
    first, second = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    master = torch.randn(numel, device=device)
    return [master, grad, first, second, torch.zeros((), device=device), master.bfloat16()]


def update_group(numel: int, device: torch.device) -> Group:
    """An update by ATen, by Inductor and by the kernel."""
    from zerofx.codegen.kernels.update import make_update_kernel

    tensors, hyper = update_inputs(numel, device), (LR, BETA1, BETA2, DECAY, EPS)
    kernel = make_update_kernel(adamw_region, [*tensors, hyper], dying={1})
    compiled = torch.compile(adamw_written_out, fullgraph=True)
    contenders = {
        "torch": lambda: adamw_region([*tensors, hyper]),
        "torch.compile": lambda: compiled(*tensors),
        "kernel": lambda: kernel([*tensors, hyper]),
    }
    return Group("update", contenders, 28 * numel)


def quantise_group(numel: int, device: torch.device) -> Group:
    """Rounding to 8 bits by ATen, by Inductor and by the kernel."""
    values = torch.randn(numel, device=device).bfloat16()
    compiled = torch.compile(quantise.quantise_at_once, fullgraph=True)
    contenders = {
        "torch": lambda: quantise.quantise(values, NUM_PARTS, "int8"),
        "torch.compile": lambda: compiled(values, NUM_PARTS, "int8"),
        "kernel": lambda: torch.ops.zerofx.launch_quantise(values, NUM_PARTS, "int8"),
    }
    return Group("quantise", contenders, 2 * numel + quantise.packed_bytes(numel, "int8"))


def sum_group(numel: int, device: torch.device) -> Group:
    """The sum of parts in 8 bits by ATen, by Inductor and by the kernel."""
    packed = quantise.quantise(torch.randn(numel, device=device), NUM_PARTS, "int8")
    compiled = torch.compile(quantise.dequantise_sum_at_once, fullgraph=True)
    args = (packed, NUM_PARTS, "int8", torch.bfloat16)
    contenders = {
        "torch": lambda: quantise.dequantise_sum(*args),
        "torch.compile": lambda: compiled(*args),
        "kernel": lambda: torch.ops.zerofx.launch_dequantise_sum(*args),
    }
    return Group("sum", contenders, packed.numel() + 2 * numel // NUM_PARTS)


def norms_group(numel: int, device: torch.device) -> Group:
    """The sum of squares by torch's norms, by Inductor and by the kernel."""
    values = torch.randn(numel, device=device).bfloat16()
    compiled = torch.compile(squares_written_out, fullgraph=True)
    contenders = {
        "torch": lambda: norms.square_sum(values),
        "torch.compile": lambda: compiled(values),
        "kernel": lambda: torch.ops.zerofx.launch_square_sum(values),
    }
    return Group("norms", contenders, 2 * numel)


def squares_written_out(values: Tensor) -> Tensor:
    """Squares of whole rows as operators that a compiler can fuse."""
    return values.view(-1, norms.ROW).float().square().sum(1).double().sum(0, keepdim=True)


def loss_whole(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Loss and both gradients, with whole logits."""
    loss = F.cross_entropy(F.linear(x, weight).float(), target)
    return (loss, *torch.autograd.grad(loss, (x, weight)))


def loss_chunked(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """The same by torch's own chunks."""
    loss = F.linear_cross_entropy(x, weight, target, options=torch.nn.LinearCrossEntropyOptions())
    return (loss, *torch.autograd.grad(loss, (x, weight)))


def loss_by_classes(x: Tensor, weight: Tensor, target: Tensor, num_tiles: int) -> tuple[Tensor, ...]:
    """The same by tiles of classes, as ``passes/tile_classes.py`` writes them."""
    x, weight = x.detach(), weight.detach()
    bounds = [weight.shape[0] * n // num_tiles for n in range(num_tiles + 1)]
    runs = [(start, weight[start:end]) for start, end in itertools.pairwise(bounds)]
    kept, stats = target != IGNORED, None
    for start, part in runs:
        stats = ops.softmax_chunk(x @ part.t(), target, start, stats)
    assert stats is not None
    log_sums = stats[1].log() + stats[0]
    count = kept.sum(dtype=torch.float32)
    loss = torch.where(kept, log_sums - stats[2], 0.0).sum() / count
    grad_x = torch.zeros(x.shape, device=x.device)
    parts = []
    for start, part in runs:
        grad = x @ part.t()
        ops.softmax_gradient(grad, target, start, log_sums, 1 / count, IGNORED)
        grad_x += grad @ part
        parts.append(grad.t() @ x)
    return loss, grad_x.to(x.dtype), torch.cat(parts)


def loss_inputs(num_rows: int, dim: int, num_classes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weight and targets of an output layer."""
    x = torch.randn(num_rows, dim, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(num_classes, dim, device=device) / dim**0.5).bfloat16().requires_grad_()
    return x, weight, torch.randint(num_classes, (num_rows,), device=device)


def loss_group(num_rows: int, dim: int, num_classes: int, device: torch.device) -> Group:
    """A loss with whole logits under Inductor, by torch's chunks, and by tiles of classes."""
    given = loss_inputs(num_rows, dim, num_classes, device)
    compiled = torch.compile(loss_whole)
    contenders: dict[str, Callable[[], object]] = {"torch.compile": lambda: compiled(*given)}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        contenders["torch, chunked"] = lambda: loss_chunked(*given)
    for num_tiles in (8, 32):
        contenders[f"{num_tiles} tiles of classes"] = partial(loss_by_classes, *given, num_tiles)
    return Group("loss", contenders)


def attention_group(samples: int, heads: int, tokens: int, dim: int, *, seen: str, backward: bool) -> Group:
    """Attention, or its gradients, by ATen and by the kernel, of views of one product as models have them.

    ``seen``: "all", "causal", or "mask" for a causal mask that is given as a tensor, one for each sample.
    """
    packed = torch.randn(samples, tokens, 3 * heads * dim)
    query, key, value = (one.unflatten(-1, (heads, dim)).transpose(1, 2) for one in packed.split(heads * dim, -1))
    is_causal = seen == "causal"
    mask = torch.full((samples, 1, tokens, tokens), -math.inf).triu(1) if seen == "mask" else None
    forward = partial(_aten._scaled_dot_product_flash_attention_for_cpu, attn_mask=mask)
    results = forward(query, key, value, 0.0, is_causal)
    grad, given = torch.randn_like(results[0]), (query, key, value, *results)
    contenders: dict[str, Callable[[], object]] = {
        "torch": partial(forward, query, key, value, 0.0, is_causal),
        "kernel": partial(ops.attention, query, key, value, mask, is_causal, None),
    }
    if backward:
        theirs = partial(_aten._scaled_dot_product_flash_attention_for_cpu_backward, attn_mask=mask)
        contenders = {
            "torch": partial(theirs, grad, *given, 0.0, is_causal),
            "kernel": partial(ops.attention_backward, grad, *given, mask, is_causal, None),
        }
    name = f"attention {samples}x{heads}x{tokens}x{dim}"
    return Group(f"{name}{'' if seen == 'all' else f', {seen}'}{', backward' if backward else ''}", contenders)


def products_group(rows: int, num_inputs: int, num_outputs: int, *, kind: str) -> Group:
    """A layer's product (``kind`` "layer"), or that of its input's or weight's gradient, by ATen and as it is taken.

    Where it is left to ATen, the second is what it is not taken for.
    """
    each = 4 * (rows * num_inputs + rows * num_outputs + num_inputs * num_outputs)
    given = itertools.cycle(
        [
            (torch.randn(rows, num_inputs), torch.randn(num_outputs, num_inputs), torch.randn(rows, num_outputs))
            for _ in range(max(2, CACHED_BYTES // each))
        ]
    )

    def operands() -> tuple[Tensor, Tensor]:
        x, weight, grad = next(given)
        return {"layer": (x, weight.t()), "input": (grad, weight), "weight": (grad.t(), x)}[kind]

    into = torch.empty(num_outputs, num_inputs)
    name = "taken" if has_kernel(*operands(), None) else "not taken"
    contenders: dict[str, Callable[[], object]] = {
        "torch": lambda: torch.mm(*operands()),
        name: lambda: ops.product(*operands(), None),
    }
    if kind == "weight":  # written into its place, as in a bucket
        contenders = {
            "torch": lambda: torch.mm(*operands(), out=into),
            name: lambda: ops.product_into(into, *operands()),
        }
    of = {"layer": "", "input": ", gradient of the input", "weight": ", gradient of the weight"}[kind]
    return Group(f"layer {rows}x{num_inputs}x{num_outputs}{of}", contenders)


def measure(group: Group, num_rounds: int, device: torch.device) -> dict[str, Measured]:
    """All contenders of a group, round by round in turn."""
    found = {name: Measured() for name in group.contenders}
    for name, run in group.contenders.items():
        for _ in range(3):  # the first compiles
            run()
        found[name].peak_bytes = peak_bytes(run, device)
    for _ in range(num_rounds):
        for name, run in group.contenders.items():
            found[name].seconds.append(seconds(run, device))
    return found


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most that one call holds beyond what is there before it."""
    if device.type == "cpu":
        with CpuPeak() as peak:
            run()
        return peak.num_bytes
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of one call."""
    if device.type == "cpu":
        begun_seconds = time.perf_counter()
        run()
        return time.perf_counter() - begun_seconds
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    run()
    done.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(done)) / 1e3


def copy_bandwidth(numel: int, device: torch.device, num_rounds: int) -> float:
    """Bytes a second that a copy of ``numel`` float32 reads and writes."""
    source, destination = torch.empty(2, numel, device=device).unbind()
    found = measure(Group("copy", {"copy": lambda: destination.copy_(source)}), num_rounds, device)
    return 8 * numel / statistics.median(found["copy"].seconds)


def rows(group: Group, found: Mapping[str, Measured], copy_bandwidth: float) -> list[dict[str, Any]]:
    """A row for each contender; ``copy_bandwidth`` in bytes a second."""
    first = next(iter(found.values()))
    made = []
    for name, one in found.items():
        median = statistics.median(one.seconds)
        made.append(
            {
                "group": group.name,
                "contender": name,
                "median_seconds": median,
                "min_seconds": min(one.seconds),
                "ratio": median / statistics.median(first.seconds),
                "min_ratio": min(one.seconds) / min(first.seconds),
                "of_copy": group.num_bytes / median / copy_bandwidth if group.num_bytes else None,
                "peak_bytes": one.peak_bytes,
            }
        )
    return made


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Rows as Markdown."""
    headers = ["", "contender", "median, ms", "min, ms", "ratio", "of minima", "of copy", "peak, MiB"]
    lines = [
        [
            row["group"], row["contender"], f"{row['median_seconds'] * 1e3:.3f}", f"{row['min_seconds'] * 1e3:.3f}",
            f"{row['ratio']:.2f}", f"{row['min_ratio']:.2f}",
            "" if row["of_copy"] is None else f"{row['of_copy']:.0%}", f"{row['peak_bytes'] / 2**20:.1f}",
        ]
        for row in found
    ]  # fmt: skip
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--millions", type=int, default=128, help="elements of a bucket, in units of 2**20")
    parser.add_argument("--rows", type=int, default=8192, help="of the loss")
    parser.add_argument("--dim", type=int, default=4096, help="of the output layer's input")
    parser.add_argument("--classes", type=int, default=128_256)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device, numel = torch.device(options.device), options.millions << 20
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("expected a CUDA GPU, found none: give --device cpu; nothing was measured, nothing written")
    if device.type == "cuda":
        name = device_name("cuda")
        makers: list[Callable[[], Group]] = [
            lambda: update_group(numel, device),
            lambda: quantise_group(numel, device),
            lambda: sum_group(numel, device),
            lambda: norms_group(numel, device),
            lambda: loss_group(options.rows, options.dim, options.classes, device),
        ]
    else:
        name = f"{device_name('cpu')}, {torch.get_num_threads()} threads"
        makers = [
            partial(attention_group, *shape, seen=seen, backward=backward)
            for shape in ATTENTION_SHAPES
            for seen in ("causal", "mask", "all")
            for backward in (False, True)
        ]
        makers += [
            partial(products_group, *layer, kind=kind) for layer in LAYERS for kind in ("layer", "input", "weight")
        ]
        keep_freed_memory()  # as steps do
    bandwidth = copy_bandwidth(numel, device, options.rounds)
    found: list[dict[str, Any]] = []
    for make in makers:
        group = make()
        found += rows(group, measure(group, options.rounds, device), bandwidth)
        print(table(found[-len(group.contenders) :]), flush=True)
        del group
        torch.cuda.empty_cache()
    data = {"device": name, "torch": torch.__version__, "copy_bytes_per_second": bandwidth, "rows": found}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"kernels_{device.type}.json").write_text(json.dumps(data, indent=1))
    (options.out / f"kernels_{device.type}.md").write_text(f"{name}, torch {torch.__version__}\n\n{table(found)}\n")


if __name__ == "__main__":
    main()
