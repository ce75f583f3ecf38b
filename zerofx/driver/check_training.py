"""Checks that model, optimizers and backend can be trained with, before anything is captured."""

from __future__ import annotations

import fnmatch

import torch
from torch import nn

from zerofx.capture.checks import check_model, check_optimizers, device_of
from zerofx.errors import UsageError
from zerofx.optimizers import Optimizers, check_supported
from zerofx.options import CompileOptions
from zerofx.units import first_few


def check_training(model: nn.Module, optimizers: Optimizers, options: CompileOptions, *, on_meta: bool = False) -> None:
    """Check what is to be trained, as far as that can be before anything is captured; ``on_meta`` as in `check_model`.

    Raises:
        ZeroFXError: the model or an optimizer cannot be, or the backend's compiler is missing.
    """
    check_model(model, on_meta=on_meta)
    check_optimizers(model, optimizers)
    for optimizer in optimizers.each:
        check_supported(optimizer)
    options.casts(model)
    _check_kept_gradients(model, options.keep_gradients)
    if options.loss_scale is not None:
        _check_stored(optimizers)
    if options.compiles_regions:
        # Inductor takes seconds to import: only who needs it pays.
        from zerofx.codegen.inductor.cpp import check_compiler

        check_compiler(device_of(model))


def _check_kept_gradients(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Check that what gradients are asked for by name is trained."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    unknown = [pattern for pattern in patterns if not fnmatch.filter(trained, pattern)]
    if unknown:
        raise UsageError(
            f"expected keep_gradients to be names of trained parameters or patterns of names, such as "
            f"('layers.0.weight', '*.bias'), found {first_few(map(repr, unknown))}, which is none of "
            f"{first_few(trained)}"
        )


def _check_stored(optimizers: Optimizers) -> None:
    """Check that gradients are freed of the loss's scale in more than float16, where small ones would be zero again."""
    parameters = [parameter for group in optimizers.param_groups for parameter in group["params"]]
    low = sum(parameter.dtype is torch.float16 for parameter in parameters)
    if low:
        raise UsageError(
            f"expected parameters that are stored in float32 where the loss is scaled, found {low} of "
            f"{len(parameters)} in float16, in which updates cannot be made of unscaled gradients: call model.float() "
            f"before the optimizer is made, and give precision='fp16', which computes in float16 all the same"
        )
