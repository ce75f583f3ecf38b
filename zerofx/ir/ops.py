"""The operators that zerofx adds to ATen for its step graphs.

They are registered with schemas and fake implementations, so that fake tensors flow through them and alias analysis
reads them like any other operator. Those that compute have kernels, and may run in regions; the others have none: what
runs is the emitted step, which calls the runtime (``zerofx/runtime/executor.py``) in their place.

====================  ==============================================================================================
``all_gather``        start gathering every rank's slice of a flat bucket into a fresh full buffer; ``more``
                      gathers stand directly after it, and all of them start with the last, as one collective;
                      ``in_place``: no slice changes before all ranks are done with what they have gathered
``all_gather_into``   the same into a full buffer that exists, of which this rank's slice is already up to date
``reduce_scatter``    start summing a flat gradient buffer over the ranks; the result is this rank's slice
``reduce_scatter_into``  the same into this rank's slice of the buffer, which the result is
                      ``over``, of these four and of what knows nodes: the axes of the mesh that its ranks are on
                      (``ir/collective_axes.py``); a node's ranks are then those of them that it has
``wait``              the value of what was started; ``source`` is the buffer that it still reads until then
``release``           the end of a gathered bucket's residency
``empty_gradients``   a flat gradient buffer whose padding is zero and whose slots are still to be written
``broadcast``         overwrite buffers by rank 0's
``hyperparameters``   the update's scalars of this step for a bucket: plain Python floats
``offload``           start copying a tensor from the device into a slower tier; strides are kept
``reload``            start copying what is stored in a slower tier into a fresh tensor on a faster one
``copy_into``         start copying a tensor over one that exists, on another tier
``empty_stored``      a tensor on a slower tier that is still to be written
``check_finite``      end the step before its updates, on all ranks, where the loss of one is not finite
``check_overflow``        end the step before its updates, on all ranks, where the loss of one says that rows of experts
                      have found no room; ``shares`` tell how much they need
``next_micro_batch``  a micro-batch is over, and the next one begins; ``carried`` is what it hands on
``keep_draws``        the generators' states here are those of the micro-batch that is run; ``first``: the step's first
``take_draws``        the generators go on for the micro-batch that is run next, from the state kept longest
``swap_draws``        the same, for some draws alone: ``take_draws`` goes back to the states that they begin from
``drop_draw``         what has been drawn for the generators to go on, and for nothing else
``check_gradients``   end the step before its updates where a gradient is not finite: where ``largest`` is not, which is
                      the same on all ranks; ``outcome`` is what the step gives then
``run_on``            a step may end before the host is done with a bucket's update, and before ``copies`` of it are;
                      ``held`` is what they read until then; ``back``: it is what goes back to its tier that may go on
``settle``            hold until the host is done with the update of a bucket, and copies of it that run on: of this
                      step, or of the one before; ``held`` is what the host reads until then
``part``              a view of some elements of a tensor that enters a region as it stands: one serves them all
``mm_into``           a matrix product written over a tensor: ``mm(..., out=)`` for compiled regions, and their kernel
``product``           a matrix product in float32 on a CPU by other means than ATen's BLAS, plus a bias if there is one,
                      where a compiled region has it so (``zerofx/ir/op_kernels/products.py``)
``product_into``      the same, written over a tensor
``bernoulli_into``    ATen's ``bernoulli_``, which a compiled region runs whether or not the draws are read
``own_...``           random operators of ATen, and the one above, where a rank draws for its part of a value
                      (``zerofx/ir/op_kernels/own_draws.py``)
``own_ends``          where this rank's groups of rows end, of those that are after one another in a tensor
``own_rows``          the same rows, those of this rank's groups first, and
``whole_rows``        those alone, back in their places; ``group_rows`` what the group of each row of this rank has,
                      and ``add_group_rows`` sums over its rows (``zerofx/ir/op_kernels/own_rows.py``)
``row_routes``        which rows a rank sends others, to the groups that have them or back, and where received ones go
``row_shares``        the most of them that a rank has for another, and ``group_shares``, that a rank has, in equal
                      shares, and whether there is room; ``unlike_shares``, whether rows lie in other groups than named
``pack_rows``         the rows for each rank, ``land_rows`` those that were received in their places, and ``add_rows``
                      their sums there (``zerofx/ir/op_kernels/row_routes.py``)
``deal_rows``         rows of the groups that have the most, dealt to all ranks, ``own_slots`` where this rank has these
                      groups, ``undealt_shares`` the most rows for one rank if none were dealt, and ``sum_order`` the
                      order that received rows are summed in (``zerofx/ir/op_kernels/row_copies.py``)
``row_rounds``        the round of each row, where they go in several; ``round_...`` are the same of one round, and
                      ``land_more`` and ``add_home_rows`` bring rounds together (``zerofx/ir/op_kernels/row_rounds.py``)
``checked``           a copy of what linear algebra gave, once its own report says that it succeeded
``asserted``          a copy of a tensor, once it is seen that what a forward checks holds
``masked_sum``        the sum, to a size, of the rows of a tensor that a mask names
``prod_gradient``     the gradient of the factors of a product, computed as eager mode does where one is zero or none
``embedding_gradient``  ATen's ``embedding_dense_backward``, for which Inductor has something else
``quantise``          flat values as bytes to send, in few bits with a scale for each block, a row for each part
``dequantise``        the values of all parts of what was quantised, in order
``dequantise_sum``    the sum of the parts of what was quantised
``quantise_saved``    a value in 8 bits, in blocks with a scale each, from its last use in forward on, and
``restore_saved``     the value again, for backward (``zerofx/ir/op_kernels/saved.py``)
``fp8_scale``         what a matrix, or each of its rows or columns, is multiplied by before it is cast to fp8: of its
                      values, or of their largest magnitudes among ranks that have parts of it, ``fp8_largest``
``fp8_cast``          that cast, and ``fp8_unscale``, a product of two casts without their scales
                      (``zerofx/ir/op_kernels/fp8.py``)
``fp8_slice_largest``  the largest magnitudes of what has one scale in this rank's slice of a bucket: of ``"whole"``
                      weights, or of their ``"rows"`` or ``"columns"``, and ``fp8_slice_cast``, the cast of the slice
                      with the scales of all ranks (``zerofx/ir/op_kernels/fp8_slices.py``)
``onednn_lstm``       a layer of an LSTM by oneDNN, with what backward needs of it, and its gradients: as eager mode
                      runs it on a CPU (``zerofx/ir/op_kernels/onednn_lstm.py``)
``recurrent_steps``   the time steps of a layer of an RNN, GRU or LSTM, with what backward needs of them, and their
                      gradients (``zerofx/ir/op_kernels/recurrent.py``)
``softmax_chunk``     what each row's softmax needs of a run of classes: see ``zerofx/ir/op_kernels/softmax.py``
``softmax_gradient``  the logits of a run of classes become their gradients
``gather_on_node``    start gathering the parts of a bucket that the ranks of this node hold, into a fresh full buffer
``exchange``          start sending part i to the group's rank i, and receiving one part from each: an all-to-all.
                      Groups are ``"all"`` ranks, those of a ``"node"``, and those ``"across"`` nodes in the same place
``to_owners``         start sending this rank's slice of a bucket to the owners of its parameters, piece by piece, and
                      receiving the parameters that it owns, in a buffer of ``numel`` elements; ``moved`` elements
                      in all go to other ranks
``from_owners``       start sending what this rank owns of a bucket back, and receiving its slice of ``numel`` elements
``cast_owned``        what this rank owns of a bucket in another dtype, in a buffer of ``numel`` elements
``update_whole``      the optimizer's own step on the parameters in ``params`` that this rank owns of a bucket, or of
                      this and others (``zerofx/optimizers/whole``); ``parts`` are those of all ranks of the model
                      axis, and of their gradients, where some parameters are in parts there; ``flops``, of products
                      in ``dtype``, and ``scratch_bytes`` are those of the busiest owner, ``mean_flops`` the mean of
                      all owners
``gather_values``     start gathering every rank's tensor, a value of the step: a first dimension of ranks
``reduce_scatter_values``  start summing, of a tensor with a first dimension of ranks, this rank's part
``all_reduce_values``  start reducing a tensor over the ranks: ``"sum"``, ``"max"`` or ``"min"``
``exchange_values``   start sending part i of a first dimension to rank i, and receiving one from each
``shift_values``      start sending a tensor to the next rank, the last one's to the first, and receiving one; these
                      five are for ranks that share one computation, and ``over`` names their axis of the mesh
``send_value``        start sending a tensor to the rank of stage ``to`` in this one's place, on the axis pipe; its wait
                      gives nothing, and holds the tensor until then
``receive_value``     start receiving one of this shape and these strides from the rank of stage ``source``
``second_shard``      this rank's part, of as many as its node has ranks, of a gathered bucket, copied
``attention``         attention in float32 on a CPU, and its gradients: kernels of ours in the place of ATen's, where a
                      compiled region has them (``zerofx/ir/op_kernels/attention.py``)
``square_sum``        the sum of the squares of flat values, in float64: a part of the norm of all gradients
``largest``           the largest magnitude of flat values, in float64: not finite where a value in memory is not; a
                      compiled region would look at what it has not rounded yet
====================  ==============================================================================================
"""

