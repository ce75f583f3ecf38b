"""Modules that keep float32 while others compute in less: what is done by hand, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES
from tests.lib.runs.scaling import case_batches
from tests.lib.runs.training import Trained, build, differences, step_of, train_compiled
from zerofx import Precision, UsageError

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class InFloat32(nn.Module):
    """A module between two casts."""

    def __init__(self, inner: nn.Module, low: torch.dtype) -> None:
        super().__init__()
        self.inner, self._low = inner.float(), low

    def forward(self, *given: Tensor) -> Tensor:
        found = self.inner(*(each.float() if each.dtype is self._low else each for each in given))
        return found.to(self._low)  # type: ignore[no-any-return]


def _wrapped(model: nn.Module, names: Collection[str], low: torch.dtype) -> nn.Module:
    """``model`` in ``low``, but for modules of these names."""
    model = model.to(low)
    for name in names:
        path, _, last = name.rpartition(".")
        parent = model.get_submodule(path)
        setattr(parent, last, InFloat32(getattr(parent, last), low))
    return model


def _by_hand(name: str, kept: Collection[str], precision: str, steps: int) -> Trained:
    """Parameters cast from masters in float32 after every update, but for those that are in float32 already."""
    case, low = CASES[name], LOW[precision]
    masters = build(case)
    model = _wrapped(copy.deepcopy(masters), kept, low)
    optimizer, losses = case.optimizer(masters), []
    _take_values(model, masters)  # those in float32 have been rounded
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    for args, kwargs in case_batches(name, steps):
        loss = case.loss(model(*(a.to(low) if a.is_floating_point() else a for a in args), **kwargs))
        scaler.scale(loss).backward()
        for master, its_low in zip(masters.parameters(), model.parameters(), strict=True):
            assert its_low.grad is not None
            master.grad, its_low.grad = its_low.grad.float(), None
        scaler.step(optimizer)
        scaler.update()
        _take_values(model, masters)
        losses.append(loss.detach())
    return Trained(losses, dict(masters.state_dict()))


@torch.no_grad()
def _take_values(model: nn.Module, masters: nn.Module) -> None:
    for master, its_low in zip(masters.parameters(), model.parameters(), strict=True):
        its_low.copy_(master)


NORMS = [f"layers.{layer}.{norm}" for layer in range(3) for norm in ("norm1", "norm2")] + ["norm"]


KEPT: dict[str, tuple[Any, list[str]]] = {
    "a type": ((nn.LayerNorm,), NORMS),
    "patterns": (("layers.1", "*.norm2"), ["layers.0.norm2", "layers.1", "layers.2.norm2"]),
    "ends": (("tokens", "head"), ["tokens", "head"]),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("precision", "kept", "names"),
    [
        pytest.param(precision, *KEPT[kind], marks=[] if quick else [pytest.mark.slow], id=f"{precision}-{kind}")
        for precision, kind, quick in [
            ("bf16", "a type", True), ("fp16", "patterns", True), ("bf16", "ends", False), ("bf16", "patterns", False),
            ("fp16", "a type", False), ("fp16", "ends", False),
        ]
    ],
)  # fmt: skip
def test_modules_that_keep_float32_are_as_by_hand(kept: Any, names: list[str], precision: Any) -> None:
    expected = _by_hand("gpt", names, precision, 6)
    for stage in (0, 3):
        found = train_compiled(CASES["gpt"], stage, 6, precision=Precision(precision, kept))
        assert differences(expected, found) == [], stage
    assert differences(expected, train_compiled(CASES["gpt"], 3, 6, precision=precision)) != []


def test_their_parameters_are_in_buckets_of_their_own_without_masters() -> None:
    step, args = step_of("gpt", 3, precision=Precision("bf16", (nn.LayerNorm,)))
    step(*args)
    dtypes = {(bucket.dtype, bucket.compute_dtype) for bucket in step.plan.buckets}
    assert dtypes == {("torch.float32", "torch.float32"), ("torch.float32", "torch.bfloat16")}
    measured, predicted = step.measure(*args).peak_bytes["device"], step.plan.peak_bytes["device"]
    assert measured == pytest.approx(predicted, rel=0.01)


class _WithLoss(nn.Module):
    """A loss that is a module of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 3), nn.CrossEntropyLoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.layer(x), y)
        return loss


def test_a_loss_that_is_kept_in_float32_stays_so() -> None:
    model = _WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = zerofx.compile(model, optimizer, backend="eager", precision=Precision("fp16", (nn.CrossEntropyLoss,)))
    assert step(torch.randn(5, 4), torch.randint(3, (5,))).dtype is torch.float32
    assert step.num_skipped == 0  # float32 has the scale that float16 has not


def _compare_stages() -> list[list[str]]:
    options: dict[str, Any] = {
        "precision": Precision("fp16", (nn.LayerNorm, "layers.1.mlp"), loss_scale=64.0),
        "max_grad_norm": 0.5,
    }
    first, *others = (train_compiled(CASES["gpt"], stage, 4, **options) for stage in (0, 2, 3))
    return [differences(first, other) for other in others]


def test_two_ranks_train_the_same_at_every_stage() -> None:
    assert run_ranks(_compare_stages, 2) == [[[], []], [[], []]]


# ------------------------------------------------------------------------------------------------ refusals


def refused(model: nn.Module, kept: Any, precision: Any = "bf16") -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerofx.compile(model, optimizer, backend="eager", precision=Precision(precision, kept))


@pytest.mark.parametrize("wrong", ["norm", (3,), (nn.Linear(1, 1),), (int,), None])
def test_what_names_no_modules_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="expected keep_fp32 to be types of modules and names"):
        refused(_WithLoss(), wrong)


@pytest.mark.parametrize("absent", ["norm", "*.layer", nn.Conv2d])
def test_a_name_that_is_none_is_refused_with_some_that_are(absent: Any) -> None:
    with pytest.raises(UsageError, match=r"expected keep_fp32 to name modules inside the model.*\(layer, loss\)"):
        refused(_WithLoss(), ("layer", absent))


def test_keeping_float32_without_a_precision_is_refused() -> None:
    with pytest.raises(UsageError, match=r"keep_fp32=.*and compute=None: it says what is not in bf16 or fp16"):
        refused(_WithLoss(), ("layer",), None)


def test_a_parameter_that_others_have_too_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(UsageError, match=r"expected parameters of keep_fp32 that no other module has, found 0\.weight"):
        refused(model, ("1",))


def test_parameters_that_are_stored_in_less_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    with pytest.raises(
        UsageError, match=r"expected parameters of keep_fp32 that are stored in float32, found 1\.weight"
    ):
        refused(model, ("1",))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # as Inductor is imported
@pytest.mark.slow
def test_compiled_regions_keep_float32_too() -> None:
    options: dict[str, Any] = {"precision": Precision("bf16", ("*.norm", "layers.1"))}
    expected, found = (train_compiled(CASES["stack"], 3, 3, backend=one, **options) for one in ("eager", "inductor"))
    assert differences(expected, found, 2e-2) == []
