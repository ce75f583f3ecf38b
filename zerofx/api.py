"""``zerofx.compile``: checks what it is given and makes a ``Step`` of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import nn

from zerofx.driver.asked import check_training
from zerofx.errors import UsageError
from zerofx.optimizers import Optimizers
from zerofx.option_table import check_names, document_options
from zerofx.options import CompileKeywords, CompileOptions, check_options
from zerofx.session.step import Step
from zerofx.settings import ShortTraceback


@document_options(CompileKeywords, CompileOptions)
@ShortTraceback()
def compile(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    stage: int = 3,
    *,
    example_batch: tuple[Any, ...] | Mapping[str, Any] | None = None,
    **options: Unpack[CompileKeywords],
) -> Step:
    """Compile a model's training step: forward, loss, backward, reductions and update as one planned graph.

    docs/options.md has each option in full; the table of all of them is ``CompileOptions`` in ``zerofx/options.py``.

    Args:
        model: any ``nn.Module``, unmodified, also on ``meta`` or made inside ``zerofx.empty_init()``. Its parameters
            move into flat buckets when the first step is built.
        optimizer: an elementwise ``torch.optim`` optimizer over the model's parameters, or a list of several, each over
            parameters of its own. Its state is sharded: ``state_dict()`` and ``load_state_dict()`` have it whole;
            ``optimizer.state`` is empty.
        stage: 0 replicates, 1 shards optimizer states, 2 also gradients, 3 also parameters (ZeRO, 1910.02054).
        example_batch: a batch, as a tuple or a dict of keywords, to capture and plan with now, not at the first call.

    Returns:
        A ``Step``: ``loss = step(*batch, **kwargs)``, or ``loss, extras`` where ``forward`` returns a pair. Its ranks
        are those of the default process group, or this process alone. The model belongs to it until ``step.close()``.

    Raises:
        ZeroFXError: see its subclasses; nothing has been changed then.
    """
    check_names(options, CompileKeywords, "compile")
    asked = check_options(stage, **options)
    optimizers = Optimizers.from_user(optimizer, asked.average)
    check_training(model, optimizers, asked, on_meta=True)
    if not isinstance(example_batch, tuple | list | Mapping | None):
        raise UsageError(
            f"expected example_batch to be a tuple of what step() is called with, or a dict of its keywords, found "
            f"{type(example_batch).__name__}: give (batch,) for a single argument"
        )
    step = Step(model, optimizers, asked)
    if example_batch is None:
        return step
    try:
        if isinstance(example_batch, Mapping):
            step.prepare(**example_batch)
        else:
            step.prepare(*example_batch)
    except BaseException:
        step.abandon()
        raise
    return step
