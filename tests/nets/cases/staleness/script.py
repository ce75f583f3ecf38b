"""What a case of the staleness net is: a script that changes what its step computes, and its training."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx

STEPS = 12
CHANGED = (3, 4, *range(6, STEPS + 1))
"""The steps before which a script changes something."""
SAMPLES, FEATURES, WIDTH, CLASSES = 4, 4, 6, 3

Kind = Literal["number", "flag", "string", "list", "module", "function", "other"]
Batch = tuple[Any, ...]
State = dict[str, Tensor]


class Small(nn.Module):
    """Two layers; what is between them is ``between``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def outputs(self, x: Tensor) -> Tensor:
        given: Tensor = self.second(self.between(self.first(x)))
        return given

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x)


class Losing(Small):
    """``Small`` with its loss, which ``weigh`` may change."""

    def weigh(self, loss: Tensor) -> Tensor:
        return loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]  # it takes the targets, too
        return self.weigh(F.mse_loss(self.outputs(x), y))


def regression(generator: torch.Generator, step: int) -> Batch:
    """Features and targets."""
    return torch.randn(SAMPLES, FEATURES, generator=generator), torch.randn(SAMPLES, CLASSES, generator=generator)


def classification(generator: torch.Generator, step: int) -> Batch:
    """Features and classes."""
    features = torch.randn(SAMPLES, FEATURES, generator=generator)
    return features, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def nothing() -> None:
    """Nothing."""


def nothing_changes(count: int) -> None:
    """The change of a script whose batches alone make its forward another one."""


@dataclass(frozen=True)
class Script:
    """A training script that is about to begin.

    Attributes:
        model: what is trained.
        change: called before the steps ``CHANGED`` with the number of the change, from 1 on.
        forward: as ``zerofx.compile`` takes it.
        loss_fn: likewise.
        draw: the batch of a step.
        around: the context in which each step is called.
        undo: sets back what is not the script's own.
    """

    model: nn.Module
    change: Callable[[int], object]
    forward: Callable[..., Any] | None = None
    loss_fn: Callable[..., Any] | None = None
    draw: Callable[[torch.Generator, int], Batch] = regression
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    undo: Callable[[], object] = nothing

    def loss(self, batch: Batch) -> Tensor:
        """The loss in eager mode."""
        if self.forward is not None:
            loss: Tensor = self.forward(self.model, *batch)
        elif self.loss_fn is not None:
            loss = self.loss_fn(self.model(batch[0]), *batch[1:])
        else:
            loss = self.model(*batch)
        return loss


@dataclass
class Trained:
    """The loss of each step, and the error that ended the training before its end, if one did.

    ``states`` are those of the model as each step begins, and the one at the end; this alone of what is compiled, and
    of the loops of others.
    """

    losses: list[Tensor] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    error: BaseException | None = None


@dataclass(frozen=True)
class Case:
    """One way in which a script changes what a step computes.

    Attributes:
        name: what the value stands in, and what reads it.
        kind: what is changed.
        train: trains on a backend, or in eager PyTorch where that is None, with that many of the changes.
        bound: how far both may be apart on the eager backend, relative: 0 for the same bits.
        halves: whether it computes in bfloat16, to which fused kernels round less often than eager mode unless told to.
        library: what has to be installed, besides what tests need.
        tells: whether ``train`` can leave changes out, so that it can be seen that they matter.
        slow: whether it takes seconds.
    """

    name: str
    kind: Kind
    train: Callable[[str | None, int], Trained]
    bound: float = 0.0
    halves: bool = False
    library: str = ""
    tells: bool = True
    slow: bool = False


def case(
    name: str,
    kind: Kind,
    *,
    bound: float = 0.0,
    halves: bool = False,
    library: str = "",
    tells: bool = True,
    slow: bool = False,
) -> Callable[[Callable[[], Script]], Case]:
    """Make a case of what makes its script."""

    def made(make: Callable[[], Script]) -> Case:
        def training(backend: str | None, most: int) -> Trained:
            return train(make, backend, most)

        return Case(name, kind, training, bound, halves, library=library, tells=tells, slow=slow)

    return made


def train(make: Callable[[], Script], backend: str | None, most: int) -> Trained:
    """Train with the first ``most`` changes, in eager PyTorch where ``backend`` is None."""
    torch.manual_seed(0)
    random.seed(0)
    script = make()
    try:
        generator = torch.Generator().manual_seed(1 + _rank())
        batches = [script.draw(generator, step) for step in range(1, STEPS + 1)]
        torch.manual_seed(100 + _rank())
        # Without momentum, whose first step is another one than those that follow and would be captured by itself.
        optimizer = torch.optim.SGD(script.model.parameters(), lr=0.05, foreach=False)
        if backend is None:
            return _plain(script, optimizer, batches, most)
        return _compiled(script, optimizer, batches, most, backend)
    finally:
        script.undo()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _change(script: Script, step: int, most: int) -> None:
    if step in CHANGED and CHANGED.index(step) < most:
        script.change(CHANGED.index(step) + 1)


def _plain(script: Script, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], most: int) -> Trained:
    """As DistributedDataParallel trains: the buffers of rank 0, and the mean of all gradients."""
    trained = Trained()
    for step, batch in enumerate(batches, start=1):
        _change(script, step, most)
        trained.states.append(copy.deepcopy(script.model.state_dict()))
        if dist.is_initialized():
            for buffer in script.model.buffers():
                dist.broadcast(buffer, 0)
        with script.around():
            optimizer.zero_grad()
            loss = script.loss(batch)
            loss.backward()
        if dist.is_initialized():
            for p in script.model.parameters():
                if p.grad is not None:
                    p.grad /= dist.get_world_size()
                    dist.all_reduce(p.grad)
        optimizer.step()
        trained.losses.append(loss.detach().clone())
    trained.states.append(copy.deepcopy(script.model.state_dict()))
    return trained


def _compiled(
    script: Script, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], most: int, backend: Any
) -> Trained:
    trained = Trained()
    step = zerofx.compile(
        script.model, optimizer, 3, forward=script.forward, loss_fn=script.loss_fn, backend=backend
    )  # fmt: skip
    try:
        for number, batch in enumerate(batches, start=1):
            _change(script, number, most)
            with script.around():
                loss = step(*batch)
            trained.losses.append(loss.detach().clone())
    except Exception as error:  # noqa: BLE001  # what it is, is the outcome
        trained.error = error
    finally:
        step.close()
    trained.states.append(copy.deepcopy(script.model.state_dict()))
    return trained


def number(count: int) -> float:
    """The number that a source has after that many changes."""
    return 1.0 + 0.5 * count


def flag(count: int) -> bool:
    """The flag likewise."""
    return count % 2 == 1
