"""Marks on a model and its parameters, which tell the open step that trains them."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from zerofx.deferred import DeferredTensor
from zerofx.errors import UsageError
from zerofx.options import CompileOptions
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.session.life import Life
from zerofx.session.taken_over import TakenOver

_MARK = "_zerofx_owner"


class LendingSteps(Protocol):
    """The steps of a model, as other steps see them that read it: ``taken`` once they have its values in buckets."""

    model: nn.Module
    options: CompileOptions
    life: Life
    taken: TakenOver | None
    tiers: Tiers | None
    num_given_back: int

    def capturable(self) -> AbstractContextManager[None]:
        """While open, the model is as one that no step trains."""


class Owner:
    """Says, on a module, which open step trains it. A copy of the module, or one read from a file, has no owner."""

    def __init__(self, step: object) -> None:
        self._step = weakref.ref(step)
        self._kept: object | None = None
        self._steps: weakref.ref[LendingSteps] | None = None

    @property
    def is_gone(self) -> bool:
        return self._step() is None

    def lend(self, steps: LendingSteps) -> None:
        """From now on other steps may read the model where ``steps`` have it."""
        self._steps = weakref.ref(steps)

    @property
    def steps(self) -> LendingSteps | None:
        """The steps of the model, where it is read; None once its step is gone."""
        return None if self.is_gone or self._steps is None else self._steps()

    def keep(self) -> None:
        """From now on the model needs its step: without it the parameters could not be given back."""
        self._kept = self._step()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def owner_of(marked: nn.Module | torch.Tensor) -> Owner | None:
    """The owner of a model or a parameter, if there is one whose step is open."""
    owner = getattr(marked, _MARK, None)
    return owner if isinstance(owner, Owner) and not owner.is_gone else None


def claim(model: nn.Module, step: object) -> Owner:
    """Mark ``model`` as trained by ``step``.

    Raises:
        UsageError: an open step trains it, or a part of it, or has one of its parameters, already.
    """
    for path, module in model.named_modules():
        if owner_of(module) is not None:
            what = f"that its part {path} was" if path else "one that was"
            raise UsageError(
                f"expected a model that no step trains yet, found {what} compiled before: use that step, or call its "
                f"close() first, which gives the model its parameters back; without that step, build the model anew. "
                f"To read a model that another step trains, leave it out of this one, and use it in forward="
            )
    for name, parameter in model.named_parameters():
        # One without values is a recipe, which copies of a model share.
        if not isinstance(parameter, DeferredTensor) and owner_of(parameter) is not None:
            raise UsageError(
                f"expected parameters that no step has yet, found that {name} is one of another compiled model, too: "
                f"make both one module and compile that, so that one step updates what they share, or give each a "
                f"copy of its own; a step whose forward= uses modules of another one's model reads them, untrained"
            )
    owner = Owner(step)
    for marked in (model, *model.parameters()):
        setattr(marked, _MARK, owner)
    return owner


def release(model: nn.Module, owner: Owner) -> None:
    """Take the mark off again."""
    for marked in (model, *model.parameters()):
        if getattr(marked, _MARK, None) is owner:
            delattr(marked, _MARK)
