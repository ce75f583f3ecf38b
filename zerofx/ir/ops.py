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
                      ``over``, of these four: the axes of the mesh that its ranks are on (``ir/communicators.py``)
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
``next_micro_batch``  a micro-batch is over, and the next one begins; ``carried`` is what it hands on
``check_gradients``   end the step before its updates where a gradient is not finite: where ``largest`` is not, which is
                      the same on all ranks; ``outcome`` is what the step gives then
``settle``            hold until the host is done with the delayed update of a bucket, started in the step before
``part``              a view of some elements of a tensor that enters a region as it stands: one serves them all
``mm_into``           a matrix product written over a tensor: ``mm(..., out=)`` for compiled regions, and their kernel
``product``           a matrix product in float32 on a CPU by other means than ATen's BLAS, plus a bias if there is one,
                      where a compiled region has it so (``zerofx/ir/op_kernels/products.py``)
``product_into``      the same, written over a tensor
``bernoulli_into``    ATen's ``bernoulli_``, which a compiled region runs whether or not the draws are read
``checked``           a copy of what linear algebra gave, once its own report says that it succeeded
``asserted``          a copy of a tensor, once it is seen that what a forward checks holds
``masked_sum``        the sum, to a size, of the rows of a tensor that a mask names
``prod_gradient``     the gradient of the factors of a product, computed as eager mode does where one is zero or none
``embedding_gradient``  ATen's ``embedding_dense_backward``, for which Inductor has something else
``quantise``          flat values as bytes to send, in few bits with a scale for each block, a row for each part
``dequantise``        the values of all parts of what was quantised, in order
``dequantise_sum``    the sum of the parts of what was quantised
``launch_...``        the three above and ``square_sum`` as kernels of ours, where a step on CUDA is to launch them
``softmax_chunk``     what each row's softmax needs of a run of classes: see ``zerofx/ir/op_kernels/softmax.py``
``softmax_gradient``  the logits of a run of classes become their gradients
``gather_on_node``    start gathering the parts of a bucket that the ranks of this node hold, into a fresh full buffer
``exchange``          start sending part i to the group's rank i, and receiving one part from each: an all-to-all.
                      Groups are ``"all"`` ranks, those of a ``"node"``, and those ``"across"`` nodes in the same place
``second_shard``      this rank's part, of as many as its node has ranks, of a gathered bucket, copied
``attention``         attention in float32 on a CPU, and its gradients: kernels of ours in the place of ATen's, where a
                      compiled region has them (``zerofx/ir/op_kernels/attention.py``)
``square_sum``        the sum of the squares of flat values, in float64: a part of the norm of all gradients
``largest``           the largest magnitude of flat values, in float64: not finite where a value in memory is not; a
                      compiled region would look at what it has not rounded yet
====================  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from zerofx.ir.op_kernels import quantise as _quantise
from zerofx.ir.op_kernels import softmax as _softmax
from zerofx.ir.op_kernels.attention import empty_results as _empty_results
from zerofx.ir.op_kernels.norms import largest as _largest
from zerofx.ir.op_kernels.norms import square_sum as _square_sum
from zerofx.ir.op_kernels.products import empty_result as _empty_product
from zerofx.ir.op_kernels.value_gradients import masked_sum as _masked_sum
from zerofx.ir.op_kernels.value_gradients import prod_gradient as _prod_gradient

NO_BUCKET = -1  # in the place of a bucket's index: a collective that is about all of them

