"""Keep what is traced out of the caches of functools: a table that a function makes once has no values in a trace.

Who makes such caches cannot be asked, as they are reached through any function that a forward calls. A trace looks for
them where something of it has stayed, and each later trace of a forward empties those that were found.
"""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

from zerofx.garbage import all_objects
from zerofx.torch_private.operators import pytree
from zerofx.torch_private.tensors import is_traced

_CACHE = type(functools.cache(lambda: None))
_known: weakref.WeakSet[Any] = weakref.WeakSet()


def learn_caches() -> bool:
    """Empty all caches that have traced tensors, which takes some 0.2 s; whether one had not been known."""
    caches = [entry for entry in all_objects() if type(entry) is _CACHE and entry.cache_info().currsize]
    holding = [cache for cache in caches if any(map(is_traced, pytree.tree_leaves(gc.get_referents(cache))))]
    is_new = any(cache not in _known for cache in holding)
    _known.update(holding)
    forget_traced()
    return is_new


def forget_traced() -> None:
    """Empty the caches that are known to have had traced tensors."""
    for cache in _known:
        cache.cache_clear()
