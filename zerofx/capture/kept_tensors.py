"""Find traced tensors that a forward leaves in user objects: a list of features, a hook's notes.

They have no values, and no step adds others. Attributes of modules are put back and named
(``objective/module_state.py``), and buffers are part of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from zerofx.capture.outside.outside import Outside
from zerofx.errors import warn
from zerofx.torch_private.modules import OF_RNNS
from zerofx.torch_private.tensors import is_traced
from zerofx.units import first_few


def tell_kept_tensors(model: nn.Module, objective: Callable[..., Any] | None) -> None:
    """Warn where tensors of a trace can be reached from the model, its hooks, or the function that gives the loss."""
    if places := dict.fromkeys(_places(model, objective)):
        warn(
            f"expected a forward that puts no tensors aside, found some in {first_few(places)}, put there while the "
            f"step was captured: they have no values, and steps add none. What a step is to hand out is returned: "
            f"compile with forward=lambda model, *batch: (loss, extras), and call loss, extras = step(*batch)"
        )


def _places(model: nn.Module, objective: Callable[..., Any] | None) -> Iterator[str]:
    for root, name in ((model, "model"), (objective, "loss_fn or forward")):
        if root is not None:
            for path, reached in Outside(root, name).reachable():
                place = path.rpartition("[")[0] if path.endswith("]") else path
                if is_traced(reached) and not place.endswith(f".{OF_RNNS}"):
                    yield place
