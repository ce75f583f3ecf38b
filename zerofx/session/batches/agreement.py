"""The things that ranks compare before they run a batch together, each with what to do where it differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerofx.optimizers import Optimizers
from zerofx.runtime.comm.comparisons import Comparison
from zerofx.runtime.state.optimizer import hyperparameter_texts
from zerofx.session.shapes import BatchKey, Match, lines

MICRO_BATCHES = "number of micro-batches"
"""Names, in a setting, what a batch is divided into where that is not what ``accumulate`` says."""


class Agreement:
    """All ranks being about to run the same step, as they compare it; ``started`` waits for the others."""

    def __init__(self, started: Callable[[], Sequence[bytes]]) -> None:
        self._started = started
        self._digests: Sequence[bytes] | None = None

    def wait(self) -> Sequence[bytes]:
        """Wait until all ranks agree; returns a digest of every rank's random generators, in rank order.

        Raises:
            RankMismatchError: ranks are about to run different steps.
        """
        if self._digests is None:  # what ranks say once is not to be gathered twice
            self._digests = [note[:16] for note in self._started()]
        return self._digests


def update_parts(optimizers: Optimizers, variant: str, changed: str) -> list[Comparison]:
    """Parts of an update: ``variant`` tells how it was traced, ``changed`` whose ``requires_grad`` is another."""
    return [
        Comparison(
            "parameters to be trained", changed or "those of the step before",
            "Set requires_grad on all ranks alike, before the same step.",
        ),
        Comparison(
            "optimizer options", lines(hyperparameter_texts(optimizers)),
            "Set them on all ranks alike: a scheduler that follows a loss has to be given the mean of all ranks' "
            "losses, as step.average(loss) gives it.",
        ),
        Comparison(
            "optimizer update", variant,
            "Load the same optimizer states on all ranks, and change attributes of the optimizer on all alike.",
        ),
    ]  # fmt: skip


def forward_parts(key: BatchKey, lent: str, match: Match) -> list[Comparison]:
    """Parts of a forward: its batch, where other steps have what is ``lent``, and the step for all of it."""
    number = {name: key.setting[name] for name in (MICRO_BATCHES,) if name in key.setting}
    return [
        Comparison(
            "number of micro-batches", lines(number) or f"{MICRO_BATCHES}: as accumulate= says",
            "Call step.micro(batch) as often on every rank before each step.update().",
        ),
        Comparison(
            "training mode and settings of torch", lines(key.setting),
            "Call model.train() and model.eval(), open torch.autocast and change torch's settings on all ranks alike.",
        ),
        Comparison(
            "shapes, dtypes and constants of a batch", lines(key.shape),
            "Give every rank batches of the same shapes, for example by padding, and leave a smaller last one out on "
            "all of them (drop_last=True). What differs by rank has to be a tensor.",
        ),
        Comparison(
            "steps that train what this one reads", lent,
            "Prepare, run and close those steps on all ranks alike.",
        ),
        Comparison(
            "Python values for the forward to read", f"captured step: number {match.number}",
            "Set them on all ranks alike, before the same step, and pass what is to differ by rank as a tensor in the "
            "batch.",
            match.values_by_rank,
        ),
    ]  # fmt: skip
