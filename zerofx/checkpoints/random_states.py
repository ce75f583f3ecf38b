"""State of each rank's own: which saved rank it continues from, and the states of torch's random generators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from zerofx.disk.checkpoint.marker import RANDOM, STATE
from zerofx.disk.checkpoint.reader import CheckpointReader
from zerofx.errors import CheckpointError

CPU, CUDA = f"{RANDOM}cpu", f"{RANDOM}cuda"


def predecessor(rank: int, num_model: int, saved_ranks: int, saved_model: int) -> int | None:
    """The saved rank whose generators, buffers and ``state=`` ``rank`` continues from; None if there was no such rank.

    ``num_model`` consecutive ranks share one computation, and did ``saved_model`` of ``saved_ranks``. If these are
    equal, each rank continues from its own state. Otherwise all ranks of the n-th group continue from the first rank of
    the n-th saved group.
    """
    before = rank if num_model == saved_model else rank // num_model * saved_model
    return before if before < saved_ranks else None


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of the CPU's generator and of ``device``'s, as bytes, by name."""
    states = {CPU: torch.get_rng_state()}
    return states | ({CUDA: torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def read_random_states(reader: CheckpointReader, before: int | None, group: int) -> dict[str, torch.Tensor]:
    """The saved generator states that a rank of ``group`` continues from, by name; ``before``: its predecessor.

    Raises:
        CheckpointError: a state is not one of a generator.
    """
    shard = reader.shard(STATE, before or 0)
    states = {name: reader.read_entry(shard, shard.placed[name][0]) for name in (CPU, CUDA) if name in shard.placed}
    try:
        for name, state in states.items():
            if name == CPU or torch.cuda.is_available():
                torch.Generator(name.removeprefix(RANDOM)).set_state(state)
        if CPU not in states:
            raise RuntimeError("it is not there")
    except RuntimeError as error:
        raise CheckpointError(
            f"expected the states of torch's random generators in {shard.path}, found that they cannot be set "
            f"({error}): load another checkpoint. Nothing has been loaded"
        ) from error
    return states if before is not None else _others(states, group)


def states_for(before: int | None, group: int, saved: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The states of all ranks that a rank continues from, by name; ``before`` and ``group`` as above."""
    return saved[before] if before is not None else _others(saved[0], group)


def _others(states: dict[str, torch.Tensor], group: int) -> dict[str, torch.Tensor]:
    """Generator states for the ranks of a group that did not exist, from those of rank 0.

    They are seeded from its state and the group's number: their draws differ from all other groups', and are the same
    on all ranks of the group, whenever this is loaded.
    """
    seed = xxhash.xxh3_64_intdigest(states[CPU].numpy().tobytes() + group.to_bytes(8, "little"))
    seeded = {CPU: torch.Generator().manual_seed(seed).get_state()}
    if CUDA in states and torch.cuda.is_available():
        seeded[CUDA] = torch.Generator("cuda").manual_seed(seed).get_state()
    return seeded


def set_random_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Set the generators to ``states``; states of absent devices are ignored."""
    if CPU in states:
        torch.set_rng_state(states[CPU])
    if CUDA in states and device.type == "cuda":
        torch.cuda.set_rng_state(states[CUDA], device)
