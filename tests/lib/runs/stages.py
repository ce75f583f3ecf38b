"""Trainings on the axis ``pipe``, and what they are held against: the same on ranks without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.distributed import run_ranks
from tests.lib.models import adamw
from tests.lib.models.huggingface import bert, mixtral, t5, vit
from tests.lib.runs.whole_optimizers import ByAllNorms, Matrices
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.torch_private.operators import pytree

STEPS = 10
_NUMBERS = ("loss", "grad_norm", "loss_scale", "skipped_steps")
Given = tuple[tuple[Tensor, ...], dict[str, Tensor]]


class Dropping(nn.Module):
    """A GPT with dropout behind each block."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.gpt = GPT(vocab=19, dim=16, depth=depth, heads=2, block=16)
        for block in self.gpt.layers:
            block.register_forward_hook(lambda _module, _given, result: nn.functional.dropout(result, 0.2))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        result: Tensor = self.gpt(ids, targets)
        return result


class UNet(nn.Module):
    """Convolutions without layers that repeat, whose values skip over others."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_convolution(3, 8), _convolution(8, 16)])
        self.middle = _convolution(16, 16)
        self.up = nn.ModuleList([_convolution(32, 8), _convolution(16, 8)])
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        skipped = []
        for down in self.down:
            skipped.append(down(images))
            images = nn.functional.avg_pool2d(skipped[-1], 2)
        images = self.middle(images)
        for up in self.up:
            images = up(torch.cat([nn.functional.interpolate(images, scale_factor=2), skipped.pop()], 1))
        return nn.functional.mse_loss(self.head(images), targets)


class Scaled(nn.Module):
    """Divides by a running mean of magnitudes, which it changes then: its backward reads what it was."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        scaled = images / self.scale.clone()
        self.scale.lerp_(images.detach().abs().mean(), 0.3)
        return scaled


class Norms(nn.Module):
    """Convolutions, each with batch norm, and a scale that is a buffer too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Scaled())
            for channels in (3, 8, 8, 8)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            images = block(images)
        return nn.functional.cross_entropy(self.head(images.mean((2, 3))), labels)


class Telling(nn.Module):
    """Gives what its layers make besides its loss, of two of them alone the norms, one weight, and logs a number."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))
        self.register_buffer("count", torch.zeros(()))
        self.logged: list[float] = []

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = []
        for layer in self.layers:
            x = layer(x)
            hidden.append(x)
        self.count += 1
        self.logged.append(hidden[1].mean().item())
        norms = {"first": hidden[0].norm(), "last": x.norm(), "count": self.count}
        return {"loss": x.square().sum(), "hidden": hidden, "part": hidden[2][:, :4], **norms}


class Wide(nn.Module):
    """Two products with far larger weights than values, and some small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 512), nn.Linear(512, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.up(x).tanh())
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().sum()


class Tagger(nn.Module):
    """The mean loss of the tokens that have a label."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(16, 19)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        losses = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")
        return losses / (labels != -100).sum().clamp(min=1)


def count_labels(ids: Tensor, labels: Tensor) -> Tensor:
    """The terms of a tagger's loss."""
    return (labels != -100).sum(-1)


def with_logits(model: GPT, ids: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A GPT's loss, and with it what is computed of it."""
    loss = model(ids, targets)
    return loss, {"perplexity": loss.exp(), "ids": ids}


def _convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU())


def _gpt(depth: int = 4) -> nn.Module:
    return GPT(vocab=19, dim=16, depth=depth, heads=2, block=16)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=19, num_key_value_heads=2, max_position_embeddings=16, **sizes))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=19, n_embd=16, n_layer=4, n_head=2, n_positions=16, **ends))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "gpt": _gpt, "deep": partial(_gpt, 8), "dropout": Dropping, "u-net": UNet, "llama": _llama, "gpt2": _gpt2,
    "norms": Norms, "telling": Telling, "tagger": Tagger, "wide": Wide, "matrices": Matrices,
    "bert": partial(bert, 0.1), "t5": partial(t5, 0.1), "vit": partial(vit, 0.1), "mixtral": mixtral,
}  # fmt: skip
OPTIMIZERS: Mapping[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "Muon": lambda model: torch.optim.Muon(model.parameters(), lr=0.02),
    "by all norms": lambda model: ByAllNorms(model.parameters()),
}


@dataclass(frozen=True)
class Run:
    """A training: ranks that share no computation have batches of their own. A mesh may be chosen for one like them."""

    model: str
    mesh: Mapping[str, int] | Literal["auto"] | None
    accumulate: int
    options: tuple[tuple[str, Any], ...] = ()
    steps: int = STEPS
    optimizer: str = "AdamW"

    def on(self, mesh: Mapping[str, int] | None) -> Run:
        """The same training on other ranks, in the order of micro-batches that is usual there."""
        return replace(self, mesh=mesh, options=tuple(o for o in self.options if o[0] != "order"))


@dataclass(frozen=True)
class Outcome:
    """Losses and what else steps give, draws after the last, parameters in and after the step, states, and peaks."""

    values: list[Tensor]
    states: dict[str, Any]
    predicted: dict[str, int]
    measured: dict[str, int]
    idle_seconds: float | None


