"""Checks of single options of ``compile``, ``plan`` and ``tune``, and of those that do not go together.

Each raises a ``UsageError`` that says what the option can be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, Literal, get_args

from zerofx.budgets import GRADIENTS
from zerofx.choices import (
    TP_STYLES,
    AccumulateOption,
    Backend,
    OffloadOption,
    OffloadWord,
    OnNonfinite,
    OutputsOption,
    Precision,
    RecomputeOption,
    ReduceDtype,
    ReduceOption,
    ShardingWord,
    StateDtype,
    StatesOver,
    WireOption,
)
from zerofx.errors import UsageError, notify
from zerofx.mesh_option import AUTO, mesh_of
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.units import first_few, parse_bytes

STOPPING = ("skip", "raise")  # what is done about a loss that is not finite which ends a step before its updates


# What options can be that are one word of a few: the words, and how a refusal says them.
_WORDS: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "backend": (get_args(Backend), "'inductor' or 'eager'"),
    "precision": ((None, *get_args(Precision)), "None (as the model is), 'bf16' or 'fp16'"),
    "recompute": (get_args(RecomputeOption), "'auto' (as the budget asks), 'none' or 'full'"),
    "reduce": (
        get_args(ReduceOption),
        "'auto', 'each' (gradients of each micro-batch, summed in slices) or 'once' (after the last micro-batch)",
    ),
    "wire": (
        get_args(WireOption),
        "'exact', 'int8' (gathers and gradients in 8 bits where the step is faster for it), 'int4' (gradients in 4) or "
        "'fp8' (both in float8_e4m3fn)",
    ),
    "on_nonfinite": (
        (None, *get_args(OnNonfinite)),
        "None or 'warn' (update all the same), 'skip' (leave the update out) or 'raise'",
    ),
    "outputs": (
        get_args(OutputsOption),
        "'numbers' (what a model returns besides its loss that is one number), 'all' or 'none'",
    ),
    "reduce_dtype": (
        (None, *get_args(ReduceDtype)),
        "None (gradients are reduced in what they are computed in), 'fp32' or 'bf16'",
    ),
    "state_dtype": ((None, *get_args(StateDtype)), "None (states are stored as the optimizer has them) or 'bf16'"),
    "states_over": (
        get_args(StatesOver),
        "'mesh' (optimizer states in parts of slices, one on each replica), 'shard' (in slices, which every replica "
        "has) or 'auto' (as is faster)",
    ),
}


def check_words(**asked: object) -> None:
    """Check options that are one word of a few."""
    for option, word in asked.items():
        words, meaning = _WORDS[option]
        if word not in words:
            raise UsageError(f"expected {option} {meaning}, found {word!r}")


def check_count(option: str, asked: object, least: int, what: str) -> None:
    """Check an option that is a whole number, at least ``least``; ``what`` says so."""
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < least:
        raise UsageError(f"expected {option} {what}, found {asked!r}")


def check_kind(option: str, asked: object, kinds: tuple[type, ...], what: str) -> None:
    """Check the type of an option that may be left out; ``what`` says which there are."""
    if asked is not None and not isinstance(asked, kinds):
        raise UsageError(f"expected {option} to be {what}, found {type(asked).__name__}")


def check_stage(stage: object) -> None:
    """Check what is sharded."""
    if not isinstance(stage, int) or isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise UsageError(
            f"expected stage 0 (replicate), 1 (shard optimizer states), 2 (and gradients) or 3 (and parameters), found "
            f"{stage!r}"
        )


def check_loss_terms(loss_terms: object) -> None:
    """Check what counts the terms of a loss."""
    if loss_terms is not None and not callable(loss_terms):
        raise UsageError(
            f"expected loss_terms to be a function of a batch that gives how many terms of the loss each sample has, "
            f"found {type(loss_terms).__name__}: for example lambda ids, labels: (labels != -100).sum(-1)"
        )


def check_cuda_graphs(cuda_graphs: object) -> None:
    """Check whether kernels are launched as CUDA graphs."""
    if cuda_graphs != "auto" and not isinstance(cuda_graphs, bool):
        raise UsageError(
            f"expected cuda_graphs 'auto' (where the step allows it), True or False, found {cuda_graphs!r}"
        )


def check_grad_norms(grad_norms: object) -> None:
    """Check whether norms of layers are handed out."""
    if not isinstance(grad_norms, bool):
        raise UsageError(
            f"expected grad_norms to be True (step.metrics has each layer's) or False, found {grad_norms!r}"
        )


def check_lengths(lengths: object, *, given: bool) -> None:
    """Check that no plan is ``given`` with lengths."""
    if lengths is not None and given:
        raise UsageError(
            f"expected no plan with lengths={lengths!r}, since a plan is for one length, found one: leave one of them "
            f"out"
        )


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


def warn_without_budget(offload: object, host_budget: object, *, given: bool) -> None:
    """Warn of what is ignored where nothing has to leave the device; ``given``: whether there is a plan, which may."""
    if offload in ("host", "nvme"):
        notify(f"offload={offload!r} is ignored without a memory_budget: nothing has to leave the device")
    if host_budget is not None and not given and not isinstance(offload, Mapping):
        notify("host_budget is ignored without a memory_budget or a plan: nothing has to leave the device")


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
    if asked and mesh != AUTO:
        warn_of_ignored_shardings(mesh)
    return dict(asked)


def warn_of_ignored_shardings(mesh: Mesh | None) -> None:
    """Warn that ``shardings=`` is given for a mesh on which all ranks compute with whole parameters."""
    if mesh is None or mesh.model == 1:
        notify("shardings is ignored where the mesh has no axis 'model': every rank computes with whole parameters")


def check_offload(offload: object, accumulate: AccumulateOption, *, given: bool, budget: bool) -> None:
    """``given``: whether there is a plan, which says how many micro-batches there are; ``budget``: whether one asks."""
    if isinstance(offload, Mapping):
        if list(offload) == [GRADIENTS] and offload[GRADIENTS] in ("host", "nvme"):
            if not given and (accumulate == 1 or (accumulate == "auto" and not budget)):
                notify(
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


def check_batch_form(batch: object) -> None:
    """Check what is to be the arguments of a call, or its keywords.

    Raises:
        UsageError: it is neither.
    """
    if not isinstance(batch, tuple | list | Mapping):
        raise UsageError(f"expected batch to be a tuple or a dict of keywords, found {type(batch).__name__}")


def check_texts(option: str, asked: object, what: str) -> None:
    """Check what is to be names of ``what``.

    Raises:
        UsageError: it is one text, whose letters would be taken for names, or has something else than texts.
    """
    if isinstance(asked, str) or not isinstance(asked, Collection) or not all(isinstance(name, str) for name in asked):
        advice = f"give {option}=({asked!r},)" if isinstance(asked, str) else "give a tuple of texts"
        raise UsageError(f"expected {option} to be names of {what}, found {asked!r}: {advice}")


def check_outputs(outputs: OutputsOption, forward: object | None) -> None:
    """Check that what is handed out besides the loss is not said twice."""
    if outputs != "numbers" and forward is not None:
        raise UsageError(
            f"expected no outputs with forward, found {outputs!r}: what forward returns after its loss is handed out, "
            f"and nothing else"
        )


def check_wire(wire: object, stage: int) -> None:
    """Check that fewer bits are asked for where they can be sent."""
    if wire != "exact" and stage == 0:
        raise UsageError(
            f"expected stage 1, 2 or 3 with wire={wire!r}, found stage 0: whole gradients are reduced and gathered "
            f"there, which is done exactly; give wire='exact', or another stage"
        )


def check_on_nonfinite(on_nonfinite: object, delayed_update: int | None) -> None:
    """Check that a loss that is not finite can do what it is to."""
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
    """Check that gradients can be reduced as often as they are to be."""
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
    what = "to be a number of steps to train without delay first, 0 or more, or None"
    check_count("delayed_update", delayed_update, 0, what)
    if offload in ("none", "nvme"):
        raise UsageError(
            f"expected offload='auto' or 'host' with delayed_update, which runs on the host with the optimizer's "
            f"states in its memory, found offload={offload!r}"
        )


def checked_budget(name: str, asked: int | float | str | None, whole: str) -> int | float | None:
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
    if accumulate != "auto":
        check_count("accumulate", accumulate, 1, "to be a number of micro-batches, 1 or more, or 'auto'")
    if isinstance(plan, Plan) and accumulate not in (1, "auto", plan.num_micro_batches):
        raise UsageError(
            f"expected accumulate={plan.num_micro_batches}, which the plan was made for, found {accumulate}: leave it "
            f"out, or make the plan anew"
        )
