"""The typed facts about the nodes of a step graph.

What zerofx adds to ``node.meta`` is read and written here, and nowhere else by key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import torch
from torch import fx

from zerofx.scheduler.plan.facts import Tier
from zerofx.torch_private.operators import OpOverload, schema_of

T = TypeVar("T")

DEVICE: Tier = "device"


class Phase(StrEnum):
    """The part of the training step that a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Role(StrEnum):
    """Roles of the step graph's placeholders."""

    PARAMETER = "parameter"  # one tensor of the model; gone after the shard pass
    FULL = "full"  # a whole flat bucket that stays on the device
    SHARD = "shard"  # this rank's slice of a flat bucket, in the compute dtype
    PART = "part"  # what this rank updates of a slice whose other parts other ranks update
    MASTER = "master"  # this rank's fp32 slice, where the compute dtype is lower
    STATE = "state"  # one flat optimizer state of a bucket
    DELAYED = "delayed"  # what a delayed update hands over: "grad", the gradient, and "low", the parameters' new values
    SCALAR_STATE = "scalar_state"  # a 0-dim optimizer state, such as Adam's step count
    BUFFER = "buffer"  # a buffer of the model
    INPUT = "input"  # a tensor of the batch
    LOSS_SCALE = "loss_scale"  # what the loss is multiplied by before backward, shape []; named for its dtype
    RANK = "rank"  # this rank's number on an axis of the mesh: int64, shape [1]; named for the axis
    HOST_RANK = "host_rank"  # the same on the host, shape []; of steps that draw random numbers
    OUTSIDE = "outside"  # a tensor that forward or loss_fn reaches outside of the model: a teacher's, say
    CONSTANT = "constant"  # a tensor that the model made or held outside its parameters and buffers


@dataclass(frozen=True)
class Origin:
    """A node's origin: the dotted path of its module (``""`` is the model itself) and its phase."""

    layer: str
    phase: Phase


@dataclass(frozen=True)
class Placeholder:
    """The value that the runtime passes for a placeholder: its role, the name there, and its bucket, if any.

    ``alias_of`` names the placeholder whose storage this one is a slice of; it then takes no memory of its own.
    ``part`` is the micro-batch that a placeholder of a divided batch tensor stands for; None for the whole tensor.
    ``is_lent``: another step has it, and counts it where it is in a slower tier.
    """

    role: Role
    name: str
    bucket: int | None = None
    alias_of: str | None = None
    part: int | None = None
    is_lent: bool = False


class Job(StrEnum):
    """The job of a node that a pass has inserted, by which others find it."""

    DRAW = "draw"  # draws for the generators to go on, and for nothing else; of a number of its own
    READ = "read"  # starts the read of a slice from nvme into the host's memory; of a decision about a gather
    RELOAD = "reload"  # starts the copy of a slice to the device; of a decision about a gather
    GATHER = "gather"  # starts a gather; of a decision about a gather
    REDUCTION = "reduction"  # starts the reduction of a bucket's gradients; of a bucket
    CROSSING = "crossing"  # starts the reduction of what that gives across replicas; of a bucket
    GRADIENT = "gradient"  # awaits that reduction; of a bucket


@dataclass(frozen=True)
class Task:
    """A job for one of the plan's decisions about gathers, for a bucket, or for a number of its own, by its index.

    This is how a node that a pass has put in is found again: an operator or a tensor of the model may have any name.
    """

    job: Job
    index: int


def _fact(name: str, kind: type[T]) -> tuple[Callable[[fx.Node], T | None], Callable[[fx.Node, T | None], fx.Node]]:
    """The reader of a fact about a node, None for nodes without it, and its recorder, which returns the node."""
    key = f"zerofx_{name}"

    def read(node: fx.Node) -> T | None:
        known = node.meta.get(key)
        return known if isinstance(known, kind) else None

    def record(node: fx.Node, fact: T | None) -> fx.Node:
        node.meta[key] = fact
        return node

    return read, record


known_origin, set_origin = _fact("origin", Origin)
"""Where a node comes from."""

delayed_bucket, set_delayed = _fact("delayed", int)
"""The bucket whose delayed update a node on the host is of; None for one whose result this step waits for."""

host_bucket, set_host_bucket = _fact("host_bucket", int)
"""The bucket whose update a node on the host is of."""

tile_of, set_tile = _fact("tile", str)
"""The tile that a node is of; tiles of one chain have names of their own."""

slice_of, set_slice = _fact("slice", str)
"""The slice of a parameter that a node works on, by the slice's name."""

piece_of, set_piece = _fact("piece", str)
"""The piece of what is outside repeated layers that a node of the captured graph is of."""

