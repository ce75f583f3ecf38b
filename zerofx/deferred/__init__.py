"""Models that never exist whole: tensors that keep how they are made, and make it when a bucket asks for it."""

from zerofx.deferred.model import adopt_meta, becoming_real, check_recipes, empty_init, is_deferred, make_buffers
from zerofx.deferred.tensor import DeferredTensor

__all__ = [
    "DeferredTensor",
    "adopt_meta",
    "becoming_real",
    "check_recipes",
    "empty_init",
    "is_deferred",
    "make_buffers",
]
