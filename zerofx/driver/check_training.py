"""Whether model, optimizer and backend can be trained with, before anything is captured."""

from __future__ import annotations

import torch
from torch import nn

from zerofx.capture.checks import check_model, check_optimizer, device_of
from zerofx.errors import UsageError
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
    options.casts(model)
    if options.loss_scale is not None:
        _check_stored(optimizer)
    if options.compiles_regions:
        # Inductor takes seconds to import: only who needs it pays.
        from zerofx.codegen.inductor.cpp import check_compiler

        check_compiler(device_of(model))


def _check_stored(optimizer: torch.optim.Optimizer) -> None:
    """Check that gradients are freed of the loss's scale in more than float16, where small ones would be zero again."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    low = sum(parameter.dtype is torch.float16 for parameter in parameters)
    if low:
        raise UsageError(
            f"expected parameters that are stored in float32 where the loss is scaled, found {low} of "
            f"{len(parameters)} in float16, in which updates cannot be made of unscaled gradients: call model.float() "
            f"before the optimizer is made, and give precision='fp16', which computes in float16 all the same"
        )
