"""``ZeroFXStrategy``: Lightning's Trainer, whose training steps are planned and sharded.

The Trainer's own loop runs as it is. The module's ``training_step`` is captured; its logged values are outputs of the
step, and logged after it has run. Clipping and the optimizer's update are in the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from zerofx import api
from zerofx.errors import UsageError
from zerofx.mesh_option import AUTO, mesh_for, mesh_of
from zerofx.session.step import Step

# What the Trainer and the module say: each with what does.
_OF_THE_TRAINER = {
    "accumulate": "accumulate_grad_batches of the Trainer", "max_grad_norm": "gradient_clip_val of the Trainer",
    "forward": "training_step", "loss_fn": "training_step", "loss_terms": "training_step", "outputs": "training_step",
    "model": "trainer.fit", "optimizer": "configure_optimizers", "example_batch": "trainer.fit",
}  # fmt: skip
# Hooks between backward and update, which are one step here.
_NEVER_CALLED = (
    "backward", "configure_gradient_clipping", "on_after_backward", "on_before_backward", "on_before_optimizer_step",
    "optimizer_step",
)  # fmt: skip

# Callbacks that read and write parameters after each batch.
_AVERAGING = frozenset({"StochasticWeightAveraging", "WeightAveraging"})


class ZeroFXStrategy(DDPStrategy):
    """A strategy for Lightning's ``Trainer`` that trains by a compiled step.

    Args:
        options: the keywords of ``zerofx.compile``, ``memory_budget="24GiB"`` say; those that arguments of the Trainer
            say (``accumulate``, ``max_grad_norm``) are left to these.

    ``strategy.step`` is the compiled step, while ``fit`` runs. ``validation_step`` and the like run on the module with
    its whole parameters.

    Raises:
        UsageError: something that the module or the Trainer asks for cannot be had; says what to do instead.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        for name in options:
            if name in _OF_THE_TRAINER:
                raise UsageError(f"expected {name} to be left to {_OF_THE_TRAINER[name]}, found {name}=: leave it out")
            if name not in inspect.signature(api.compile).parameters:
                raise TypeError(f"ZeroFXStrategy() got an unexpected keyword argument {name!r}")
        if options.get("mesh") == AUTO:
            raise UsageError("expected a mesh that says which ranks are given the same batches, found 'auto': give one")
        self._options = options
        self._trainer: Trainer | None = None
        self._log_arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._is_last = self._has_failed = False
        self._shown = ExitStack()
        self.step: Step | None = None

    # ------------------------------------------------------------------------------------------------ making the step

    def setup(self, trainer: Trainer) -> None:
        self._trainer = trainer
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Do nothing: the step is made once there are optimizers."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        module = self._own_module
        refused = {name: "is never called" for name in _NEVER_CALLED if is_overridden(name, module)}
        if not module.automatic_optimization or len(self.optimizers) != 1:
            refused[f"{len(self.optimizers)} optimizers, automatic_optimization={module.automatic_optimization}"] = (
                "one optimizer is stepped automatically: call zerofx.compile in a loop of your own"
            )
        if type(self.precision_plugin) is not Precision:
            refused[f"Trainer(precision={self.precision_plugin.precision!r})"] = "give precision= to the strategy"
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            refused["gradient_clip_algorithm='value'"] = "clip by the norm"
        for callback in trainer.callbacks:
            if {base.__name__ for base in type(callback).__mro__} & _AVERAGING:
                refused[type(callback).__name__] = (
                    "averages parameters, which a step has in slices: give average=zerofx.EMA(0.999), or SWA(), to the "
                    "strategy"
                )
        if refused:
            listed = "; ".join(f"{name} ({why})" for name, why in refused.items())
            raise UsageError(f"expected a module and a Trainer that a compiled step can honour, found {listed}")
        clip = trainer.gradient_clip_val
        self.step = api.compile(
            module, self.optimizers[0], forward=partial(_forward, arguments=self._log_arguments),
            accumulate=_most_batches(trainer), max_grad_norm=float(clip) if clip else None, **self._options,
        )  # fmt: skip

    @property
    def _own_module(self) -> LightningModule:
        assert self.lightning_module is not None, "the Trainer has connected it"
        return self.lightning_module

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Sampler arguments that give ranks along ``model`` the same batches."""
        num_sharing = mesh_for(mesh_of(self._options.get("mesh")), self.world_size).model
        return {"num_replicas": self.world_size // num_sharing, "rank": self.global_rank // num_sharing}

    # ------------------------------------------------------------------------------------------------ training

    def training_step(self, batch: Any, *others: Any) -> Any:
        """Keep a micro-batch; the last of an update trains on all of them, and returns the module's result."""
        step = self.step
        assert step is not None, "made before the loop"
        step.micro(batch, len(others))
        if not self._is_last:
            return torch.zeros((), device=self.root_device)
        loss, extras = step.update(partial=True)
        each = extras if isinstance(extras, list) else [extras]
        for name in each[0]["logged"] if each[0] is not None else ():
            positional, named = self._log_arguments[name]
            value = torch.stack([entry["logged"][name].float() for entry in each]).mean()
            self._own_module.log(name, value, *positional, **named)
        return {"loss": loss, **(each[-1] or {"outputs": {}})["outputs"]}

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: nn.Module | None = None, **others: Any
    ) -> Any:
        """Run the step, which includes the update."""
        self._is_last = True
        try:
            return closure()
        finally:
            self._is_last = False

    def backward(self, closure_loss: Tensor, *others: Any, **named: Any) -> Tensor:
        """Do nothing: it is part of the step."""
        return closure_loss

    # ------------------------------------------------------------------------------------------------ the whole module

    def _show(self) -> None:
        if self.step is not None and self.step.is_prepared:
            self._shown.enter_context(self.step.full_parameters())

    def _hide(self) -> None:
        self._shown.close()

    on_validation_start = on_test_start = on_predict_start = _show
    on_validation_end = on_test_end = on_predict_end = _hide

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state, on the rank that writes it. Collective."""
        if self.step is None or not self.step.is_prepared:
            return dict(super().lightning_module_state_dict())
        return dict(self.step.full_state_dict(keep=self.is_global_zero))

    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True  # on this rank perhaps, where the others wait for nobody

    def teardown(self) -> None:
        self._hide()
        if self.step is not None and not self._has_failed:
            self.step.close()
        self.step = None
        super().teardown()


def _most_batches(trainer: Trainer) -> int:
    """The most batches that an update accumulates, in whatever epoch."""
    schedules = [each.scheduling for each in trainer.callbacks if isinstance(each, GradientAccumulationScheduler)]
    most: int = max(trainer.accumulate_grad_batches, *(number for each in schedules for number in each.values()), 1)
    return most


def _forward(
    module: LightningModule,
    batch: Any,
    num_others: int,
    *,
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]],
) -> tuple[Tensor, dict[str, Any]]:
    """A module's loss, and its logged values and other results."""
    seen = _Seen(module)
    given = type(module).training_step(seen, batch, *[_UNKNOWN] * num_others)
    outputs = dict(given) if isinstance(given, dict) else {"loss": given}
    logged = dict[str, Tensor]()
    for name, (value, positional, named) in seen._values.items():
        logged[name], arguments[name] = value, (positional, named)
    return outputs.pop("loss"), {"logged": logged, "outputs": outputs}


