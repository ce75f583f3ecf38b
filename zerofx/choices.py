"""The words that options take, as types that the command line can read without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import nn

Backend = Literal["inductor", "eager"]
PrecisionWord = Literal["bf16", "fp16"]
PrecisionOption = PrecisionWord | Literal["fp8"]
Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
ReduceDtype = Literal["fp32", "bf16"]
StateDtype = Literal["bf16"]
RecomputeOption = Literal["auto", "none", "full"]
OffloadWord = Literal["auto", "none", "host", "nvme"]
SlowerTier = Literal["host", "nvme"]
OffloadOption = OffloadWord | Mapping[str, str]
AccumulateOption = int | Literal["auto"]
ReduceOption = Literal["auto", "each", "once"]
OrderOfStages = Literal["zero-bubble", "interleaved", "round-robin"]
OrderOption = Literal["auto", "micro-batch", OrderOfStages, "layer"]
StatesOver = Literal["auto", "shard", "mesh"]
WireOption = Literal["exact", "int8", "int4", "fp8"]
SavedOption = Literal["int8", "fp8"]
Fp32Module: TypeAlias = type["nn.Module"] | str  # modules of a type, or whose dotted name matches a pattern
CudaGraphs = bool | Literal["auto"]
OnNonfinite = Literal["warn", "skip", "raise"]
OutputsOption = Literal["numbers", "all", "none"]
Tiling = Literal["auto", "none"] | Mapping[str, int]
ShardingWord = Literal["column", "row", "sequence", "replicated", "exchange"]

# What the styles of a `tp_plan` of transformers say here: the dimension of the parameter that is in parts, one of our
# words, or, None, nothing. They tell how a module's forward is rewritten then, which is found from the graph instead.
TP_STYLES: Final[Mapping[str, int | ShardingWord | None]] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "local_colwise", "packed_colwise"), -2),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise", "packed_rowwise"), -1),
    "local_packed_rowwise": -1, "embedding_rowwise": 0, "embedding_colwise": 1, "grouped_gemm": 0,
    "sequence_parallel": "sequence",
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj"), "replicated"),
    **dict.fromkeys(("all_reduce", "moe_tp_experts", "moe_identity_expert", "ep_dispatch_experts", "ep_router"), None),
    **dict.fromkeys(("local_params", "local", "gather", "isolated"), None),
}  # fmt: skip
