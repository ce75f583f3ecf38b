"""Whether model, optimizer and backend can be trained with, before anything is captured."""

from __future__ import annotations

import torch
from torch import nn

from zerofx.capture.checks import check_model, check_optimizer, device_of
from zerofx.optimizers import check_supported
from zerofx.options import CompileOptions


def check_training(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: CompileOptions, *, on_meta: bool = False
) -> None:
    """Check what is to be trained, as far as that can be before anything is captured; ``on_meta`` as in `check_model`.

    Raises:
        ZeroFXError: the model or the optimizer cannot be, or the backend's compiler is missing.
    """
    check_model(model, on_meta=on_meta)
    check_optimizer(model, optimizer)
    check_supported(optimizer)
    if options.compiles_regions:
        # Inductor takes seconds to import: only who needs it pays.
        from zerofx.codegen.inductor.cpp import check_compiler

        check_compiler(device_of(model))