from __future__ import annotations

import torch

from zerofx.ir.op_kernels import as_aten, fakes, fp8, norms, recurrent, saved, softmax
from zerofx.ir.op_kernels import onednn_lstm as _onednn_lstm
from zerofx.ir.op_kernels import quantise as _quantise
from zerofx.ir.op_kernels.attention import empty_results
from zerofx.ir.op_kernels.fakes import dense
from zerofx.ir.op_kernels.own_operator import launcher, own_operator
from zerofx.ir.op_kernels.products import empty_result

NO_BUCKET = -1  # in the place of a bucket's index: a collective that is about all of them

all_gather = own_operator(
    "all_gather(Tensor shard, int bucket, int num_ranks, int more=0, *, bool in_place=False, str over='shard') "
    "-> Tensor",
    fakes.whole_bucket,
)
all_gather_into = own_operator(
    "all_gather_into(Tensor(a!) full, Tensor shard, int bucket, *, str over='shard') -> Tensor(a!)", fakes.first
)
reduce_scatter = own_operator(
    "reduce_scatter(Tensor gradients, int bucket, int num_ranks, *, str over='shard') -> Tensor", fakes.slice_apart
)
reduce_scatter_into = own_operator(
    "reduce_scatter_into(Tensor(a!) gradients, int bucket, int num_ranks, *, str over='shard') -> Tensor(a!)",
    lambda gradients, bucket, num_ranks, **_: gradients.narrow(0, 0, gradients.numel() // num_ranks),
)
gather_on_node = own_operator(
    "gather_on_node(Tensor part, int bucket, int num_ranks, *, str over='shard') -> Tensor", fakes.whole_bucket
)
exchange = own_operator(
    "exchange(Tensor parts, int bucket, int num_ranks, str group, *, str over='shard') -> Tensor",
    fakes.empty_like_first,
)
to_owners = own_operator(
    "to_owners(Tensor shard, int bucket, int num_ranks, int numel, int moved, *, str over='shard') -> Tensor",
    fakes.flat_of,
)
from_owners = own_operator(
    "from_owners(Tensor owned, int bucket, int num_ranks, int numel, int moved, *, str over='shard') -> Tensor",
    fakes.flat_of,
)
cast_owned = own_operator(
    "cast_owned(Tensor owned, int numel, ScalarType dtype) -> Tensor",
    lambda owned, numel, dtype: owned.new_empty(numel, dtype=dtype),
)
update_whole = own_operator(
    "update_whole(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] states, Tensor[] parts, int bucket, *, "
    "int flops, int mean_flops, int num_parameters, ScalarType dtype, int scratch_bytes, str over) -> ()",
    fakes.no_result,
)
second_shard = own_operator(
    "second_shard(Tensor full, int bucket, int num_ranks, *, str over='shard') -> Tensor", fakes.slice_apart
)
broadcast = own_operator("broadcast(Tensor(a!)[] buffers) -> ()", fakes.no_result)
wait = own_operator("wait(Tensor(a) pending, Tensor? source=None) -> Tensor(a)", fakes.first)
release = own_operator("release(Tensor full) -> ()", fakes.no_result)
run_on = own_operator("run_on(int bucket, Tensor[] copies, Tensor[] held, *, bool back=False) -> ()", fakes.no_result)
settle = own_operator("settle(int bucket, Tensor[]? held=None, *, bool back=False) -> ()", fakes.no_result)
empty_gradients = own_operator(
    "empty_gradients(int bucket, int numel, *, ScalarType dtype, Device device) -> Tensor",
    lambda bucket, numel, **kinds: torch.empty(numel, **kinds),
)
offload = own_operator("offload(Tensor value, str tier) -> Tensor", fakes.empty_like_first)
reload = own_operator("reload(Tensor stored, str tier='device') -> Tensor", fakes.empty_like_first)
copy_into = own_operator("copy_into(Tensor(a!) into, Tensor source) -> Tensor(a!)", fakes.first)
empty_stored = own_operator(
    "empty_stored(int numel, ScalarType dtype, str tier, *, Device device) -> Tensor",
    lambda numel, dtype, tier, *, device: torch.empty(numel, dtype=dtype, device=device),
)
check_finite = own_operator("check_finite(Tensor loss) -> ()", fakes.no_result)
check_overflow = own_operator("check_overflow(Tensor loss, Tensor[] shares) -> ()", fakes.no_result)
check_gradients = own_operator("check_gradients(Tensor largest, Tensor[] outcome) -> ()", fakes.no_result)
next_micro_batch = own_operator("next_micro_batch(int number, Tensor[] carried) -> ()", fakes.no_result)
keep_draws = own_operator("keep_draws(bool first) -> ()", fakes.no_result)
take_draws = own_operator("take_draws() -> ()", fakes.no_result)
swap_draws = own_operator("swap_draws() -> ()", fakes.no_result)
drop_draw = own_operator("drop_draw(Tensor drawn) -> ()", fakes.no_result)
part = own_operator(
    "part(Tensor(a) whole, int[] size, int[] stride, int offset) -> Tensor(a)", as_aten.part, kernel=as_aten.part
)
mm_into = own_operator("mm_into(Tensor(a!) into, Tensor a, Tensor b) -> ()", fakes.no_result, kernel=as_aten.mm_into)
bernoulli_into = own_operator(
    "bernoulli_into(Tensor(a!) into, Tensor? chances, float p) -> ()", fakes.no_result, kernel=as_aten.bernoulli_into,
    tags=(torch.Tag.nondeterministic_seeded,),
)  # fmt: skip
checked = own_operator(
    "checked(Tensor value, Tensor info, str name, bool is_matrix) -> Tensor",
    lambda value, *_: value.clone(), kernel=as_aten.check_linalg, tags=(torch.Tag.cudagraph_unsafe,),
)  # fmt: skip
asserted = own_operator(
    "asserted(Tensor value, Tensor holds, str text) -> Tensor",
    lambda value, *_: value.clone(), kernel=as_aten.assert_holds, tags=(torch.Tag.cudagraph_unsafe,),
)  # fmt: skip
masked_sum = own_operator(
    "masked_sum(Tensor values, Tensor mask, int[] size) -> Tensor",
    lambda values, mask, size: values.new_empty(size),
    kernel=as_aten.sum_where,
)
prod_gradient = own_operator(
    "prod_gradient(Tensor gradient, Tensor x, Tensor result, int? dim, bool keepdim) -> Tensor",
    lambda gradient, x, *_: x.new_empty(x.shape), kernel=as_aten.prod_gradient,
)  # fmt: skip
embedding_gradient = own_operator(
    "embedding_gradient(Tensor grad, Tensor indices, int num_weights, int padding_idx, bool scale_grad_by_freq) "
    "-> Tensor",
    lambda grad, indices, num_weights, *_: grad.new_empty(num_weights, grad.shape[-1]),
    kernel=as_aten.embedding_gradient,
)  # fmt: skip
product = own_operator(
    "product(Tensor left, Tensor right, Tensor? bias) -> Tensor", empty_result,
    cpu=launcher("cpu.products", "product"),
)  # fmt: skip
product_into = own_operator(
    "product_into(Tensor(a!) into, Tensor left, Tensor right) -> ()", fakes.no_result,
    cpu=launcher("cpu.products", "product_into"),
)  # fmt: skip
attention = own_operator(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale) -> (Tensor, Tensor)",
    empty_results, cpu=launcher("cpu.attention", "attention"),
)  # fmt: skip
attention_backward = own_operator(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor result, Tensor log_sums, "
    "Tensor? mask, bool is_causal, float? scale) -> (Tensor, Tensor, Tensor)",
    lambda grad, *inputs: tuple(map(torch.empty_like, inputs[:3])), cpu=launcher("cpu.attention", "attention_backward"),
)  # fmt: skip
onednn_lstm = own_operator(
    "onednn_lstm(Tensor x, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, Tensor h, Tensor c, bool reverse, "
    "bool has_biases, int num_bytes) -> (Tensor, Tensor, Tensor, Tensor)",
    _onednn_lstm.empty_layer, cpu=_onednn_lstm.lstm_layer,
)  # fmt: skip
onednn_lstm_backward = own_operator(
    "onednn_lstm_backward(Tensor x, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, Tensor h, Tensor c, Tensor y, "
    "Tensor last_h, Tensor last_c, Tensor? grad_y, Tensor? grad_h, Tensor? grad_c, bool reverse, bool has_biases, "
    "Tensor workspace) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _onednn_lstm.empty_gradients, cpu=_onednn_lstm.lstm_layer_backward,
)  # fmt: skip
recurrent_steps = own_operator(
    "recurrent_steps(Tensor x, Tensor h, Tensor? c, Tensor w_hh, Tensor? b_hh, Tensor? w_hr, str cell, bool reverse) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    recurrent.empty_steps, cpu=recurrent.steps,
)  # fmt: skip
recurrent_steps_backward = own_operator(
    "recurrent_steps_backward(Tensor? grad_y, Tensor? grad_h, Tensor? grad_c, Tensor? of_w_hh, Tensor? of_b_hh, "
    "Tensor? of_w_hr, Tensor h, Tensor? c, Tensor w_hh, Tensor? w_hr, Tensor saved, str cell, bool reverse, "
    "bool has_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    recurrent.empty_gradients, cpu=recurrent.steps_backward,
)  # fmt: skip
softmax_chunk = own_operator(
    "softmax_chunk(Tensor logits, Tensor target, int first_class, Tensor? stats) -> Tensor",
    lambda logits, *_: logits.new_empty(3, logits.shape[0], dtype=torch.float32),
    cpu=softmax.softmax_chunk, cuda=launcher("kernels.softmax", "softmax_chunk"),
)  # fmt: skip
softmax_gradient = own_operator(
    "softmax_gradient(Tensor(a!) logits, Tensor target, int first_class, Tensor log_sums, Tensor scale, "
    "int ignore_index) -> ()",
    fakes.no_result, cpu=softmax.softmax_gradient, cuda=launcher("kernels.softmax", "softmax_gradient"),
)  # fmt: skip
largest = own_operator("largest(Tensor values) -> Tensor", fakes.one_number, kernel=norms.largest)


