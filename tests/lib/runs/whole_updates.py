"""Optimizers that need whole parameters, and what plain torch makes of a model that they train on several ranks."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.runs.training import world
from zerofx.optimizers.whole.states import copy_entry

Make = Callable[[nn.Module], torch.optim.Optimizer]
Saved = tuple[dict[str, Tensor], dict[str, Any]]


class Matrices(nn.Module):
    """Weights of uneven sizes, all of them matrices: none is a multiple of anything that buckets are padded to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes, bias=False) for sizes in ((6, 11), (11, 7), (7, 13), (13, 5)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean() + x.sum()


class Mixed(nn.Module):
    """Matrices, biases, a scalar, a batch of matrices, and a parameter that lies transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 6)
        self.experts = nn.Parameter(torch.randn(3, 6, 5) / 3)
        self.transposed = nn.Parameter(torch.randn(5, 6).t() / 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x) * self.scale))
        x = torch.einsum("bi,eij->bj", x, self.experts) + x @ self.transposed
        return F.softplus(x).mean() + x.square().sum()


class WithEmpty(Mixed):
    """The same and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.empty.sum()


class Uneven(nn.Module):
    """Parameters of as many elements as states in few bits begin with, one fewer and one more, and of uneven blocks."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(4095,), (64, 64), (17, 241), (17, 256), (4400,), (3,)]
        self.weights = nn.ParameterList(torch.randn(shape) / 3 for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        total, mean = x.new_zeros(()), x.mean()
        for number, weight in enumerate(self.weights):
            wave = torch.arange(weight.numel(), dtype=x.dtype).mul(0.37 + number).sin().view(weight.shape)
            total = total + (weight * wave + mean).square().mean() * 10
        return total


class ByNorms(torch.optim.Optimizer):
    """A step as long as a parameter's own norm says: it treats each parameter by itself, and needs all of it."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or not p.numel():
                    continue
                state = self.state[p]
                if not state:
                    state["means"] = [torch.zeros_like(p), torch.zeros(p.shape[:1])]
                    state["number"] = 0
                state["number"] += 1
                mean, rows = state["means"]
                mean.lerp_(p.grad, 0.3)
                rows.lerp_(p.grad.square().reshape(*p.shape[:1], -1).mean(-1) if p.dim() else p.grad.square(), 0.2)
                size = rows.sum().sqrt() + 1e-3
                p.add_(mean / size, alpha=-group["lr"] * float(p.norm().clamp(min=0.1)))


class ByAllNorms(torch.optim.Optimizer):
    """A step of the length that the norm of all gradients gives it, and no longer than the longest so far: what it
    knows of all parameters is a state of the optimizer itself."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        every = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.zeros(())
        for _, p in every:
            total.add_(p.grad.norm() ** 2)
        known = self.state["of all"]  # type: ignore[index]  # keys are no parameters alone
        known["largest"] = torch.maximum(known.get("largest", torch.zeros(())), total)
        known["number"] = known.get("number", 0) + 1
        for group, p in every:
            state = self.state[p]
            if not state:
                state["mean"] = torch.zeros_like(p)
            state["mean"].mul_(0.9).add_(p.grad)
            p.sub_(state["mean"] * (group["lr"] / known["largest"].sqrt()))


class Drawing(torch.optim.Optimizer):
    """Noise in proportion to a parameter's norm."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + torch.randn_like(p) * p.norm(), alpha=-group["lr"])


class Closing(torch.optim.Optimizer):
    """A step that computes the loss itself."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any) -> None:  # type: ignore[override]  # returns no loss
        closure()


def in_groups(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    """An optimizer over every second parameter in each of two groups, one with another learning rate."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        return kind([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}], **options)

    return make


MAKES: dict[str, tuple[type[nn.Module], Make]] = {
    "Muon": (Matrices, lambda m: torch.optim.Muon(m.parameters(), lr=0.02)),
    "Muon, groups": (Matrices, in_groups(torch.optim.Muon, momentum=0.8, adjust_lr_fn="match_rms_adamw")),
    "Muon, no Nesterov": (Matrices, lambda m: torch.optim.Muon(m.parameters(), lr=0.02, nesterov=False, ns_steps=3)),
    "Adafactor": (Mixed, lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05, weight_decay=0.01)),
    "by norms": (Mixed, lambda m: ByNorms(m.parameters())),
    "by norms, groups": (WithEmpty, in_groups(ByNorms)),
    "by all norms": (Mixed, lambda m: ByAllNorms(m.parameters())),
    "by all norms, groups": (WithEmpty, in_groups(ByAllNorms)),
}


