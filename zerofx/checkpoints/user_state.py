"""State that a user saves next to model and optimizer: schedulers, positions in data, counters."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from zerofx.disk.checkpoint.marker import STATE, USER
from zerofx.disk.checkpoint.plain import from_plain, is_plain, to_plain
from zerofx.disk.checkpoint.reader import CheckpointReader
from zerofx.errors import CheckpointError, UsageError, warn
from zerofx.units import first_few

WORD = "state"


def check_state(state: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Check ``state`` and return it; an empty one for None.

    Raises:
        UsageError: an entry is neither a plain value nor has ``state_dict`` and ``load_state_dict``.
    """
    if not isinstance(state, Mapping | None):
        raise UsageError(f"expected state to be a dictionary of what is saved, by name, found {type(state).__name__}")
    for name, held in (state or {}).items():
        if not isinstance(name, str) or not (_is_stateful(held) or is_plain(held)):
            raise UsageError(
                f"expected state={{...}} to have words for names and to hold what has state_dict() and "
                f"load_state_dict(), or numbers, words, tensors, lists and dictionaries, found {name!r}: "
                f"{type(held).__name__}"
            )
        if not isinstance(state, MutableMapping) and not (_is_stateful(held) or isinstance(held, dict)):
            raise UsageError(
                f"expected a dictionary as state=, in which load_checkpoint puts {name!r}, found "
                f"{type(state).__name__}, which cannot be changed: give a dict"
            )
    return {} if state is None else state


def _is_stateful(held: object) -> bool:
    return all(callable(getattr(held, method, None)) for method in ("state_dict", "load_state_dict"))


def describe_state(state: Mapping[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    """The values in ``state``, as JSON, and its tensors by name.

    Raises:
        CheckpointError: something in it is neither JSON nor a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        plain = {
            name: to_plain(held.state_dict() if _is_stateful(held) else held, f"{USER}{name}", tensors)
            for name, held in state.items()
        }
        return json.dumps(plain), tensors
    except RecursionError as error:
        raise CheckpointError(
            "expected a state that does not hold itself, found one that is nested without end, or too deeply: save "
            "what it is made of"
        ) from error


def read_state(reader: CheckpointReader, state: Mapping[str, Any], before: int | None) -> dict[str, Any]:
    """The saved values of ``state`` on this rank's predecessor, or on rank 0 if there was none.

    Raises:
        CheckpointError: an entry of ``state`` has not been saved.
    """
    shard = reader.shard(STATE, before or 0)
    try:
        saved = json.loads(shard.words.get(WORD, "{}"))
    except (RecursionError, ValueError) as error:
        raise CheckpointError(f"expected the state that was saved in {shard.path}, found no JSON: {error}") from error
    if not isinstance(saved, dict):
        raise CheckpointError(f"expected the state that was saved in {shard.path} by name, found {saved!r:.80}")
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

    given = {name: from_plain(saved[name], tensor_of) for name in state}
    for name, held in state.items():
        if isinstance(held, dict) and not isinstance(given[name], dict):
            raise CheckpointError(
                f"expected a dictionary that was saved as {name!r} at {reader.place}, found "
                f"{type(given[name]).__name__}: ask for it with the value that it has by default, such as 0"
            )
    return given


def take_over(state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Load the saved value into each entry of ``state``: by its ``load_state_dict``, a dictionary by filling it, and a
    plain value in ``state`` itself."""
    for name, held in list(state.items()):
        if _is_stateful(held):
            held.load_state_dict(saved[name])
        elif isinstance(held, dict):
            held.clear()
            held.update(saved[name])
        else:
            assert isinstance(state, MutableMapping), "it has been checked"
            state[name] = saved[name]