class _Seen:
    """A proxy of the module for its ``training_step``: logged values are kept, everything else is the module's."""

    _module: LightningModule
    _values: dict[str, tuple[Tensor, tuple[Any, ...], dict[str, Any]]]

    def __init__(self, module: LightningModule) -> None:
        vars(self).update(_module=module, _values={})

    @property  # type: ignore[misc]  # so that super() takes it for the module
    def __class__(self) -> type:
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        own = inspect.getattr_static(type(self._module), name, None)
        return MethodType(own, self) if isinstance(own, FunctionType) else getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._module(*args, **named)

    def log(self, name: str, value: Any, *positional: Any, **named: Any) -> None:
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UsageError(
                f"expected training_step to log tensors with one element, which the step hands out, found {name} as "
                f"{type(value).__name__}: log it in on_train_batch_end"
            )
        self._values[name] = (value.detach(), positional, named)

    def log_dict(self, dictionary: dict[str, Any], *positional: Any, **named: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, *positional, **named)


class _Unknown:
    """A value that differs between batches without being part of them, such as the batch's number."""

    def _refuse(self, *_: object) -> NoReturn:
        raise UsageError(
            "expected training_step to be the same for every batch, found that it reads batch_idx: do that in "
            "on_train_batch_start or on_train_batch_end"
        )

    __bool__ = __int__ = __index__ = __float__ = __mod__ = __add__ = __sub__ = __mul__ = __lt__ = __gt__ = _refuse
    __le__ = __ge__ = __floordiv__ = __truediv__ = _refuse
    __eq__ = _refuse
    __hash__ = object.__hash__


_UNKNOWN = _Unknown()
