"""Stand-ins, in another library's training loop, for a model and an optimizer that a step holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofx.errors import UsageError
from zerofx.runtime.state.held import is_held
from zerofx.session.step import Step


class SteppedModel(nn.Module):
    """Stands in for a model that a step holds: it is evaluated by the step, and generates as a whole one.

    What it does not have itself is the model's.
    """

    def __init__(self, module: nn.Module, step: Step) -> None:
        super().__init__()
        self.module, self._step = module, step

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._step.is_prepared:  # the model is whole, and as it was given
            return self.module(*args, **kwargs)
        if self.training and torch.is_grad_enabled():
            raise UsageError(
                "expected a model that a step trains to be called in evaluation mode, or under torch.no_grad(), found "
                "it in training mode: what is trained is compute_loss(); or call it inside `with "
                "trainer.step.full_parameters():`"
            )
        return self._step.evaluate(*args, outputs=True, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, while its parameters are there for it. Collective."""
        with self._step.generating() as generates:
            model: Any = generates
            if any(map(is_held, model.parameters())):  # those of a bucket at a time, for calls that all ranks make
                kwargs.setdefault("synced_gpus", dist.is_available() and dist.is_initialized())
            return model.generate(*args, **kwargs)


class SteppedOptimizer(torch.optim.Optimizer):
    """Stands in for an optimizer whose update is in the step: ``inner``, with nothing left to do."""

    _is_accelerate_prepared = True  # accelerate leaves it as it is

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        # Groups, states and defaults are those of ``inner``, so that there is nothing to initialise.
        self.inner, self.step_was_skipped = inner, False

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # before there is one
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return repr(self.inner)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch overloads it
        """Do nothing: the step has updated already."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients live within the step."""

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)
