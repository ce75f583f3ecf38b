"""Operators that pick elements, put some in places, or put values together."""

from __future__ import annotations

from dataclasses import replace

from zerofx.ir.operators import row_rules
from zerofx.ir.operators.operator import Inductor, Operator, OperatorKind, Traffic

_MOVES = Operator(per_element=0)
_PICKS = Operator(per_element=0, traffic=Traffic.PICKS)
_INDEXED = Operator(per_element=0, kind=OperatorKind.INDEXED)

OPERATORS: dict[str, Operator] = {
    # Picking
    "embedding": replace(_PICKS, inductor=Inductor.LOOP, rows=row_rules.lookup),
    "embedding_dense_backward": Operator(rows=row_rules.lookup_backward),
    "gather": _PICKS,
    "index": replace(_PICKS, kind=OperatorKind.INDEXED),
    "_unsafe_index": replace(_PICKS, kind=OperatorKind.INDEXED),
    "index_select": _PICKS,
    "masked_select": _PICKS,
    "take": Operator(traffic=Traffic.PICKS),
    "topk": _MOVES,
    "nll_loss_forward": Operator(traffic=Traffic.PICKS),
    "nll_loss_backward": Operator(inductor=Inductor.LOOP),
    "_embedding_bag_backward": Operator(counts_from_one=True),  # bags have something in each then
    # Putting into places
    "index_put": _INDEXED,
    "index_put_": _INDEXED,
    "_index_put_impl_": Operator(kind=OperatorKind.INDEXED),
    "_unsafe_index_put": Operator(kind=OperatorKind.INDEXED),
    "scatter": _MOVES,
    "masked_scatter": _MOVES,
    "slice_scatter": replace(_MOVES, kind=OperatorKind.SCATTER),
    "select_scatter": replace(_MOVES, kind=OperatorKind.SCATTER),
    "diagonal_scatter": replace(_MOVES, kind=OperatorKind.SCATTER),
    "as_strided_scatter": replace(_MOVES, kind=OperatorKind.SCATTER),
    "slice_backward": replace(_MOVES, inductor=Inductor.LOOP, rows=row_rules.work_along(2), takes_shape=True),
    "select_backward": replace(_MOVES, inductor=Inductor.LOOP, rows=row_rules.insert_dim(2), takes_shape=True),
    "diagonal_backward": _MOVES,
    "unfold_backward": _MOVES,
    # Putting together, and moving about
    "cat": replace(_MOVES, inductor=Inductor.LOOP, rows=row_rules.concatenation(0)),
    "stack": replace(_MOVES, inductor=Inductor.LOOP, rows=row_rules.concatenation(1)),
    "constant_pad_nd": _MOVES,
    "flip": _MOVES,
    "repeat": _MOVES,
    "roll": _MOVES,
    "tril": _MOVES,
    "triu": _MOVES,
}
