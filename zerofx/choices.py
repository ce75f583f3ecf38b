"""The words that options take, as types that the command line can read without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Backend = Literal["inductor", "eager"]
Precision = Literal["bf16", "fp16"]
ReduceDtype = Literal["fp32", "bf16"]
StateDtype = Literal["bf16"]
Recompute = Literal["auto", "none", "full"]
OffloadWord = Literal["auto", "none", "host", "nvme"]
Offload = OffloadWord | Mapping[str, str]
Accumulate = int | Literal["auto"]
Reduce = Literal["auto", "each", "once"]
StatesOver = Literal["auto", "shard", "mesh"]
Wire = Literal["exact", "int8", "int4", "fp8"]
CudaGraphs = bool | Literal["auto"]
OnNonfinite = Literal["warn", "skip", "raise"]
Tiling = Literal["auto", "none"] | Mapping[str, int]
