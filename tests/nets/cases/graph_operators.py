"""The operators that random graphs are drawn of, by name: each with the scalars, dims and layouts that it can have."""

from __future__ import annotations

from tests.nets.cases import graph_elements, graph_moves, graph_products, graph_sums
from tests.nets.cases.random_graphs import Operator

OPERATORS: dict[str, Operator] = (
    graph_products.OPERATORS | graph_elements.OPERATORS | graph_sums.OPERATORS | graph_moves.OPERATORS
)

# Gradients that jump where two roundings differ are not compared in bfloat16, of which they differ often.
UNSTEADY = frozenset({
    "activations with kinks", "maximum, minimum", "max", "clamp", "clamp by tensors", "remainder", "max_pool",
    "in place",
    "norm", "losses", "cross_entropy", "scatter", "where",
})  # fmt: skip