class Tied(nn.Module):
    """Tokens and logits with one weight, and attention whose three projections are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(11, 6), nn.Linear(6, 18, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding((x.abs() * 7).long() % 11)
        q, k, v = (part.unsqueeze(1) for part in self.qkv(hidden).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits: Tensor = self.head(hidden + attended.squeeze(1))
        return logits.logsumexp(-1).mean()


class Experts(nn.Module):
    """Matrices of three experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.last = nn.Parameter(torch.randn(3, 6, 7) / 3), nn.Linear(7, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.tanh(torch.einsum("bi,eij->bj", x, self.experts)))
        return outputs.square().mean()


class ByMatrices(torch.optim.Optimizer):
    """Momentum whose matrices are orthogonalised one by one: those of a parameter of more dimensions are a batch, and
    those of ``heads`` rows each lie below one another."""

    def __init__(self, params: Any, lr: float = 0.05, heads: int = 1) -> None:
        super().__init__(params, {"lr": lr, "heads": heads})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 0.05)
                x = buffer.reshape(group["heads"], -1, p.shape[-1]) if p.dim() == 2 else buffer
                x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * (x @ x.mT) @ x
                p.sub_(x.reshape(p.shape), alpha=group["lr"])


def _in_bfloat16(**options: Any) -> Make:
    return lambda model: torch.optim.Muon(model.bfloat16().parameters(), lr=0.02, **options)


TRAPS: dict[str, tuple[type[nn.Module], Make]] = {
    "tied and fused": (Tied, lambda m: torch.optim.Muon(m.parameters(), lr=0.02)),
    "projections by heads": (
        Tied,
        lambda m: ByMatrices(
            [{"params": [m.get_parameter("embedding.weight")]}, {"params": [m.get_parameter("qkv.weight")], "heads": 3}]
        ),
    ),
    "experts": (Experts, lambda m: ByMatrices(m.parameters())),
    "bfloat16": (Matrices, _in_bfloat16()),
    "bfloat16, no Nesterov": (Matrices, _in_bfloat16(nesterov=False)),
}


def _torchao(kind: str) -> Make:
    """An optimizer of torchao, which takes a second to import."""
    return lambda model: getattr(importlib.import_module("torchao.optim"), kind)(model.parameters(), lr=0.01)


def _bitsandbytes(kind: str) -> Make:
    return lambda model: getattr(importlib.import_module("bitsandbytes.optim"), kind)(model.parameters(), lr=0.01)


IN_FEW_BITS: dict[str, tuple[type[nn.Module], Make]] = {
    **{f"torchao {kind}": (Uneven, _torchao(kind)) for kind in ("AdamW8bit", "AdamW4bit", "AdamWFp8")},
    **{f"bitsandbytes {kind}": (Uneven, _bitsandbytes(kind)) for kind in ("AdamW8bit", "Adam8bit", "Lion8bit")},
}


@dataclass(frozen=True)
class WholeCase:
    """An optimizer of ``MAKES``, ``IN_FEW_BITS`` or ``TRAPS``, the options of ``compile`` that it trains with, and how
    many steps it takes."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 4

    def __str__(self) -> str:
        return ", ".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(7)
        kind, make = (MAKES | IN_FEW_BITS | TRAPS)[self.name]
        model = kind()
        return model, make(model)

    def batches(self, num_ranks: int) -> list[list[Tensor]]:
        """By step, what each rank trains on; the same on every rank."""
        generator = torch.Generator().manual_seed(5)
        dtype = torch.bfloat16 if "bfloat16" in self.name else torch.float32
        return [[torch.randn(8, 6, generator=generator).to(dtype) for _ in range(num_ranks)] for _ in range(self.steps)]


class AllRanks:
    """Plain torch on one process, with the mean of all ranks' gradients, summed in the order of ranks."""

    def __init__(self, case: WholeCase, saved: Saved | None = None) -> None:
        self.case = case
        self.model, self.optimizer = case.build()
        if saved is not None:
            self.model.load_state_dict(saved[0])
            self.optimizer.load_state_dict(saved[1])

    def step(self, batch: Sequence[Tensor], norm: Tensor | None = None) -> Tensor:
        """One step; returns this rank's loss. ``norm``: that of all gradients, where they are clipped."""
        accumulate = self.case.options.get("accumulate", 1)
        losses, gradients = [], []
        for rows in batch:
            self.optimizer.zero_grad()
            total = torch.zeros(())
            for part in rows.chunk(accumulate):
                loss = self.model(part) / accumulate
                loss.backward()
                total = loss.detach() if accumulate == 1 else total + loss.detach()
            losses.append(total)
            gradients.append([p.grad for p in self.model.parameters()])
        for p, of_ranks in zip(self.model.parameters(), zip(*gradients, strict=True), strict=True):
            total = sum_in_order([g for g in of_ranks if g is not None], self.case.options.get("mesh"))
            p.grad = total / len(batch)
        if norm is not None:
            parameters = list(self.model.parameters())
            own = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            torch.testing.assert_close(own, norm, rtol=1e-5, atol=0.0)
            nn.utils.clip_grads_with_norm_(parameters, self.case.options["max_grad_norm"], norm)
        self.optimizer.step()
        return losses[world()[0]]

    def saved(self) -> Saved:
        state = self.optimizer.state_dict()
        copied = {key: copy_entry(entry) for key, entry in state["state"].items()}
        groups = copy.deepcopy(state["param_groups"])
        return {k: v.clone() for k, v in self.model.state_dict().items()}, {"state": copied, "param_groups": groups}


