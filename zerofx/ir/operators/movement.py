"""Operators that move data and compute nothing: views, copies, what fills memory, picks, puts in places, or joins."""

from __future__ import annotations

from dataclasses import replace

from zerofx.ir.operators import row_rules
from zerofx.ir.operators.operator import Inductor, Operator, OperatorKind, ResultLayout, Traffic, View

_ALLOCATES = Operator(per_element=0, traffic=Traffic.ALLOCATES)
_FILLS = Operator(per_element=0, traffic=Traffic.FILLS)
_DRAWS = Operator(per_element=0, traffic=Traffic.FILLS, draws_by_shape=True)
_FILLS_LIKE = Operator(per_element=0, traffic=Traffic.FILLS, is_pointwise=True)
_OVERWRITES = Operator(per_element=0, traffic=Traffic.OVERWRITES)
_MOVES = Operator(per_element=0)
_PICKS = Operator(per_element=0, traffic=Traffic.PICKS)
_INDEXED = Operator(per_element=0, kind=OperatorKind.INDEXED)
_IDENTITY = Operator(kind=OperatorKind.IDENTITY)
_SPLIT = row_rules.work_along(2)
_COPY_OF_SHAPE = Operator(view=View.WHERE_STRIDES_ALLOW)
_COPY_OF_KIND = Operator(view=View.WHERE_ALIKE)


def _reshape(view: View | None, layout: ResultLayout | None) -> Operator:
    return Operator(kind=OperatorKind.RESHAPE, rows=row_rules.reshape, takes_shape=True, view=view, layout=layout)


OPERATORS: dict[str, Operator] = {
    # Views: facts that their schemas do not have
    "view.default": _reshape(None, ResultLayout.OF_VIEW),
    "_unsafe_view": _reshape(View.ALWAYS, ResultLayout.OF_VIEW),
    "reshape": _reshape(View.WHERE_STRIDES_ALLOW, None),
    "reshape_as": _COPY_OF_SHAPE,
    "flatten": _COPY_OF_SHAPE,
    "ravel": _COPY_OF_SHAPE,
    "contiguous": _COPY_OF_KIND,
    "to": _COPY_OF_KIND,
    "detach": _IDENTITY,
    "alias": _IDENTITY,
    "t": Operator(rows=row_rules.matrix_transpose),
    "transpose.int": Operator(rows=row_rules.transpose),
    "permute": Operator(rows=row_rules.permute),
    "expand": Operator(rows=row_rules.expand, takes_shape=True),
    "unsqueeze": Operator(rows=row_rules.insert_dim(1)),
    "squeeze.dim": Operator(rows=row_rules.squeeze),
    "squeeze.dims": Operator(rows=row_rules.squeeze),
    "select.int": Operator(rows=row_rules.remove_dim),
    "unbind.int": Operator(rows=row_rules.remove_dim),
    "slice.Tensor": Operator(rows=row_rules.work_along(1)),
    "split.Tensor": Operator(rows=_SPLIT),
    "split_with_sizes": Operator(rows=_SPLIT),
    "unsafe_chunk": Operator(view=View.ALWAYS),
    "unsafe_split": Operator(view=View.ALWAYS),
    "unsafe_split_with_sizes": Operator(view=View.ALWAYS),
    "_c10d_functional::wait_tensor": Operator(view=View.ALWAYS),  # hands on the tensor that was waited for
    # Taking memory, filling and copying it
    "empty": _ALLOCATES,
    "empty_strided": _ALLOCATES,
    "empty_permuted": _ALLOCATES,
    "empty_like": _ALLOCATES,
    "new_empty": _ALLOCATES,
    "new_empty_strided": _ALLOCATES,
    "full": Operator(inductor=Inductor.LOOP),
    "zeros": Operator(inductor=Inductor.LOOP),
    "full_like": _FILLS_LIKE,
    "ones_like": _FILLS_LIKE,
    "zeros_like": _FILLS_LIKE,
    "rand": Operator(draws_by_shape=True),
    "randn": Operator(draws_by_shape=True),
    "randint": Operator(draws_by_shape=True),
    "rand_like": _DRAWS,
    "randint_like": _DRAWS,
    "randn_like": _DRAWS,
    "new_full": _FILLS,
    "new_ones": _FILLS,
    "new_zeros": _FILLS,
    "copy_": _OVERWRITES,
    "fill_": _OVERWRITES,
    "zero_": _OVERWRITES,
    "clone": Operator(per_element=0, inductor=Inductor.LOOP),
    "copy": _MOVES,
    "fill": _MOVES,
    "zero": _MOVES,
    "lift_fresh_copy": _MOVES,
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
    "_embedding_bag_backward": Operator(integers=lambda _args: (1,)),  # bags have something in each then
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
