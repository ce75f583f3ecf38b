"""Checks of options that need more than their kind, and of arguments of other functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, get_args

from zerofx.budgets import GRADIENTS
from zerofx.choices import TP_STYLES, ShardingWord
from zerofx.errors import UsageError, notify
from zerofx.ladder import check_lengths
from zerofx.mesh_option import AUTO, mesh_of
from zerofx.option_table import Exclusion, Kind, instances, is_count, is_names, one_of
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.units import first_few


def check_count(name: str, asked: object, least: int, what: str) -> None:
    """Check an argument that is a whole number, at least ``least``; ``what`` says so."""
    if not is_count(asked, least):
        raise UsageError(f"expected {name} {what}, found {asked!r}")


def check_batch_form(batch: object) -> None:
    """Check what is to be the arguments of a call, or its keywords.

    Raises:
        UsageError: it is neither.
    """
    if not isinstance(batch, tuple | list | Mapping):
        raise UsageError(f"expected batch to be a tuple or a dict of keywords, found {type(batch).__name__}")


def check_bucket_names(asked: Collection[str] | str, buckets: Collection[str]) -> None:
    """Check the names in ``keep_gathered`` against the buckets that there are.

    Raises:
        UsageError: lists both.
    """
    unknown = [] if isinstance(asked, str) else sorted(set(asked) - set(buckets))
    if unknown:
        raise UsageError(
            f"expected keep_gathered to name buckets, found {first_few(unknown)}: the buckets are {first_few(buckets)}"
        )


def _words_by_name(asked: Mapping[str, str] | None) -> dict[str, str]:
    """The words for placing modules and parameters on the axis ``model``, by names or patterns."""
    words = get_args(ShardingWord)
    unknown = {word: name for name, word in (asked or {}).items() if word not in words and word not in TP_STYLES}
    if unknown:
        word, pattern = next(iter(unknown.items()))
        raise UsageError(
            f"expected shardings to say {', '.join(map(repr, words))}, or a style of transformers' "
            f"({', '.join(TP_STYLES)}), found {word!r} of {pattern!r}"
        )
    return dict(asked or {})


def warn_of_ignored_shardings(mesh: Mesh | None) -> None:
    """Warn that ``shardings=`` is given for a mesh on which all ranks compute with whole parameters."""
    if mesh is None or mesh.model == 1:
        notify("shardings is ignored where the mesh has no axis 'model': every rank computes with whole parameters")


def has_stages(mesh: object) -> bool:
    """True for a mesh with several ranks on the axis ``pipe``."""
    return isinstance(mesh, Mesh) and mesh.pipe > 1


def has_no_stages(mesh: object) -> bool:
    """True for a mesh, given or to be chosen, without the axis ``pipe``."""
    return not has_stages(mesh)


# What a step whose mesh has an axis pipe does not do.
NOT_IN_STAGES: Final = tuple(
    Exclusion(other, why, has_stages, theirs)
    for other, why, theirs in (
        ("cuda_graphs", "messages between stages are awaited by the host", one_of(True, "auto")),
        ("saved", "stages hand activations on from micro-batch to micro-batch as they are", one_of("int8", "fp8")),
    )
)


def options_against_stages(options: object) -> str:
    """The options whose values a step in stages does not serve, and why; empty where there are none."""
    given = {each: getattr(options, each.other) for each in NOT_IN_STAGES}
    return ", ".join(
        f"{each.other}={value!r}: {each.why}" for each, value in given.items() if each.theirs and each.theirs(value)
    )


GRADIENTS_ALONE: Final = Kind(
    f"{{{GRADIENTS!r}: 'host'}} or {{{GRADIENTS!r}: 'nvme'}}",
    lambda given: given in ({GRADIENTS: "host"}, {GRADIENTS: "nvme"}),
    dict,
)
TILES: Final = Kind(
    "numbers of tiles, as in {'head': 4}",
    lambda given: (
        isinstance(given, Mapping) and is_names(given) and all(is_count(number, 2) for number in given.values())
    ),
    dict,
)
SHARDINGS: Final = Kind(
    "words by names or patterns of modules and parameters",
    lambda given: isinstance(given, Mapping) and all(isinstance(text, str) for item in given.items() for text in item),
    _words_by_name,
)
MACHINE: Final = Kind(
    "a Machine or the name of one",
    instances(Machine, str),
    lambda given: Machine.named(given) if isinstance(given, str) else given,
)
# What these two cannot be, their own errors say.
MESH: Final = Kind("a mesh", lambda _: True, lambda given: AUTO if given == AUTO else mesh_of(given))
LENGTHS: Final = Kind("numbers of tokens", lambda _: True, check_lengths)