quantise = own_operator(
    "quantise(Tensor values, int num_parts, str encoding, int interleave=1) -> Tensor",
    fakes.pack, kernel=_quantise.quantise,
)  # fmt: skip
dequantise = own_operator(
    "dequantise(Tensor packed, int num_parts, str encoding, ScalarType dtype) -> Tensor",
    fakes.unpack, kernel=_quantise.dequantise,
)  # fmt: skip
dequantise_sum = own_operator(
    "dequantise_sum(Tensor packed, int num_parts, str encoding, ScalarType dtype) -> Tensor",
    fakes.unpack_sum, kernel=_quantise.dequantise_sum,
)  # fmt: skip
quantise_saved = own_operator(
    "quantise_saved(Tensor values, str encoding, int[] order) -> (Tensor, Tensor)",
    saved.empty_saved, kernel=saved.quantise_saved,
)  # fmt: skip
restore_saved = own_operator(
    "restore_saved(Tensor codes, Tensor scales, str encoding, int[] size, int[] stride, ScalarType dtype) -> Tensor",
    saved.empty_restored, kernel=saved.restore_saved,
)  # fmt: skip
fp8_largest = own_operator("fp8_largest(Tensor values, int? dim) -> Tensor", fp8.empty_scale, kernel=fp8.largest)
fp8_scale = own_operator(
    "fp8_scale(Tensor values, ScalarType dtype, int? dim, bool power_of_two) -> Tensor",
    fp8.empty_scale, kernel=fp8.scale,
)  # fmt: skip
fp8_slice_largest = own_operator(
    "fp8_slice_largest(Tensor shard, int bucket, str scaled, int num_scales, *, str over) -> Tensor",
    lambda shard, _bucket, _scaled, num_scales, **_: shard.new_empty(num_scales, 1, dtype=torch.float32),
)
fp8_slice_cast = own_operator(
    "fp8_slice_cast(Tensor shard, Tensor scales, int bucket, str scaled, int first, *, str over) -> Tensor",
    lambda shard, *_, **__: shard.new_empty(shard.shape, dtype=torch.float8_e4m3fn),
)
fp8_cast = own_operator(
    "fp8_cast(Tensor values, Tensor scales, ScalarType dtype, bool by_columns) -> Tensor",
    fp8.empty_cast, kernel=fp8.cast,
)  # fmt: skip
fp8_unscale = own_operator(
    "fp8_unscale(Tensor product, Tensor left, Tensor right) -> Tensor", fp8.empty_unscale, kernel=fp8.unscale
)
square_sum = own_operator("square_sum(Tensor values) -> Tensor", fakes.one_number, kernel=norms.square_sum)


