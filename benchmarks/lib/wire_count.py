"""Count the bytes that a rank sends in torch.distributed's collectives by their operators: NCCL bypasses the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from zerofx.ir.aliasing import tensors_in


class WireCount(TorchDispatchMode):
    """``num_bytes``: what this rank has sent in collectives over all of ``num_ranks``, as rings send it (the links of a
    group of NCCL's), since the block began. Point-to-point messages are not counted."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self.num_bytes = 0
        self._others = num_ranks - 1
        self._num_ranks = num_ranks

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d" or namespace == "_c10d_functional":
            rule = _RULES.get(name)
            if rule is not None:
                self.num_bytes += rule(args, self._others, self._num_ranks)
        return func(*args, **(kwargs or {}))


def _size(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))


# Of each operator's arguments, the bytes that pass on to the next rank of a ring.
_Rule = Callable[[tuple[Any, ...], int, int], int]
_RULES: dict[str, _Rule] = {
    # (output, input): each rank's slice goes around.
    "_allgather_base_": lambda args, others, _: _size(args[1]) * others,
    "allgather_": lambda args, others, _: _size(args[1]) * others,
    "allgather_into_tensor_coalesced_": lambda args, others, _: _size(args[1]) * others,
    "all_gather_into_tensor": lambda args, others, _: _size(args[0]) * others,
    "all_gather_into_tensor_coalesced": lambda args, others, _: _size(args[0]) * others,
    # (output, input): partial sums of a slice of the input go around.
    "_reduce_scatter_base_": lambda args, others, _: _size(args[0]) * others,
    "reduce_scatter_": lambda args, others, _: _size(args[0]) * others,
    "reduce_scatter_tensor_coalesced_": lambda args, others, _: _size(args[0]) * others,
    "reduce_scatter_tensor": lambda args, others, num_ranks: _size(args[0]) * others // num_ranks,
    "reduce_scatter_tensor_coalesced": lambda args, others, num_ranks: _size(args[0]) * others // num_ranks,
    # Both, one after the other.
    "allreduce_": lambda args, others, num_ranks: 2 * _size(args[0]) * others // num_ranks,
    "allreduce_coalesced_": lambda args, others, num_ranks: 2 * _size(args[0]) * others // num_ranks,
    "all_reduce": lambda args, others, num_ranks: 2 * _size(args[0]) * others // num_ranks,
    "all_reduce_": lambda args, others, num_ranks: 2 * _size(args[0]) * others // num_ranks,
    # On average over the ranks: the last of the ring sends nothing.
    "broadcast_": lambda args, others, num_ranks: _size(args[0]) * others // num_ranks,
    "broadcast": lambda args, others, num_ranks: _size(args[0]) * others // num_ranks,
    "reduce_": lambda args, others, num_ranks: _size(args[0]) * others // num_ranks,
    # All but a rank's own part.
    "alltoall_base_": lambda args, others, num_ranks: _size(args[1]) * others // num_ranks,
    "all_to_all_single": lambda args, others, num_ranks: _size(args[0]) * others // num_ranks,
}
