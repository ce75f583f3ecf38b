"""Checks of single options of ``compile``, ``plan`` and ``tune``, and of those that do not go together.

Each raises a ``UsageError`` that says what the option can be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, get_args

from zerofx.budgets import GRADIENTS
from zerofx.choices import (
    TP_STYLES,
    AccumulateOption,
    OffloadOption,
    OffloadWord,
    OnNonfinite,
    OutputsOption,
    ReduceOption,
    ShardingWord,
    StatesOver,
    WireOption,
)
from zerofx.errors import UsageError, warn
from zerofx.mesh_option import AUTO, mesh_of
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.units import parse_bytes

STOPPING = ("skip", "raise")  # what is done about a loss that is not finite which ends a step before its updates


def checked_states(states_over: StatesOver) -> StatesOver:
    """What optimizer states are to be sliced over."""
    if states_over not in get_args(StatesOver):
        raise UsageError(
            f"expected states_over 'mesh' (optimizer states in parts of slices, one on each replica), 'shard' (in "
            f"slices, which every replica has) or 'auto' (as is faster), found {states_over!r}"
        )
    return states_over


def checked_mesh(given: object, wire: WireOption) -> Mesh | Literal["auto"] | None:
    """The mesh that is asked for, if there is one, with axes that a step can have."""
    mesh: Mesh | Literal["auto"] | None = AUTO if given == AUTO else mesh_of(given)
    if mesh == AUTO and wire != "exact":
        raise UsageError(
            f"expected wire='exact' with mesh='auto', which compares meshes as they send everything exactly, found "
            f"wire={wire!r}: give the mesh that zerofx.plan(..., mesh='auto') finds, or leave wire out"
        )
    return mesh


def checked_shardings(asked: object, mesh: Mesh | Literal["auto"] | None) -> dict[str, str]:
    """How modules and parameters are to lie on the axis ``model``: words by names or patterns."""
    if asked is None:
        return {}
    words = get_args(ShardingWord)
    if not isinstance(asked, Mapping) or not all(isinstance(text, str) for item in asked.items() for text in item):
        raise UsageError(
            f"expected shardings to map names or patterns of modules and parameters to {', '.join(map(repr, words))}, "
            f"or to styles of a tp_plan of transformers, found {asked!r}"
        )
    unknown = {word: pattern for pattern, word in asked.items() if word not in words and word not in TP_STYLES}
    if unknown:
        word, pattern = next(iter(unknown.items()))
        raise UsageError(
            f"expected shardings to say {', '.join(map(repr, words))}, or a style of transformers' "
            f"({', '.join(TP_STYLES)}), found {word!r} of {pattern!r}"
        )
    if asked and (mesh is None or (mesh != AUTO and mesh.model == 1)):
        warn("shardings is ignored where the mesh has no axis 'model': every rank computes with whole parameters")
    return dict(asked)


def check_offload(offload: object, accumulate: AccumulateOption, *, given: bool, budget: bool) -> None:
    """``given``: whether there is a plan, which says how many micro-batches there are; ``budget``: whether one asks."""
    if isinstance(offload, Mapping):
        if list(offload) == [GRADIENTS] and offload[GRADIENTS] in ("host", "nvme"):
            if not given and (accumulate == 1 or (accumulate == "auto" and not budget)):
                warn(
                    f"offload={dict(offload)!r} is ignored with accumulate={accumulate!r}, which is one micro-batch: "
                    f"its gradients wait for no other's"
                )
            return
    elif offload in get_args(OffloadWord):
        return
    raise UsageError(
        f"expected offload 'auto' (as the budget asks), 'none', 'host' or 'nvme', or {{'gradients': 'host'}} (or "
        f"'nvme') for gradients between micro-batches, found {offload!r}"
    )


def check_texts(option: str, asked: object, what: str) -> None:
    """Check what is to be names of ``what``.

    Raises:
        UsageError: it is one text, whose letters would be taken for names, or has something else than texts.
    """
    if isinstance(asked, str) or not isinstance(asked, Collection) or not all(isinstance(name, str) for name in asked):
        raise UsageError(f"expected {option} to be names of {what}, found {asked!r}: put one name in a tuple, too")


def check_outputs(outputs: OutputsOption, forward: object | None) -> None:
    """Check what is to be handed out besides the loss.

    Raises:
        UsageError: it is none of the words, or ``forward`` says it.
    """
    if outputs not in get_args(OutputsOption):
        raise UsageError(
            f"expected outputs 'numbers' (what a model returns besides its loss that is one number), 'all' or 'none', "
            f"found {outputs!r}"
        )
    if outputs != "numbers" and forward is not None:
        raise UsageError(
            f"expected no outputs with forward, found {outputs!r}: what forward returns after its loss is handed out, "
            f"and nothing else"
        )


def check_wire(wire: object, stage: int) -> None:
    """Check how many bits may be sent."""
    if wire not in get_args(WireOption):
        raise UsageError(
            f"expected wire 'exact', 'int8' (gathers and gradients in 8 bits where the step is faster for it), 'int4' "
            f"(gradients in 4) or 'fp8' (both in float8_e4m3fn), found {wire!r}"
        )
    if wire != "exact" and stage == 0:
        raise UsageError(
            f"expected stage 1, 2 or 3 with wire={wire!r}, found stage 0: whole gradients are reduced and gathered "
            f"there, which is done exactly; give wire='exact', or another stage"
        )


def check_on_nonfinite(on_nonfinite: object, delayed_update: int | None) -> None:
    """Check what a loss that is not finite does."""
    if on_nonfinite is not None and on_nonfinite not in get_args(OnNonfinite):
        raise UsageError(
            f"expected on_nonfinite None or 'warn' (update all the same), 'skip' (leave the update out) or 'raise', "
            f"found {on_nonfinite!r}"
        )
    if on_nonfinite in STOPPING and delayed_update is not None:
        raise UsageError(
            f"expected on_nonfinite=None with delayed_update, whose updates are under way when a loss is known, "
            f"found {on_nonfinite!r}: leave one of them out"
        )


def check_max_grad_norm(max_grad_norm: object, delayed_update: int | None) -> None:
    """Check what gradients are clipped to."""
    if max_grad_norm is None:
        return
    # A norm that is not a number is not above 0.
    if isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, int | float) or not max_grad_norm > 0:
        raise UsageError(
            f"expected max_grad_norm to be a number above 0 that the norm of all gradients is clipped to, or None for "
            f"gradients as they are, found {max_grad_norm!r}"
        )
    if delayed_update is not None:
        raise UsageError(
            f"expected max_grad_norm=None with delayed_update, whose updates are handed to the host before the norm "
            f"of all gradients is known, found max_grad_norm={max_grad_norm}: leave one of them out"
        )


def check_reduce(reduce: object, stage: int, offload: object) -> None:
    """Check how often gradients are reduced."""
    if reduce not in get_args(ReduceOption):
        raise UsageError(
            f"expected reduce 'auto', 'each' (gradients of each micro-batch, summed in slices) or 'once' (after the "
            f"last micro-batch), found {reduce!r}"
        )
    if reduce == "each" and stage == 0:
        raise UsageError(
            "expected stage 1, 2 or 3 with reduce='each', found stage 0: every rank has all gradients for its update "
            "there; give reduce='once', or another stage"
        )
    if reduce == "each" and isinstance(offload, Mapping):
        raise UsageError(
            f"expected reduce='once' or 'auto' with offload={dict(offload)!r}, found 'each', with which no whole "
            f"gradients wait for the next micro-batch: leave one of them out"
        )


def check_tile(tile: object) -> None:
    """Check what runs a few rows at a time."""
    if isinstance(tile, Mapping):
        if all(isinstance(name, str) and type(count) is int and count >= 2 for name, count in tile.items()):
            return
    elif tile in ("auto", "none"):
        return
    raise UsageError(
        f"expected tile 'auto' (where no other plan fits the budget), 'none', or numbers of tiles, 2 or more, by the "
        f"name of a module, or of slices by that of a parameter, found {tile!r}"
    )


def check_delayed(delayed_update: int | None, offload: OffloadOption) -> None:
    """Check how many steps come before delayed updates."""
    if delayed_update is None:
        return
    if type(delayed_update) is not int or delayed_update < 0:
        raise UsageError(
            f"expected delayed_update to be a number of steps to train without delay first, 0 or more, or None, found "
            f"{delayed_update!r}"
        )
    if offload in ("none", "nvme"):
        raise UsageError(
            f"expected offload='auto' or 'host' with delayed_update, which runs on the host with the optimizer's "
            f"states in its memory, found offload={offload!r}"
        )


def check_budget(name: str, asked: int | float | str | None, whole: str) -> int | float | None:
    """A budget in bytes, or as a fraction of ``whole``; ``name`` is the option's."""
    budget = parse_bytes(asked) if isinstance(asked, str) else asked
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0):
        raise UsageError(
            f"expected {name} as '24GiB', a number of bytes, or a fraction of {whole} up to 1.0, found {budget!r}"
        )
    if isinstance(budget, float) and budget > 1:
        raise UsageError(f"expected a fraction up to 1.0, or a whole number of bytes, as {name}, found {budget}")
    return budget


def check_accumulate(accumulate: AccumulateOption, plan: Plan | str | Path | None) -> None:
    """Check the number of micro-batches, and that a plan has as many."""
    if accumulate != "auto" and (isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1):
        raise UsageError(
            f"expected accumulate to be a number of micro-batches, 1 or more, or 'auto', found {accumulate!r}"
        )
    if isinstance(plan, Plan) and accumulate not in (1, "auto", plan.num_micro_batches):
        raise UsageError(
            f"expected accumulate={plan.num_micro_batches}, which the plan was made for, found {accumulate}: leave it "
            f"out, or make the plan anew"
        )