_library = torch.library.Library("zerofx", "DEF")  # torch unregisters the operators when this object goes
_library.define(
    "all_gather(Tensor shard, int bucket, int num_ranks, int more=0, *, bool in_place=False, str over='shard') "
    "-> Tensor"
)
_library.define("all_gather_into(Tensor(a!) full, Tensor shard, int bucket, *, str over='shard') -> Tensor(a!)")
_library.define("reduce_scatter(Tensor gradients, int bucket, int num_ranks, *, str over='shard') -> Tensor")
_library.define(
    "reduce_scatter_into(Tensor(a!) gradients, int bucket, int num_ranks, *, str over='shard') -> Tensor(a!)"
)
_library.define("wait(Tensor(a) pending, Tensor? source=None) -> Tensor(a)")
_library.define("release(Tensor full) -> ()")
_library.define("empty_gradients(int bucket, int numel, *, ScalarType dtype, Device device) -> Tensor")
_library.define("broadcast(Tensor(a!)[] buffers) -> ()")
_library.define("offload(Tensor value, str tier) -> Tensor")
_library.define("reload(Tensor stored, str tier='device') -> Tensor")
_library.define("copy_into(Tensor(a!) into, Tensor source) -> Tensor(a!)")
_library.define("mm_into(Tensor(a!) into, Tensor a, Tensor b) -> ()")
_library.define("product(Tensor left, Tensor right, Tensor? bias) -> Tensor")
_library.define("product_into(Tensor(a!) into, Tensor left, Tensor right) -> ()")
_library.define(
    "bernoulli_into(Tensor(a!) into, Tensor? chances, float p) -> ()", tags=(torch.Tag.nondeterministic_seeded,)
)
_library.define(
    "checked(Tensor value, Tensor info, str name, bool is_matrix) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,)
)
_library.define("asserted(Tensor value, Tensor holds, str text) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
_library.define(
    "embedding_gradient(Tensor grad, Tensor indices, int num_weights, int padding_idx, bool scale_grad_by_freq) "
    "-> Tensor"
)
_library.define("masked_sum(Tensor values, Tensor mask, int[] size) -> Tensor")
_library.define("prod_gradient(Tensor gradient, Tensor x, Tensor result, int? dim, bool keepdim) -> Tensor")
_library.define("empty_stored(int numel, ScalarType dtype, str tier, *, Device device) -> Tensor")
_library.define("settle(int bucket) -> ()")
_library.define("check_finite(Tensor loss) -> ()")
_library.define("next_micro_batch(int number, Tensor[] carried) -> ()")
_library.define("check_gradients(Tensor largest, Tensor[] outcome) -> ()")
_library.define("quantise(Tensor values, int num_parts, str encoding, int interleave=1) -> Tensor")
_library.define("dequantise(Tensor packed, int num_parts, str encoding, ScalarType dtype) -> Tensor")
_library.define("dequantise_sum(Tensor packed, int num_parts, str encoding, ScalarType dtype) -> Tensor")
_library.define("launch_quantise(Tensor values, int num_parts, str encoding, int interleave=1) -> Tensor")
_library.define("launch_dequantise(Tensor packed, int num_parts, str encoding, ScalarType dtype) -> Tensor")
_library.define("launch_dequantise_sum(Tensor packed, int num_parts, str encoding, ScalarType dtype) -> Tensor")
_library.define("softmax_chunk(Tensor logits, Tensor target, int first_class, Tensor? stats) -> Tensor")
_library.define(
    "softmax_gradient(Tensor(a!) logits, Tensor target, int first_class, Tensor log_sums, Tensor scale, "
    "int ignore_index) -> ()"
)
_library.define("gather_on_node(Tensor part, int bucket, int num_ranks) -> Tensor")
_library.define("exchange(Tensor parts, int bucket, int num_ranks, str group) -> Tensor")
_library.define("second_shard(Tensor full, int bucket, int num_ranks) -> Tensor")
_library.define("square_sum(Tensor values) -> Tensor")
_library.define("largest(Tensor values) -> Tensor")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale) -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor result, Tensor log_sums, "
    "Tensor? mask, bool is_causal, float? scale) -> (Tensor, Tensor, Tensor)"
)
_library.define("launch_square_sum(Tensor values) -> Tensor")
_library.define("part(Tensor(a) whole, int[] size, int[] stride, int offset) -> Tensor(a)")


def _all_gather(
    shard: torch.Tensor, bucket: int, num_ranks: int, more: int = 0, *, in_place: bool = False, over: str = "shard"
) -> torch.Tensor:
    return shard.new_empty(shard.numel() * num_ranks)


def _all_gather_into(full: torch.Tensor, shard: torch.Tensor, bucket: int, *, over: str = "shard") -> torch.Tensor:
    return full