def stage_batch(model: str, rows: int, generator: torch.Generator) -> Given:
    if model == "u-net":
        images, targets = torch.randn(2, rows, 3, 8, 8, generator=generator)
        return (images, targets), {}
    if model in ("norms", "vit"):
        images = torch.randn(rows, 3, 8, 8, generator=generator)
        labels = torch.randint(5, (rows,), generator=generator)
        return ((images, labels), {}) if model == "norms" else ((), {"pixel_values": images, "labels": labels})
    if model in ("telling", "wide", "matrices"):
        return (torch.randn(rows, 6 if model == "matrices" else 8, generator=generator),), {}
    ids, labels = torch.randint(19, (2, rows, 16), generator=generator)
    if model == "tagger":
        length = 4 * int(torch.randint(1, 5, (), generator=generator))
        labels = torch.where(torch.rand(rows, 16, generator=generator) < 0.6, labels, -100)
        return (ids[:, :length], labels[:, :length]), {}
    return ((ids, labels), {}) if model in ("gpt", "deep", "dropout") else ((), {"input_ids": ids, "labels": labels})


def begin_run(run: Run) -> tuple[zerofx.Step, torch.optim.Optimizer, list[Given]]:
    torch.manual_seed(0)
    model = MODELS[run.model]()
    optimizer = OPTIMIZERS[run.optimizer](model)
    options = {"backend": "eager", "accumulate": run.accumulate, **dict(run.options)}
    step = zerofx.compile(model, optimizer, mesh=run.mesh, **options)
    if run.mesh == "auto":
        args, kwargs = stage_batch(run.model, 2 * run.accumulate, torch.Generator())
        sizes = step.choose_mesh(*args, **kwargs)
    else:
        sizes = Mesh(**(run.mesh or {}))
    data = dist.get_rank() // sizes.model % (sizes.replicate * sizes.shard) if dist.is_initialized() else 0
    torch.manual_seed(data)
    generator = torch.Generator().manual_seed(data + 1)
    return step, optimizer, [stage_batch(run.model, 2 * run.accumulate, generator) for _ in range(run.steps)]


def train_run(run: Run) -> Outcome:
    step, optimizer, given = begin_run(run)
    told = list[Tensor]()
    for args, kwargs in given:
        result = step(*args, **kwargs)
        numbers = {name: step.metrics[name] for name in step.metrics if name.partition("/")[0] in _NUMBERS}
        leaves = pytree.tree_leaves((result, step.outputs, numbers, getattr(step.model, "logged", [])))
        # As bits: the norm of a step that is left out is NaN.
        told += [torch.as_tensor(leaf).reshape(-1).clone().view(torch.uint8) for leaf in leaves if leaf is not None]
    draws, whole = torch.rand(3), step.full_state_dict()
    if "average" in dict(run.options):
        with step.averaged_parameters():
            whole |= {f"average of {name}": tensor.clone() for name, tensor in step.model.named_parameters()}
    args, kwargs = given[0]
    torch.manual_seed(7)
    measured, plan = step.measure(*args, **kwargs, num_steps=1), step.plan
    norm = [step.grad_norm] if "max_grad_norm" in dict(run.options) else []
    step.close()
    given_back = [tensor.detach().clone() for tensor in (*step.model.parameters(), *step.model.buffers())]
    idle = None if plan.prediction is None else plan.prediction.idle_seconds
    values = [*told, draws, *whole.values(), *norm, *given_back]
    return Outcome(values, optimizer.state_dict()["state"], plan.peak_bytes, measured.peak_bytes, idle)


def train_runs(runs: list[Run]) -> list[Outcome]:
    return [train_run(run) for run in runs]


def are_equal(result: Outcome, expected: Outcome) -> bool:
    alike = all(torch.equal(mine, other) for mine, other in zip(result.values, expected.values, strict=True))
    states = result.states.keys() == expected.states.keys() and all(
        torch.equal(torch.as_tensor(result.states[key][name]), torch.as_tensor(value))
        for key, entry in expected.states.items()
        for name, value in entry.items()
    )
    return alike and states


def check_runs(runs: list[Run], num_ranks: int, expected: list[list[Outcome]]) -> None:
    """Each rank has the bits of the rank with its data, and the bytes that were planned."""
    for rank, outcomes in enumerate(run_ranks(train_runs, num_ranks, runs)):
        for number, (run, result) in enumerate(zip(runs, outcomes, strict=True)):
            alone = expected[rank % len(expected)][number]
            assert are_equal(result, alone), f"rank {rank}: {run}"
            # Of ranks that own whole parameters, not all own as much as a plan counts.
            has_owners = run.optimizer == "Muon" and "shard" in (run.mesh or {})
            peaks = result.predicted if not has_owners else {"device": max(result.measured.values())}
            assert result.measured == peaks and peaks["device"] <= result.predicted["device"], f"rank {rank}: {run}"
            assert result.idle_seconds is not None and result.idle_seconds >= 0  # the slowest may never wait
