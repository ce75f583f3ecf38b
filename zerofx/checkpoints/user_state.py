"""What a user has saved next to model and optimizer: schedulers, positions in data, counters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from zerofx.disk.checkpoint.plain import from_plain, to_plain
from zerofx.disk.checkpoint.reader import STATE, CheckpointReader
from zerofx.errors import CheckpointError, UsageError, warn
from zerofx.units import first_few

WORD = "state"


def check_state(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """``state`` as a dictionary, checked.

    Raises:
        UsageError: an entry is neither a dictionary nor has ``state_dict`` and ``load_state_dict``.
    """
    if not isinstance(state, Mapping | None):
        raise UsageError(f"expected state to be a dictionary of what has a state_dict(), found {type(state).__name__}")
    for name, held in (state or {}).items():
        has_both = all(callable(getattr(held, method, None)) for method in ("state_dict", "load_state_dict"))
        if not isinstance(name, str) or not (isinstance(held, dict) or has_both):
            raise UsageError(
                f"expected state={{...}} to have words for names and to hold what has state_dict() and "
                f"load_state_dict(), or dictionaries, found {name!r}: {type(held).__name__}"
            )
    return dict(state or {})


def described(state: Mapping[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    """What is in ``state`` now, as JSON, and its tensors by name.

    Raises:
        CheckpointError: something in it is neither JSON nor a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain = {
        name: to_plain(held if isinstance(held, dict) else held.state_dict(), f"state.{name}", tensors)
        for name, held in state.items()
    }
    return json.dumps(plain), tensors


def saved_state(reader: CheckpointReader, state: Mapping[str, Any], before: int | None) -> dict[str, Any]:
    """What was saved of ``state`` on this rank's predecessor, or on rank 0 where there was none.

    Raises:
        CheckpointError: something that is asked for has not been saved.
    """
    shard = reader.shard(STATE, before or 0)
    saved = json.loads(shard.words.get(WORD, "{}"))
    missing = [name for name in state if name not in saved]
    if missing:
        raise CheckpointError(
            f"expected {', '.join(map(repr, state))} in the state that was saved at {reader.place}, found no "
            f"{', '.join(map(repr, missing))} (there is: {', '.join(map(repr, saved)) or 'nothing'}): ask for what was "
            f"saved, under its name"
        )
    if unasked := [name for name in saved if name not in state]:
        warn(
            f"state at {reader.place} that load_checkpoint is not given anything for stays there: {first_few(unasked)}"
        )

    def tensor_of(name: str) -> torch.Tensor:
        (placed,) = shard.placed[name]
        return reader.read_entry(shard, placed)

    return {name: from_plain(saved[name], tensor_of) for name in state}


def take_over(state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Give each of ``state`` what was saved of it."""
    for name, held in state.items():
        if isinstance(held, dict):
            held.clear()
            held.update(saved[name])
        else:
            held.load_state_dict(saved[name])
