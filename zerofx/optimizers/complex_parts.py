"""Check that an optimizer updates a complex parameter as it would its real and imaginary parts, which buckets hold."""

from __future__ import annotations

from typing import Final

import torch

from zerofx.errors import OptimizerError
from zerofx.optimizers.outside import OptimizerRest
from zerofx.optimizers.shadow import choose_implementation, on_host, run_step, sample

_LENGTH: Final = 22
_NUM_STEPS: Final = 3  # the first makes the states, the second reads them, the third what the second left


def check_parts(alone: OptimizerRest, dtype: torch.dtype) -> None:
    """Step a few complex numbers and the same as pairs of real ones, as ``torch.optim`` takes them.

    ``alone`` is an optimizer of one group.

    SGD does not: it multiplies complex numbers, and rounds once more than for real ones.

    Raises:
        OptimizerError: they do not stay the same to the bit.
    """
    pairs = sample((_LENGTH, 2), dtype.to_real(), -1.1, 1.2)
    whole = torch.view_as_complex(pairs.clone())
    params = [pairs.requires_grad_(), whole.requires_grad_()]
    shadows = [alone.shadow([[param]]) for param in params]
    for number in range(_NUM_STEPS):
        gradient = sample((_LENGTH, 2), dtype.to_real(), 0.8 - 0.3 * number, -0.6)
        params[0].grad, params[1].grad = gradient.clone(), torch.view_as_complex(gradient.clone())
        for shadow in shadows:
            choose_implementation(alone.kind, shadow.param_groups[0])
            with on_host():
                run_step(shadow)
    if not torch.equal(params[0].detach(), torch.view_as_real(params[1].detach())):
        raise OptimizerError(
            f"expected an optimizer that updates the real and the imaginary parts of a complex parameter as it does "
            f"real ones, to the bit, as all of torch.optim but SGD do, found that {alone.kind.__name__} does not: "
            f"use such a one, or let the parameter be what torch.view_as_real makes of it, and read it through "
            f"torch.view_as_complex"
        )
