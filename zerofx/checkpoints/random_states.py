"""The states of torch's random generators on each rank."""

from __future__ import annotations

import torch
import xxhash

from zerofx.disk.checkpoint.reader import STATE, CheckpointReader

CPU, CUDA = "random.cpu", "random.cuda"


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of the CPU's generator and of ``device``'s, as bytes, by name."""
    states = {CPU: torch.get_rng_state()}
    return states | ({CUDA: torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def saved_random_states(reader: CheckpointReader, rank: int) -> dict[str, torch.Tensor]:
    """What ``rank`` goes on with, by name.

    A rank that there was goes on with its own state. One that is more than there were is seeded from rank 0's state and
    its own number: what it draws differs from all others, and is the same whenever this checkpoint is loaded.
    """
    source = rank if rank < reader.marker.num_ranks else 0
    shard = reader.shard(STATE, source)
    states: dict[str, torch.Tensor] = {}
    for name in (CPU, CUDA):
        for placed in shard.placed.get(name, []):
            states[name] = reader.read_entry(shard, placed)
    if source != rank:
        seed = xxhash.xxh3_64_intdigest(states[CPU].numpy().tobytes() + rank.to_bytes(8, "little"))
        states[CPU] = torch.Generator().manual_seed(seed).get_state()
        if CUDA in states:
            states[CUDA] = torch.Generator("cuda").manual_seed(seed).get_state()
    return states


def set_random_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Have the generators go on from ``states``; those of a device that there is not are left out."""
    if CPU in states:
        torch.set_rng_state(states[CPU])
    if CUDA in states and device.type == "cuda":
        torch.cuda.set_rng_state(states[CUDA], device)
