"""Models that are easy to get wrong, each with its batches: what the exactness tests train."""

from tests.lib.models.batches import DIM, ROWS, rows, tokens
from tests.lib.models.cases import CASES, Case, adamw, batches, decayed, sgd
from tests.lib.models.operators import Convolutions
from tests.lib.models.parameters import Adapted, Layer, Regression, Stack
from tests.lib.models.values import Swapped

__all__ = [
    "CASES",
    "DIM",
    "ROWS",
    "Adapted",
    "Case",
    "Convolutions",
    "Layer",
    "Regression",
    "Stack",
    "Swapped",
    "adamw",
    "batches",
    "decayed",
    "rows",
    "sgd",
    "tokens",
]
