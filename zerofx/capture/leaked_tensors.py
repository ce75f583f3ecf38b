"""Traced tensors that outlive their trace: in user objects, which are warned of, and in caches of functools.

They have no values, and no step replaces them. Attributes of modules are restored and named
(``objective/module_state.py``), and buffers are part of the step. A cache of functools (a table that a function makes
once) is reachable from any function that a forward calls, too many to walk: it is looked for once a traced tensor
outlives its trace, and emptied after each later trace.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from zerofx.capture.free_tensors.free_tensors import FreeTensors
from zerofx.errors import warn
from zerofx.garbage import all_objects
from zerofx.torch_private.modules import OF_RNNS
from zerofx.torch_private.operators import pytree
from zerofx.torch_private.tensors import is_traced
from zerofx.units import first_few


def warn_of_leaked_tensors(model: nn.Module, objective: Callable[..., Any] | None) -> None:
    """Warn where tensors of a trace can be reached from the model, its hooks, or the loss function."""
    if places := dict.fromkeys(_places(model, objective)):
        warn(
            f"expected a forward that puts no tensors aside, found some in {first_few(places)}, put there while the "
            f"step was captured: they have no values, and steps add none. What a step is to hand out is returned: "
            f"compile with forward=lambda model, *batch: (loss, extras), and call loss, extras = step(*batch)"
        )


def _places(model: nn.Module, objective: Callable[..., Any] | None) -> Iterator[str]:
    for root, name in ((model, "model"), (objective, "loss_fn or forward")):
        if root is not None:
            for path, reached in FreeTensors(root, name).reachable():
                place = path.rpartition("[")[0] if path.endswith("]") else path
                if is_traced(reached) and not place.endswith(f".{OF_RNNS}"):
                    yield place


_CACHE = type(functools.cache(lambda: None))
_known: weakref.WeakSet[Any] = weakref.WeakSet()


def learn_caches() -> bool:
    """Empty all caches that hold traced tensors, which takes some 0.2 s; True if one of them was not known yet."""
    caches = [entry for entry in all_objects() if type(entry) is _CACHE and entry.cache_info().currsize]
    holding = [cache for cache in caches if any(map(is_traced, pytree.tree_leaves(gc.get_referents(cache))))]
    is_new = any(cache not in _known for cache in holding)
    _known.update(holding)
    forget_traced()
    return is_new


def forget_traced() -> None:
    """Empty the caches that have been found to hold traced tensors."""
    for cache in _known:
        cache.cache_clear()