def hyperparameters(bucket: int, num_scalars: int) -> tuple[float, ...]:
    """The scalars of bucket ``bucket``'s update; as a fake value, ``num_scalars`` zeros."""
    return (0.0,) * num_scalars


gather_values = own_operator(
    "gather_values(Tensor part, int num_ranks, *, str over) -> Tensor",
    lambda part, num_ranks, *, over: part.new_empty(num_ranks, *part.shape),
)
reduce_scatter_values = own_operator(
    "reduce_scatter_values(Tensor parts, int num_ranks, *, str over) -> Tensor",
    lambda parts, *_, over: parts.new_empty(parts.shape[1:]),
)
all_reduce_values = own_operator(
    "all_reduce_values(Tensor value, str reduction, int num_ranks, *, str over) -> Tensor", dense
)
exchange_values = own_operator("exchange_values(Tensor parts, int num_ranks, *, str over) -> Tensor", dense)
shift_values = own_operator("shift_values(Tensor value, int num_ranks, *, str over) -> Tensor", dense)

send_value = own_operator(
    "send_value(Tensor value, int to, *, str over) -> Tensor", lambda value, to, *, over: value.new_empty(0)
)
receive_value = own_operator(
    "receive_value(int source, int[] size, int[] stride, ScalarType dtype, *, Device device, str over) -> Tensor",
    lambda source, size, stride, dtype, *, device, over: torch.empty_strided(size, stride, dtype=dtype, device=device),
)