task_of, set_task = _fact("task", Task)
"""The task of a node that a pass has put in."""

begun_stretch, set_begun_stretch = _fact("stretch", int)
"""Where one of a stage's runs of nodes begins, its stretches, the lag of that (``zerofx/ir/micro_batches.py``)."""

chunk_of, set_chunk = _fact("chunk", int)
"""The part of the model between two cuts that a node of a step in stages is of, by its number."""

message_number, set_message_number = _fact("message", int)
"""The number of a message among all those of a step in stages, at its sender and at its receiver."""

twin_of, set_twin = _fact("twin", tuple)
"""Where a stage takes turns: the name that a node has in the first micro-batch, and the number of its own body."""

copied_from, set_copied_from = _fact("copy_of", str)
"""The name of the node that a copy runs again."""

is_alike, set_alike = _fact("alike", int)
"""1 where all ranks of the model axis have what a node gives."""

known_placeholder, set_placeholder = _fact("placeholder", Placeholder)
"""What a placeholder stands for: in a step's graph that is known, in what is being traced not yet."""


def origin(node: fx.Node) -> Origin:
    """The origin of a node; a node without one (a placeholder) belongs to the model's forward."""
    return known_origin(node) or Origin("", Phase.FORWARD)


def source_line(node: fx.Node) -> str:
    """The user's line that a captured node comes from, with its file and function; ``""`` where it is not known."""
    line = node.meta.get("zerofx_line", "")
    assert isinstance(line, str)
    return line


def set_source_line(node: fx.Node, line: str) -> fx.Node:
    """Record the user's line that ``node`` comes from; returns it."""
    if line:
        node.meta["zerofx_line"] = line
    return node


def placeholder(node: fx.Node) -> Placeholder:
    """The role and source of a placeholder."""
    entry = node.meta["zerofx_placeholder"]
    assert isinstance(entry, Placeholder)
    return entry


def value(node: fx.Node) -> Any:
    """The fake tensor (or tuple of them) that stands for the node's result."""
    return node.meta["val"]


def set_value(node: fx.Node, fake: Any) -> fx.Node:
    """Record the fake value of ``node``; returns it."""
    node.meta["val"] = fake
    return node


def tier_of(node: fx.Node) -> Tier:
    """The tier of the storage that ``node`` owns: ``"device"``, ``"host"`` or ``"nvme"``."""
    tier: Tier = node.meta.get("zerofx_tier", DEVICE)
    return tier


def set_tier(node: fx.Node, tier: str) -> fx.Node:
    """Record the tier of the storage of ``node``; returns it."""
    node.meta["zerofx_tier"] = tier
    return node


# Facts that are words and numbers, which files have as they are.
_PLAIN = (
    "zerofx_tier", "zerofx_delayed", "zerofx_host_bucket", "zerofx_tile", "zerofx_slice", "zerofx_piece",
    "zerofx_copy_of", "zerofx_alike",
)  # fmt: skip


def plain_facts(node: fx.Node) -> dict[str, str | int]:
    """Facts about a node that are words and numbers, for a file."""
    return {name: node.meta[name] for name in _PLAIN if node.meta.get(name) is not None}


def set_plain_facts(node: fx.Node, facts: Mapping[str, str | int]) -> fx.Node:
    """Record what ``plain_facts`` gave; returns the node.

    Raises:
        ValueError: there is another fact.
    """
    if not facts.keys() <= set(_PLAIN):
        raise ValueError(f"expected facts among {', '.join(_PLAIN)}, found {', '.join(facts)}")
    node.meta.update(facts)
    return node


def tensor(node: fx.Node) -> torch.Tensor:
    """The fake value of a node that gives a single tensor."""
    result = value(node)
    assert isinstance(result, torch.Tensor), f"{node.name} is no single tensor"
    return result


def argument_value(node: fx.Node, index: int) -> torch.Tensor:
    """The fake tensor that is argument ``index`` of a call."""
    source = node.args[index]
    assert isinstance(source, fx.Node)
    return tensor(source)


def ints(argument: object) -> tuple[int, ...]:
    """The whole numbers that an argument lists."""
    assert isinstance(argument, list | tuple)
    return tuple(int(number) for number in argument)


def draws_for_nothing(node: fx.Node) -> bool:
    """True for what draws for the generators to go on alone, and what that reads."""
    task = task_of(node)
    return task is not None and task.job is Job.DRAW


def is_random(node: fx.Node) -> bool:
    """True if the operator draws from a random generator. Attention without dropout does not, though it could."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(schema_of(target).arguments):
        if argument.name == "dropout_p":
            dropout = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return bool(dropout != 0.0)
    return True
