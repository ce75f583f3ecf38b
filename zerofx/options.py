"""The options of ``compile``, ``plan`` and ``tune``: one table, and what users may give by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypedDict, Unpack, get_args

from zerofx.averages import AVERAGE, Average
from zerofx.choices import (
    AccumulateOption,
    Backend,
    CudaGraphs,
    OffloadOption,
    OffloadWord,
    OnNonfinite,
    OrderOfStages,
    OrderOption,
    OutputsOption,
    PrecisionOption,
    RecomputeOption,
    ReduceOption,
    SavedOption,
    StatesOver,
    Tiling,
    WireOption,
)
from zerofx.errors import UsageError, notify
from zerofx.mesh_option import AUTO, MeshLike
from zerofx.option_checks import (
    GRADIENTS_ALONE,
    LENGTHS,
    MACHINE,
    MESH,
    NOT_IN_STAGES,
    SHARDINGS,
    TILES,
    has_no_stages,
    warn_of_ignored_shardings,
)
from zerofx.option_table import (
    FLAG,
    FUNCTION,
    PATH,
    POSITIVE,
    SIZE,
    Exclusion,
    Kind,
    Purpose,
    any_of,
    check_values,
    count,
    instances,
    lines_for,
    names,
    one_of,
    option,
    words,
)
from zerofx.precision import PRECISION, LossScale, Precision, dtype_of
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zerofx.capture.objective.loss import ForwardFunction, LossFunction, Objective
    from zerofx.capture.objective.token_weighted_loss import LossTerms
    from zerofx.ir.casts import ComputeDtype
    from zerofx.ladder import Ladder, LengthsOption
    from zerofx.scheduler.decide.residency import PolicyOptions


STOPPING = ("skip", "raise")  # what is done about a loss that is not finite which ends a step before its updates
# Orders of micro-batches in which each gradient is whole once a step.
_IS_ONCE: Final = one_of("layer", *get_args(OrderOfStages))
_IN_GRAPH: Final = (
    "ranks",
    "plan",
    "step",
)  # what follows from it is compared itself: the captured graph, or decisions


class TuneKeywords(TypedDict, total=False):
    """Keywords that ``tune``, ``plan`` and ``compile`` have in common."""

    loss_fn: LossFunction | None
    forward: ForwardFunction | None
    outputs: OutputsOption
    loss_terms: LossTerms | None
    constant: Collection[str]
    memory_budget: int | float | str | None
    recompute: RecomputeOption
    offload: OffloadOption
    precision: Precision | PrecisionOption | None
    accumulate: AccumulateOption
    reduce: ReduceOption
    order: OrderOption
    mesh: MeshLike | None
    states_over: StatesOver
    shardings: Mapping[str, str] | None
    wire: WireOption
    saved: SavedOption | None
    prefetch: int
    keep_gathered: Collection[str] | Literal["all"]
    max_grad_norm: float | None
    grad_norms: bool
    keep_gradients: Collection[str] | Literal["*"]
    average: Average | None
    backend: Backend


class PlanKeywords(TuneKeywords, total=False):
    """Keywords that ``plan`` and ``compile`` have in common."""

    host_budget: int | float | str | None
    tile: Tiling
    delayed_update: int | None
    machine: Machine | str | None
    arena: bool


class CompileKeywords(PlanKeywords, total=False):
    """Keywords of ``compile``."""

    plan: Plan | str | Path | None
    lengths: LengthsOption | None
    max_shapes: int
    on_nonfinite: OnNonfinite | None
    weights: str | Path | None
    cuda_graphs: CudaGraphs
    copied_experts: int


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """All options of one compiled step, checked, in the types that they are kept in, each with its documentation.

    An option matters to every purpose (``Purpose``) that it is not ``not_for``.
    """

    stage: int = option(3, count(0, 3), not_for=("sharing",))
    """0 replicates, 1 shards optimizer states, 2 also gradients, 3 also parameters (ZeRO, 1910.02054)."""

    loss_fn: LossFunction | None = option(
        None, Kind("a function, or a module without parameters to train", callable), not_for=_IN_GRAPH
    )
    """``loss_fn(outputs, *rest)`` for a model that does not return its loss. Forward gets as many leading positional
    arguments as it requires, and the keywords that it names; ``loss_fn`` gets the other positional ones, and the
    keywords that it names."""

    forward: ForwardFunction | None = option(
        None,
        FUNCTION,
        Exclusion("loss_fn", "forward computes the loss"),
        Exclusion("outputs", "what forward returns after its loss is handed out, and nothing else"),
        not_for=_IN_GRAPH,
    )
    """``forward(model, *batch, **kwargs)`` that is called instead of the model; it returns the loss, or ``(loss,
    extras)``."""

    outputs: OutputsOption = option("numbers", words(OutputsOption), not_for=("plan", "step"))
    """what ``step.outputs`` has of what the model, or ``loss_fn``, returns with its loss: its ``"numbers"``, ``"all"``
    of it, or ``"none"``."""

    loss_terms: LossTerms | None = option(None, FUNCTION, not_for=(*_IN_GRAPH, "evaluation"))
    """``loss_terms(*batch)`` gives how many terms of the loss (valid tokens, say) each sample has, as in ``lambda ids,
    labels: (labels != -100).sum(-1)``: the step's loss is then the mean over those of all micro-batches and ranks."""

    constant: tuple[str, ...] = option((), names("('edge_index',)"), not_for=("plan", "step"))
    """names of arguments with the same values in every step, which a forward may read."""

    memory_budget: int | float | None = option(None, SIZE, not_for=("sharing",))
    """the most bytes on the device at any moment of a step: ``"24GiB"``, a number, or a fraction of the device; None
    for no limit. A budget that no plan meets is refused."""

    host_budget: int | float | None = option(None, SIZE, not_for=("sharing",))
    """the most bytes of host memory that a rank's pool may take; None for the rank's share of the host."""

    recompute: RecomputeOption = option("auto", words(RecomputeOption), not_for=("sharing",))
    """``"auto"`` as the budget asks, ``"none"``, or ``"full"`` for as many activations as possible."""

    offload: OffloadOption = option("auto", any_of(words(OffloadWord), GRADIENTS_ALONE), not_for=("sharing",))
    """``"auto"`` as the budget asks, ``"none"``, ``"host"``, ``"nvme"``, or ``{"gradients": "host"}`` (or ``"nvme"``)
    for gradients between micro-batches alone."""

    tile: Tiling = option("auto", any_of(words(Literal["auto", "none"]), TILES))
    """what runs a few rows at a time: ``"auto"`` where no other plan fits, ``"none"``, or numbers of tiles, 2 or more,
    by names of modules, or of slices by names of parameters. Sums are then taken in another order."""

    precision: Precision = option(None, PRECISION)
    """None for the model's dtypes; ``"bf16"`` or ``"fp16"`` computes and communicates so, with float32 masters;
    ``"fp8"`` is ``"bf16"`` with those products of layers in fp8 that are faster so; a ``zerofx.Precision`` also says
    how, what is reduced and stored in which dtype, and how the loss is scaled."""

    accumulate: AccumulateOption = option(1, any_of(count(1), words(Literal["auto"])), not_for=("plan", "evaluation"))
    """how many equal micro-batches a batch is divided into, whose losses are averaged; ``"auto"`` for the number whose
    plan is fastest within the budget."""

    reduce: ReduceOption = option(
        "auto",
        words(ReduceOption),
        Exclusion("stage", "every rank has all gradients for its update at stage 0", one_of("each"), one_of(0)),
        Exclusion("offload", "no whole gradients wait for the next micro-batch", one_of("each"), instances(Mapping)),
        not_for=("evaluation",),
    )
    """``"each"`` reduces the gradients of each micro-batch and adds up slices, ``"once"`` adds up whole ones, and
    reduces those; ``"auto"`` is the first at stages 2 and 3 without ``pipe``, and with a budget what that has room
    for."""

    order: OrderOption = option(
        "auto",
        words(OrderOption),
        Exclusion("reduce", "a layer's gradients are reduced once a step", _IS_ONCE, one_of("each")),
        Exclusion("offload", "no gradients wait for the next micro-batch", _IS_ONCE, instances(Mapping)),
        Exclusion("mesh", "it is an order of stages", one_of(*get_args(OrderOfStages)), has_no_stages),
        not_for=("sharing", "evaluation"),
    )
    """the order of micro-batches: ``"layer"`` runs all of them through a layer before the next layer, so that its
    parameters come once a step, and what is handed from layer to layer is held for all; ``"micro-batch"`` runs one
    after the other, in stages one forward and one backward by turns; ``"zero-bubble"``, in stages alone, is that with
    weight gradients some turns later, ``"interleaved"`` that with two chunks of layers a stage, ``"round-robin"`` all
    of them through a chunk of each stage before its next one, so that parameters come twice a step; ``"auto"`` is
    ``"micro-batch"``, and with a budget or in stages what is faster. All have the same bits."""

    mesh: Mesh | Literal["auto"] | None = option(None, MESH, *NOT_IN_STAGES)
    """the axes that ranks lie along, outer to inner ``pipe``, ``replicate``, ``shard`` and ``model``, by numbers of
    ranks (``{"replicate": 2, "shard": 4}``) or a ``DeviceMesh`` with these names; None for all along ``shard``,
    ``"auto"`` for the mesh that is fastest for a sample, of those that fit, where a batch is one of all ranks along
    ``model`` and ``pipe``."""

    states_over: StatesOver = option("auto", words(StatesOver), not_for=("sharing",))
    """``"mesh"`` for optimizer states in parts of slices, one on each replica, ``"shard"`` for slices that every
    replica has, ``"auto"`` for what is faster."""

    shardings: Mapping[str, str] = option(None, SHARDINGS)
    """how modules or parameters lie on the axis ``model``, by names or patterns of names: ``"column"``, ``"row"``,
    ``"sequence"``, ``"replicated"`` or ``"exchange"``, or a ``tp_plan`` of ``transformers``; the rest is the plan's."""

    copied_experts: int = option(
        0,
        count(0),
        Exclusion("precision", "copies are multiplied as they come", theirs=lambda given: given.fp8 is not None),
        not_for=("plan", "step", "sharing", "evaluation"),
    )
    """where rows that are sent to their experts find no room: of how many experts of a layer, those with the most rows,
    each rank then gets copies, if a step is faster so, to compute as many rows as the others. The gradients of their
    weights are then sums of ranks' sums, each rounded; all else has the same bits."""

    wire: WireOption = option(
        "exact",
        words(WireOption),
        Exclusion("stage", "whole gradients are reduced and gathered at stage 0, exactly", theirs=one_of(0)),
        Exclusion("mesh", "meshes are compared as they send everything exactly, by zerofx.plan", theirs=one_of(AUTO)),
        not_for=("evaluation",),
    )
    """``"exact"``, or ``"int8"``, ``"int4"`` (ZeRO++, 2306.10209) or ``"fp8"`` for buckets with which rounded values
    make the step faster."""

    saved: SavedOption | None = option(None, words(SavedOption), not_for=("sharing", "evaluation"))
    """None for exact activations, or ``"int8"`` or ``"fp8"`` to keep those that wait for backward on the device in 8
    bits: gradients are then rounded, outputs and the loss of a step are not."""

    prefetch: int = option(1, count(0), not_for=("ranks", "sharing"))
    """how many units ahead of their use gathers are issued."""

    keep_gathered: Collection[str] | Literal["all"] = option(
        (), any_of(words(Literal["all"]), names("('layers.0',)")), not_for=("ranks", "sharing", "evaluation")
    )
    """names of buckets that stay gathered from forward to backward, or ``"all"``."""

    delayed_update: int | None = option(
        None,
        count(0),
        Exclusion("offload", "the optimizer's states are in the host's memory", theirs=one_of("none", "nvme")),
        Exclusion(
            "precision",
            "all gradients of a scaled loss have to be finite before updates begin",
            theirs=lambda given: given.scaling is not None,
        ),
        Exclusion("max_grad_norm", "the norm of all gradients has to be known before updates begin"),
        Exclusion("on_nonfinite", "updates are under way when a loss is known", theirs=one_of(*STOPPING)),
        not_for=("sharing", "evaluation"),
    )
    """None, or how many exact steps come before updates that run on the host next to the following step, one step late
    (ZeRO-Offload, 2101.06840, section 5)."""

    max_grad_norm: float | None = option(None, POSITIVE, not_for=("evaluation",))
    """the 2-norm that gradients are clipped to, as by ``clip_grad_norm_``; see ``step.grad_norm``."""

    grad_norms: bool = option(False, FLAG, not_for=("evaluation",))
    """whether ``step.metrics`` has the norm of each layer's gradients, as ``"grad_norm/layers.0"``."""

    keep_gradients: tuple[str, ...] = option(
        (),
        any_of(Kind("'*'", lambda asked: asked == "*", lambda asked: (asked,)), names("('layers.0.weight', '*.bias')")),
        not_for=("evaluation",),
    )
    """names of trained parameters, or patterns of names, or ``"*"`` for all, whose reduced gradients ``step.full(name,
    "grad")`` reads after each step."""

    average: Average | None = option(
        None,
        AVERAGE,
        Exclusion(
            "precision",
            "a small step of an average is lost where it is rounded",
            theirs=lambda given: given.state_dtype is not None,
        ),
        not_for=("evaluation", "sharing"),
    )
    """an average of parameters over steps, kept by the update as a state of each: ``zerofx.EMA(0.999)`` or
    ``zerofx.SWA()``; ``step.averaged_parameters()`` reads it."""

    on_nonfinite: OnNonfinite | None = option(None, words(OnNonfinite), not_for=("evaluation",))
    """what a loss that is NaN or infinite on any rank does: None or ``"warn"`` goes on, ``"skip"`` leaves the state as
    it was, ``"raise"`` raises ``NonFiniteLossError`` on all ranks."""

    machine: Machine | None = option(None, MACHINE, not_for=_IN_GRAPH)
    """what predictions are for: a ``Machine``, the name of a built-in one, or None for the machine at hand."""

    plan: Plan | Path | None = option(
        None,
        any_of(Kind("a Plan", instances(Plan)), PATH),
        Exclusion("lengths", "a plan is for one length"),
        not_for=(*_IN_GRAPH, "evaluation"),
    )
    """a plan made earlier, or the path of one; refused where it was made for something else."""

    lengths: Ladder | int | Literal["auto"] | None = option(None, LENGTHS, not_for=("plan", "step"))
    """the numbers of tokens that batches of any length are padded to; for each, a step is built: ``(128, 256, 512)``,
    ``{128: 32, 512: 8}`` with the samples of a batch of each, ``512`` for a ladder up to it, or ``"auto"`` for one up
    to the first batch's length; None for batches as they are."""

    max_shapes: int = option(8, count(1), not_for=("plan", "step"))
    """how many batch shapes may be captured before another is an error; with ``lengths`` those that differ in numbers
    of tokens and samples count once."""

    weights: Path | None = option(None, PATH, not_for=(*_IN_GRAPH, "evaluation"))
    """``.safetensors`` files, their index, or a folder of ``torch.distributed.checkpoint`` to read parameters and
    persistent buffers from."""

    backend: Backend = option("inductor", words(Backend))
    """``"inductor"`` compiles each distinct region once; ``"eager"`` has DistributedDataParallel's bits."""

    cuda_graphs: CudaGraphs = option(False, any_of(FLAG, words(Literal["auto"])), not_for=_IN_GRAPH)
    """whether kernels are launched as CUDA graphs: False, ``"auto"`` where they can be, or True."""

    arena: bool = option(
        False,
        FLAG,
        Exclusion("backend", "ATen's operators allocate for themselves", theirs=one_of("eager")),
        Exclusion("cuda_graphs", "CUDA graphs have a memory pool of their own", theirs=one_of(True)),
        not_for=("sharing",),
    )
    """whether what a step makes lies in one pool at planned offsets, so that ``memory_budget`` holds for what the
    device's allocator reserves."""

    objective: Objective = field(default=None, compare=False)  # type: ignore[assignment]  # made of the options

    def __post_init__(self) -> None:
        from zerofx.capture.objective.loss import Objective  # needs torch, which the command line's help does without

        if self.objective is None:
            object.__setattr__(self, "objective", Objective(self.loss_fn, self.forward, self.outputs))

    def texts(self, purpose: Purpose) -> list[str]:
        """The options that are compared for ``purpose``, a line each."""
        return lines_for(self, purpose)

    @property
    def policy(self) -> PolicyOptions:
        """When buckets are gathered."""
        from zerofx.scheduler.decide.residency import PolicyOptions  # as above

        return PolicyOptions(self.prefetch, self.keep_gathered)

    @property
    def block(self) -> int:
        """Elements that a slice of a bucket is a multiple of: what is quantised together is one rank's."""
        from zerofx.ir.op_kernels.quantise import BLOCK  # as above

        return 1 if self.wire == "exact" else BLOCK

    @property
    def parts_gradients(self) -> bool:
        """True if gradients are asked to be reduced in each micro-batch, or to wait elsewhere for the next."""
        return self.reduce == "each" or isinstance(self.offload, Mapping)

    @property
    def order_in_stages(self) -> OrderOption:
        """The order that stages are asked for: by turns where gradients of one micro-batch go before the next's."""
        return "micro-batch" if self.order == "auto" and self.parts_gradients else self.order

    @property
    def compiles_regions(self) -> bool:
        """True if regions are compiled, which then hold less inside, and updates run torch's fused kernels."""
        return self.backend == "inductor"

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return None if self.precision.compute is None else dtype_of(self.precision.compute)

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """The dtype that gradients are reduced in, None for that in which they are computed."""
        return None if self.precision.reduce_dtype is None else dtype_of(self.precision.reduce_dtype)

    @property
    def states_in(self) -> torch.dtype | None:
        """The dtype that optimizer states are stored in, None for the optimizer's own."""
        return None if self.precision.state_dtype is None else dtype_of(self.precision.state_dtype)

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale, if anything is trained."""
        return self.precision.scaling if self.objective.trains else None

    def casts(self, model: nn.Module) -> ComputeDtype:
        """The compute dtype of a model, and which of its modules keep float32.

        Raises:
            UsageError: it has none of those that are to.
        """
        from zerofx.ir.casts import Casts  # as above

        return Casts.from_model(model, self.compute_dtype, self.precision.keep_fp32)


def check_options(stage: int = 3, **given: Unpack[CompileKeywords]) -> CompileOptions:
    """The options as one object.

    Raises:
        UsageError: one of them cannot be, or two exclude each other; the message says what can be.
    """
    from zerofx.capture.checks import check_forward_function, check_loss_function  # as above

    options = CompileOptions(**check_values(CompileOptions, {"stage": stage, **given}))
    check_loss_function(options.loss_fn)
    check_forward_function(options.forward)
    plan = options.plan
    if isinstance(plan, Plan) and options.accumulate not in (1, "auto", plan.num_micro_batches):
        raise UsageError(
            f"expected accumulate={plan.num_micro_batches}, which the plan was made for, found {options.accumulate}: "
            f"leave it out, or make the plan anew"
        )
    _warn_of_ignored(options)
    return options


def _warn_of_ignored(options: CompileOptions) -> None:
    """Warn of options without effect."""
    offload, accumulate, is_given = options.offload, options.accumulate, options.plan is not None
    has_budget = options.memory_budget is not None
    if isinstance(offload, Mapping):
        if not is_given and (accumulate == 1 or (accumulate == "auto" and not has_budget)):
            notify(
                f"offload={offload!r} is ignored with accumulate={accumulate!r}, which is one micro-batch: its "
                f"gradients wait for no other's"
            )
    elif not has_budget and options.delayed_update is None:
        if offload in ("host", "nvme"):
            notify(f"offload={offload!r} is ignored without a memory_budget: nothing has to leave the device")
        if options.host_budget is not None and not is_given:
            notify("host_budget is ignored without a memory_budget or a plan: nothing has to leave the device")
    if options.shardings and options.mesh != AUTO:
        warn_of_ignored_shardings(options.mesh)