VALUE_COLLECTIVES = frozenset({gather_values, reduce_scatter_values, all_reduce_values, exchange_values, shift_values})

REDUCTIONS = frozenset({reduce_scatter, reduce_scatter_into})
MESSAGES = frozenset({send_value, receive_value})
OVER_AXES = frozenset(
    {
        all_gather,
        all_gather_into,
        *REDUCTIONS,
        gather_on_node,
        exchange,
        to_owners,
        from_owners,
        *VALUE_COLLECTIVES,
        *MESSAGES,
    }
)  # which say the axes of the mesh that they run over
COLLECTIVES = frozenset({*OVER_AXES, broadcast})
OWNER_EXCHANGES = frozenset({to_owners, from_owners})
TRANSFERS = frozenset({offload, reload, copy_into})
SLICE_CASTS = frozenset({fp8_slice_largest, fp8_slice_cast})
AROUND_MICRO_BATCHES = frozenset({next_micro_batch, keep_draws, take_draws, swap_draws, drop_draw})
EVENTS = frozenset(
    {
        *AROUND_MICRO_BATCHES,
        *COLLECTIVES,
        *TRANSFERS,
        *SLICE_CASTS,
        wait,
        release,
        run_on,
        settle,
        check_finite,
        check_overflow,
        check_gradients,
        empty_gradients,
        empty_stored,
        part,
        second_shard,
        cast_owned,
        hyperparameters,
        update_whole,
    }
)
QUANTISERS = frozenset({quantise, dequantise, dequantise_sum})
