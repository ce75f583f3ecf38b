"""What is compared with what: contenders, in groups."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Contender:
    """``request`` is what its workers are told. The least peak of those that ``budget_of`` names, times
    ``budget_share``, is its memory budget."""

    name: str
    request: dict[str, Any]
    budget_of: tuple[str, ...] = ()
    budget_share: float = 1.0


@dataclass(frozen=True)
class Group:
    """Contenders that are compared with each other; the first is the baseline. ``alone``: one process, not many.

    ``least_ranks``: with how many it says something.
    """

    name: str
    contenders: tuple[Contender, ...]
    alone: bool = False
    least_ranks: int = 2


_CHECKPOINTED = ("FSDP2 + checkpoint", "FSDP2 + checkpoint + compile")


GROUPS = (
    Group(
        "sharded",
        (
            Contender("FSDP2 + compile", {"family": "fsdp2", "compile": True}),
            Contender("zerofx stage 3", {"family": "zerofx", "stage": 3}),
            Contender("zerofx stage 3, 70 %", {"family": "zerofx", "stage": 3}, ("FSDP2 + compile",), 0.70),
            Contender("FSDP2 + compile, memory kept", {"family": "fsdp2", "compile": True, "keep_freed": True}),
            Contender("zerofx stage 3, memory kept", {"family": "zerofx", "stage": 3, "keep_freed": True}),
            Contender("FSDP2", {"family": "fsdp2"}),
            Contender("DeepSpeed ZeRO-3", {"family": "deepspeed", "stage": 3}),
            Contender(_CHECKPOINTED[0], {"family": "fsdp2", "checkpoint": True}),
            Contender(_CHECKPOINTED[1], {"family": "fsdp2", "checkpoint": True, "compile": True}),
            Contender("zerofx stage 3, budget", {"family": "zerofx", "stage": 3}, _CHECKPOINTED),
        ),
    ),
    Group(
        "accumulated",
        (
            Contender("FSDP2 + compile, 4 micro-batches", {"family": "fsdp2", "compile": True, "accumulate": 4}),
            *(
                Contender(
                    f"zerofx stage 3, 4 micro-batches, reduced {reduce}",
                    {"family": "zerofx", "stage": 3, "accumulate": 4, "reduce": reduce},
                )
                for reduce in ("each", "once")
            ),
        ),
    ),
    Group(
        "evaluated",  # a forward in evaluation mode, of parameters as training has them
        (
            Contender("FSDP2 + compile, evaluation", {"family": "fsdp2", "compile": True, "evaluate": True}),
            Contender("zerofx stage 3, evaluation", {"family": "zerofx", "stage": 3, "evaluate": True}),
            Contender("FSDP2, evaluation", {"family": "fsdp2", "evaluate": True}),
        ),
    ),
    Group(
        "replicated",
        (
            Contender("DDP + compile", {"family": "ddp", "compile": True}),
            *(Contender(f"zerofx stage {stage}", {"family": "zerofx", "stage": stage}) for stage in (0, 1, 2)),
            Contender("DDP + compile, memory kept", {"family": "ddp", "compile": True, "keep_freed": True}),
            Contender("DDP", {"family": "ddp"}),
            *(Contender(f"DeepSpeed ZeRO-{stage}", {"family": "deepspeed", "stage": stage}) for stage in (1, 2)),
        ),
    ),
    Group(
        "shared",  # ranks compute one batch together
        (
            Contender("DTensor + compile", {"family": "dtensor", "shared": True, "compile": True}),
            Contender("zerofx, shared", {"family": "zerofx", "shared": True}),
            Contender("zerofx, shared, 80 %", {"family": "zerofx", "shared": True}, ("DTensor + compile",), 0.80),
            Contender("DTensor", {"family": "dtensor", "shared": True}),
        ),
    ),
    Group(
        "two axes",  # two ranks compute one batch together, and parameters are sharded over all
        (
            Contender("FSDP2 + DTensor + compile", {"family": "dtensor", "shared": 2, "compile": True}),
            Contender("zerofx, two axes", {"family": "zerofx", "shared": 2}),
            Contender(
                "zerofx, two axes, 80 %", {"family": "zerofx", "shared": 2}, ("FSDP2 + DTensor + compile",), 0.80
            ),
        ),
        least_ranks=4,
    ),
    Group(
        "single",
        (
            Contender("torch.compile", {"family": "torch", "compile": True}),
            Contender("zerofx", {"family": "zerofx", "stage": 0}),
            Contender("zerofx, 95 %", {"family": "zerofx", "stage": 0}, ("torch.compile",), 0.95),
            Contender("torch.compile, memory kept", {"family": "torch", "compile": True, "keep_freed": True}),
            Contender("eager", {"family": "torch"}),
        ),
        alone=True,
    ),
)


def selected(options: argparse.Namespace) -> Iterator[tuple[Group, list[Contender]]]:
    """The groups that were asked for, with those of their contenders that can be run; the baseline always."""
    for group in GROUPS:
        if group.name not in options.groups or (options.ranks < group.least_ranks and not group.alone):
            continue
        yield group, wanted(group, options.only)


def wanted(group: Group, only: Sequence[str]) -> list[Contender]:
    """The contenders whose name has one of these words, all if there are none, without DeepSpeed's where it is not
    installed; the baseline always."""
    missing = [row["name"] for row in absent(group)]
    baseline, *others = (contender for contender in group.contenders if contender.name not in missing)
    return [baseline, *(contender for contender in others if not only or any(word in contender.name for word in only))]


def absent(group: Group) -> list[dict[str, Any]]:
    """Rows of the contenders whose library is not installed, which say so."""
    if importlib.util.find_spec("deepspeed") is not None:
        return []
    facts = {"refused": "needs deepspeed, which is not installed"}
    return [
        {"name": contender.name, "chunk": 0, "rounds": [], "request": contender.request, "facts": facts}
        for contender in group.contenders
        if contender.request["family"] == "deepspeed"
    ]