def sum_in_order(gradients: list[Tensor], mesh: Mapping[str, int] | None) -> Tensor:
    """The sum over ranks in their order, as the gradients lie in memory; on a mesh that of each replica first."""
    each = len(gradients) if mesh is None else mesh["shard"]
    sums = [reduce(torch.add, gradients[start : start + each]) for start in range(0, len(gradients), each)]
    return reduce(torch.add, sums)


def compiled(case: WholeCase, saved: Saved | None = None, **options: Any) -> tuple[zerofx.Step, torch.optim.Optimizer]:
    """A compiled step of a case, and its optimizer; ``saved``: loaded before it is compiled."""
    model, optimizer = case.build()
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    return zerofx.compile(model, optimizer, **{"backend": "eager", **case.options, **options}), optimizer


def unlike(expected: Saved, found: Saved) -> list[str]:
    """What is not the same to the bit, by name."""
    wrong = [name for name, value in expected[0].items() if not torch.equal(value, found[0][name])]
    if expected[1]["param_groups"] != found[1]["param_groups"]:
        wrong.append("param_groups")
    one, other = ({k: entry for k, entry in saved[1]["state"].items() if entry} for saved in (expected, found))
    return wrong + _unlike(one, other, "state")


def _unlike(one: Any, other: Any, where: str) -> list[str]:
    if type(one) is not type(other):
        return [f"{where}: {type(one).__name__}, {type(other).__name__}"]
    if isinstance(one, Tensor) and hasattr(one, "__tensor_flatten__"):
        names, _ = one.__tensor_flatten__()
        return [text for name in names for text in _unlike(getattr(one, name), getattr(other, name), f"{where}.{name}")]
    if isinstance(one, Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [f"{where}: {one.flatten()[:3].tolist()}, {other.flatten()[:3].tolist()}"]
    if isinstance(one, (dict, list, tuple)):
        if len(one) != len(other) or (isinstance(one, dict) and one.keys() != other.keys()):
            return [f"{where}: {one.keys() if isinstance(one, dict) else len(one)} expected"]
        pairs = [(key, one[key], other[key]) for key in (one if isinstance(one, dict) else range(len(one)))]
        return [text for key, a, b in pairs for text in _unlike(a, b, f"{where}[{key}]")]
    return [] if one == other else [f"{where}: {one}, {other}"]


def differences_of(case: WholeCase) -> list[str]:
    """What a compiled step of a case does otherwise than plain torch with all ranks' gradients, on this rank."""
    rank, num_ranks = world()
    plain = AllRanks(case)
    step, optimizer = compiled(case)
    wrong = []
    try:
        for number, batch in enumerate(case.batches(num_ranks)):
            loss = step(batch[rank]).clone()
            norm = step.grad_norm if "max_grad_norm" in case.options else None
            if not torch.equal(loss, plain.step(batch, norm)):
                wrong.append(f"loss {number}")
        wrong += unlike(plain.saved(), (step.full_state_dict(), optimizer.state_dict()))
    finally:
        step.close()
    return [f"{case}: {text}" for text in wrong]


def resumed_differences(folder: str, case: WholeCase, half: int) -> list[str]:
    """Train the first ``half`` of a case and save it, or load it and train the rest: what differs at the end."""
    num_ranks = world()[1]
    batches = replace(case, steps=2 * half).batches(1)
    plain = AllRanks(case)
    step, optimizer = compiled(case)
    is_first = not any(Path(folder).iterdir())
    if not is_first:
        step.load_checkpoint(folder)
    for number, batch in enumerate(batches):
        plain.step(batch * num_ranks)
        if (number < half) == is_first:
            step(batch[0])
        if is_first and number == half - 1:
            step.save_checkpoint(folder)
            break
    wrong = unlike(plain.saved(), (step.full_state_dict(), optimizer.state_dict()))
    step.close()
    return [f"{case} on {num_ranks}: {text}" for text in wrong]
