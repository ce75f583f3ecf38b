"""Names of a checkpoint's files, and of the tensors in them."""

from __future__ import annotations

MARKER = "checkpoint.json"
MODEL, STATE = "model", "state"
RANDOM, BUFFER, USER = "random.", "buffer.", "state."
"""How names begin of what each rank has of its own: generators, buffers that differ, and tensors of ``state=``."""


def file_name(kind: str, rank: int, num_ranks: int) -> str:
    """The name of a rank's file: ``kind`` is ``"model"`` for the model's tensors, ``"state"`` for everything else."""
    return f"{kind}-{rank:05}-of-{num_ranks:05}.safetensors"


def state_name(parameter: str, state: str) -> str:
    """The name in a file of an optimizer's state of a parameter, as in ``torch.distributed.checkpoint``."""
    return f"optimizer.state.{parameter}.{state}"
