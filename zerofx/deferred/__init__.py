"""Models without values: tensors that record their construction, and are made when a bucket needs them."""

from zerofx.deferred.model import adopt_meta, allow_replacement, check_recipes, empty_init, is_deferred, make_buffers
from zerofx.deferred.tensor import DeferredTensor, defer

__all__ = [
    "DeferredTensor",
    "adopt_meta",
    "allow_replacement",
    "check_recipes",
    "defer",
    "empty_init",
    "is_deferred",
    "make_buffers",
]
