"""All optimizers of ``torch.optim`` and of ``pytorch_optimizer``, with their options, over a small model."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

Options = Mapping[str, Any]
Groups = list[dict[str, Any]]

VARIANTS: Final = (
    "plain", "weight decay", "schedule", "two groups", "bfloat16", "restored", "resumed", "stage 0", "stage 3",
)  # fmt: skip
_WORLDS: Final = {"bfloat16": (1,), "stage 0": (3,), "stage 3": (3,)}  # of other variants one and two ranks


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer of a library, and how it is tried: with ``options``, which go to its constructor."""

    name: str
    variant: str
    num_ranks: int
    options: Options = field(default_factory=dict, hash=False)

    @property
    def full_variant(self) -> str:
        """Variant, options and number of ranks."""
        options = "".join(f", {key}={value}" for key, value in self.options.items() if key not in _NEEDED)
        return f"{self.variant}{options}, {self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"

    @property
    def num_ranks_before(self) -> int:
        """The ranks that train until the checkpoint from which it is resumed."""
        return self.num_ranks + (self.variant == "resumed")

    @property
    def rounds_ends(self) -> bool:
        """Whether its kernels round the ends of a tensor otherwise, and a slice has others (docs/design/passes.md)."""
        return self.dtype == torch.bfloat16 or "fused" in self.options or self.name in _ROUND_ENDS

    @property
    def stage(self) -> int:
        """Stage 3 where the variant says no other."""
        kind, _, number = self.variant.partition(" ")
        return int(number) if kind == "stage" else 3

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's parameters."""
        return torch.bfloat16 if self.variant == "bfloat16" else torch.float32

    def model(self) -> nn.Module:
        """The same values each time."""
        torch.manual_seed(11)
        # Of what rounds ends, slices are whole vectors of 32 elements on as many ranks.
        sizes = (192 if 3 in (self.num_ranks, self.num_ranks_before) else 64,) * 3 if self.rounds_ends else (5, 8, 8, 3)
        with_bias = self.name not in _OF_MATRICES and not self.options.get("use_muon")
        layers = [nn.Linear(a, b, with_bias) for a, b in itertools.pairwise(sizes)]
        return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).to(self.dtype)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over all parameters, in two groups where the variant says so; in its mode for training, if it has one."""
        optimizer = self._make(model)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    def _make(self, model: nn.Module) -> torch.optim.Optimizer:
        options = dict(self.options)
        library, _, name = self.name.partition(".")
        if self.variant == "weight decay":
            options["weight_decay"] = 0.1
        parameters = list(model.parameters())
        groups: Groups = [{"params": parameters}]
        if self.variant == "two groups":
            half = len(parameters) // 2
            groups = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.003}]
        for group in groups:
            group.update({key: options[key] for key in ("use_muon",) if key in options})
        options.pop("use_muon", None)
        if name in _OVER_A_MODEL:
            return _class(library, name)(model, **options)
        return _WRAPPERS[name](groups, options) if name in _WRAPPERS else _class(library, name)(groups, **options)


def optimizer_cases() -> list[OptimizerCase]:
    """Every optimizer in every variant that it has."""
    cases = []
    for name, options in [*_of_torch(), *_of_pytorch_optimizer()]:
        for variant in VARIANTS:
            if variant == "weight decay" and not _takes_weight_decay(name):
                continue
            if variant == "two groups" and name.partition(".")[2] in _OVER_A_MODEL:
                continue
            if (name, variant) == ("torch.optim.SGD", "bfloat16") and "fused" in options:
                continue  # torch's kernel reads uninitialised memory there (pytorch issue 191763, up to torch 2.13)
            worlds = _WORLDS.get(variant, (1, 2))
            cases += [OptimizerCase(name, variant, num_ranks, options) for num_ranks in worlds]
    return cases


_NEEDED: Final = ("lr", "num_data", "num_iterations")
_OVER_A_MODEL: Final = ("adalomo", "lomo", "adammini")
_NEED_GROUPS: Final = ("adago", "adamuon", "distributedmuon", "muon", "muonclip", "normuon")
# Those that take powers, logarithms or sigmoids of tensors.
_ROUND_ENDS: Final = ("pytorch_optimizer.adamg", "pytorch_optimizer.diffgrad")
# Those that refuse vectors, as ``use_muon`` does.
_OF_MATRICES: Final = ("torch.optim.Muon", "pytorch_optimizer.spectralsphere")
# What is not installed here, and not asked for: einops.
_LEFT_OUT: Final = ("demo",)


def _wrapped(name: str, make: Callable[..., torch.optim.Optimizer]) -> Callable[[Groups, Options], Any]:
    return lambda groups, options: _class("pytorch_optimizer", name)(make(groups, **options))


def _sharpness(name: str) -> Callable[[Groups, Options], Any]:
    return lambda groups, options: _class("pytorch_optimizer", name)(
        groups, base_optimizer=torch.optim.AdamW, **options
    )


_WRAPPERS: Final[Mapping[str, Callable[[Groups, Options], Any]]] = {
    **{name: _wrapped(name, torch.optim.AdamW) for name in ("Lookahead", "OrthoGrad", "ScheduleFreeWrapper", "TRAC")},
    **{name: _sharpness(name) for name in ("FriendlySAM", "LookSAM", "SAM")},
}


def _of_torch() -> list[tuple[str, Options]]:
    lr = {"lr": 0.01}
    names = [
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    ]
    more: list[tuple[str, Options]] = [
        *((name, {"foreach": True}) for name in names if name not in ("LBFGS", "SparseAdam", "Muon")),
        *((name, {"fused": True}) for name in ("Adam", "AdamW", "SGD", "Adagrad")),
        *((name, {"amsgrad": True}) for name in ("Adam", "AdamW")),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("SGD", {"momentum": 0.9, "dampening": 0.1, "maximize": True}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("NAdam", {"decoupled_weight_decay": True}),
        ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    ]
    return [(f"torch.optim.{name}", {**lr, **options}) for name, options in [*((name, {}) for name in names), *more]]


def _of_pytorch_optimizer() -> list[tuple[str, Options]]:
    import pytorch_optimizer

    lr = {"lr": 0.01}
    needed: Mapping[str, Options] = {"bsam": {"num_data": 8}, "ranger21": {"num_iterations": 12}}
    cases: list[tuple[str, Options]] = []
    for name in sorted({*pytorch_optimizer.get_supported_optimizers(), *_WRAPPERS} - {*_LEFT_OUT}):
        full = f"pytorch_optimizer.{name}"
        if name in _NEED_GROUPS:
            cases += [(full, {**lr, "use_muon": use}) for use in (True, False)]
        else:
            cases.append((full, {**lr, **needed.get(name, {})}))
    return cases


@functools.cache
def _class(library: str, name: str) -> Callable[..., torch.optim.Optimizer]:
    if library == "torch":
        return getattr(torch.optim, name.removeprefix("optim."))  # type: ignore[no-any-return]  # a class
    import pytorch_optimizer

    if name in _WRAPPERS:
        return getattr(pytorch_optimizer, name)  # type: ignore[no-any-return]  # a class
    return pytorch_optimizer.load_optimizer(name)


def _takes_weight_decay(name: str) -> bool:
    library, _, own = name.partition(".")
    return "weight_decay" in inspect.signature(_class(library, own)).parameters