def _reduce_scatter(gradients: torch.Tensor, bucket: int, num_ranks: int, *, over: str = "shard") -> torch.Tensor:
    return gradients.new_empty(gradients.numel() // num_ranks)


def _reduce_scatter_into(gradients: torch.Tensor, bucket: int, num_ranks: int, *, over: str = "shard") -> torch.Tensor:
    return gradients.narrow(0, 0, gradients.numel() // num_ranks)


def _wait(pending: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
    return pending


def _nothing(*_args: object) -> None:
    return None


def _empty_gradients(bucket: int, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _copy_of(value: torch.Tensor, *_args: object) -> torch.Tensor:
    return value.clone()


def _copied(value: torch.Tensor, tier: str = "device") -> torch.Tensor:
    return value.new_empty_strided(value.shape, value.stride())


def _copy_into(into: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return into


def _empty_stored(numel: int, dtype: torch.dtype, tier: str, *, device: torch.device) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _part(whole: torch.Tensor, size: list[int], stride: list[int], offset: int) -> torch.Tensor:
    return whole.as_strided(size, stride, whole.storage_offset() + offset)


def _mm_into(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    torch.mm(a, b, out=into)


def _bernoulli_into(into: torch.Tensor, chances: torch.Tensor | None, p: float) -> None:
    into.bernoulli_(p if chances is None else chances)


def _checked(value: torch.Tensor, info: torch.Tensor, name: str, is_matrix: bool) -> torch.Tensor:
    torch.ops.aten._linalg_check_errors(info, name, is_matrix=is_matrix)
    return value.clone()


def _asserted(value: torch.Tensor, holds: torch.Tensor, text: str) -> torch.Tensor:
    if not holds:
        raise RuntimeError(text)
    return value.clone()


def _empty_sum(values: torch.Tensor, mask: torch.Tensor, size: list[int]) -> torch.Tensor:
    return values.new_empty(size)


def _empty_prod_gradient(
    gradient: torch.Tensor, x: torch.Tensor, result: torch.Tensor, dim: int | None, keepdim: bool
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _embedding_gradient(grad: torch.Tensor, *args: Any) -> torch.Tensor:
    gradient: torch.Tensor = torch.ops.aten.embedding_dense_backward(grad, *args)
    return gradient


def _empty_embedding_gradient(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, *_args: object
) -> torch.Tensor:
    return grad.new_empty(num_weights, grad.shape[-1])


def _packed(values: torch.Tensor, num_parts: int, encoding: str, interleave: int = 1) -> torch.Tensor:
    return values.new_empty(
        num_parts * _quantise.packed_bytes(values.numel() // num_parts, encoding), dtype=torch.uint8
    )


def _unpacked(packed: torch.Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty(num_parts * _quantise.unpacked_numel(packed.numel() // num_parts, encoding), dtype=dtype)


def _unpacked_sum(packed: torch.Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty(_quantise.unpacked_numel(packed.numel() // num_parts, encoding), dtype=dtype)


def _stats(logits: torch.Tensor, target: torch.Tensor, first_class: int, stats: torch.Tensor | None) -> torch.Tensor:
    return logits.new_empty(3, logits.shape[0], dtype=torch.float32)


def _kernel_of(module: str, name: str) -> Callable[..., Any]:
    """A kernel's launch; what it takes to build kernels is imported with the first."""

    def launch(*args: Any) -> Any:
        return getattr(import_module(f"zerofx.codegen.{module}"), name)(*args)

    return launch


def _one_number(values: torch.Tensor) -> torch.Tensor:
    return values.new_empty(1, dtype=torch.float64)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_args: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_results(query)


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_args: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _exchange(parts: torch.Tensor, bucket: int, num_ranks: int, group: str) -> torch.Tensor:
    return torch.empty_like(parts)


for _module, _name, _kernel in (
    ("wire", "quantise", _quantise.quantise),
    ("wire", "dequantise", _quantise.dequantise),
    ("wire", "dequantise_sum", _quantise.dequantise_sum),
    ("norms", "square_sum", _square_sum),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _key)
    _library.impl(f"launch_{_name}", _kernel, "CPU")
    _library.impl(f"launch_{_name}", _kernel_of(f"kernels.{_module}", _name), "CUDA")

for _name, _reference in (
    ("softmax_chunk", _softmax.softmax_chunk),
    ("softmax_gradient", _softmax.softmax_gradient),
):
    _library.impl(_name, _reference, "CPU")
    _library.impl(_name, _kernel_of("kernels.softmax", _name), "CUDA")

for _name in ("attention", "attention_backward"):
    _library.impl(_name, _kernel_of("cpu.attention", _name), "CPU")

for _name in ("product", "product_into"):
    _library.impl(_name, _kernel_of("cpu.products", _name), "CPU")

_library.impl("mm_into", _mm_into, "CompositeExplicitAutograd")
_library.impl("bernoulli_into", _bernoulli_into, "CompositeExplicitAutograd")
_library.impl("checked", _checked, "CompositeExplicitAutograd")
_library.impl("asserted", _asserted, "CompositeExplicitAutograd")
_library.impl("largest", _largest, "CompositeExplicitAutograd")
_library.impl("masked_sum", _masked_sum, "CompositeExplicitAutograd")
_library.impl("prod_gradient", _prod_gradient, "CompositeExplicitAutograd")
_library.impl("embedding_gradient", _embedding_gradient, "CompositeExplicitAutograd")
_library.impl("part", _part, "CompositeExplicitAutograd")  # a view is the same on any device

for _name, _fake in (
    ("all_gather", _all_gather),
    ("all_gather_into", _all_gather_into),
    ("reduce_scatter", _reduce_scatter),
    ("reduce_scatter_into", _reduce_scatter_into),
    ("wait", _wait),
    ("release", _nothing),
    ("settle", _nothing),
    ("check_finite", _nothing),
    ("next_micro_batch", _nothing),
    ("check_gradients", _nothing),
    ("empty_gradients", _empty_gradients),
    ("broadcast", _nothing),
    ("offload", _copied),
    ("reload", _copied),
    ("copy_into", _copy_into),
    ("empty_stored", _empty_stored),
    ("bernoulli_into", _nothing),
    ("checked", _copy_of),
    ("asserted", _copy_of),
    ("mm_into", _nothing),
    ("masked_sum", _empty_sum),
    ("prod_gradient", _empty_prod_gradient),
    ("embedding_gradient", _empty_embedding_gradient),
    ("product", _empty_product),
    ("product_into", _nothing),
    ("quantise", _packed),
    ("dequantise", _unpacked),
    ("dequantise_sum", _unpacked_sum),
    ("launch_quantise", _packed),
    ("launch_dequantise", _unpacked),
    ("launch_dequantise_sum", _unpacked_sum),
    ("softmax_chunk", _stats),
    ("softmax_gradient", _nothing),
    ("gather_on_node", _all_gather),
    ("exchange", _exchange),
    ("second_shard", _reduce_scatter),
    ("square_sum", _one_number),
    ("largest", _one_number),
    ("attention", _attention),
    ("attention_backward", _attention_backward),
    ("launch_square_sum", _one_number),
):
    _library.impl(_name, _fake, "Meta")

all_gather = torch.ops.zerofx.all_gather.default
all_gather_into = torch.ops.zerofx.all_gather_into.default
reduce_scatter = torch.ops.zerofx.reduce_scatter.default
reduce_scatter_into = torch.ops.zerofx.reduce_scatter_into.default
wait = torch.ops.zerofx.wait.default
release = torch.ops.zerofx.release.default
empty_gradients = torch.ops.zerofx.empty_gradients.default
broadcast = torch.ops.zerofx.broadcast.default
offload = torch.ops.zerofx.offload.default
reload = torch.ops.zerofx.reload.default
copy_into = torch.ops.zerofx.copy_into.default
empty_stored = torch.ops.zerofx.empty_stored.default
settle = torch.ops.zerofx.settle.default
check_finite = torch.ops.zerofx.check_finite.default
next_micro_batch = torch.ops.zerofx.next_micro_batch.default
check_gradients = torch.ops.zerofx.check_gradients.default
part = torch.ops.zerofx.part.default
checked = torch.ops.zerofx.checked.default
asserted = torch.ops.zerofx.asserted.default
masked_sum = torch.ops.zerofx.masked_sum.default
prod_gradient = torch.ops.zerofx.prod_gradient.default
mm_into = torch.ops.zerofx.mm_into.default
product = torch.ops.zerofx.product.default
product_into = torch.ops.zerofx.product_into.default
quantise = torch.ops.zerofx.quantise.default
dequantise = torch.ops.zerofx.dequantise.default
dequantise_sum = torch.ops.zerofx.dequantise_sum.default
softmax_chunk = torch.ops.zerofx.softmax_chunk.default
softmax_gradient = torch.ops.zerofx.softmax_gradient.default
gather_on_node = torch.ops.zerofx.gather_on_node.default
exchange = torch.ops.zerofx.exchange.default
second_shard = torch.ops.zerofx.second_shard.default
square_sum = torch.ops.zerofx.square_sum.default
largest = torch.ops.zerofx.largest.default
attention = torch.ops.zerofx.attention.default
attention_backward = torch.ops.zerofx.attention_backward.default


def hyperparameters(bucket: int, num_scalars: int) -> tuple[float, ...]:
    """The scalars of bucket ``bucket``'s update; as a fake value, ``num_scalars`` zeros."""
    return (0.0,) * num_scalars


REDUCTIONS = frozenset({reduce_scatter, reduce_scatter_into})
OVER_AXES = frozenset({all_gather, all_gather_into, *REDUCTIONS})  # which say the axes of the mesh that they run over
COLLECTIVES = frozenset({*OVER_AXES, broadcast, gather_on_node, exchange})
TRANSFERS = frozenset({offload, reload, copy_into})
EVENTS = frozenset(
    {
        *COLLECTIVES,
        *TRANSFERS,
        wait,
        release,
        settle,
        check_finite,
        next_micro_batch,
        check_gradients,
        empty_gradients,
        empty_stored,
        part,
        second_shard,
        hyperparameters,
    }
)
QUANTISERS = frozenset({quantise, dequantise, dequantise_sum})
