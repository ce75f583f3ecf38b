"""Options are what was given to ``compile``, whatever becomes of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import pytest
import torch

import zerofx
from zerofx.averages import EMA
from zerofx.driver.asked import describe_request
from zerofx.errors import UsageError
from zerofx.optimizers import Optimizers
from zerofx.option_table import Purpose, entries, texts
from zerofx.options import CompileKeywords, CompileOptions, PlanKeywords, TuneKeywords, check_options
from zerofx.precision import Precision
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.settings import read_settings


def _options(**given: Any) -> CompileOptions:
    asked: dict[str, Any] = {"stage": 3, "backend": "eager", **given}
    return check_options(**asked)


def test_containers_that_are_changed_afterwards_change_no_options() -> None:
    tile, offload, kept = {"head": 2}, {"gradients": "host"}, ["layers.0"]
    options = _options(tile=tile, offload=offload, keep_gathered=kept, accumulate=2)
    tile["head"], offload["gradients"] = 1, "disk"
    kept.append("layers.1")
    assert options == _options(
        tile={"head": 2}, offload={"gradients": "host"}, keep_gathered=("layers.0",), accumulate=2
    )


@pytest.mark.parametrize("kept", [{"a", "b"}, {"a": 1, "b": 2}.keys(), {"a": "because", "b": "so"}, ["a", "b"], "all"])
def test_names_to_keep_may_be_in_any_collection(kept: Any) -> None:
    found = _options(keep_gathered=kept).policy.keep
    assert found == "all" if kept == "all" else set(found) == {"a", "b"}


@dataclass(frozen=True)
class _WithOneMore(CompileOptions):
    added: int = 1


@pytest.mark.parametrize("purpose", get_args(Purpose))
def test_an_option_of_which_nothing_is_said_is_compared(purpose: Purpose) -> None:
    given = {one.name: getattr(_options(), one.name) for one in fields(CompileOptions)}
    assert _WithOneMore(**given).texts(purpose) != _WithOneMore(**given, added=2).texts(purpose)


def test_ranks_compare_an_option_of_which_nothing_is_said() -> None:
    given = {one.name: getattr(_options(), one.name) for one in fields(CompileOptions)}
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    described = {
        describe_request(model, Optimizers((optimizer,)), _WithOneMore(**given, added=n), read_settings())
        for n in (1, 2)
    }
    assert len(described) == 2


CHANGED: Mapping[str, Any] = {
    "stage": 2, "precision": Precision("bf16"), "backend": "inductor", "max_shapes": 3, "memory_budget": 99,
    "recompute": "full", "offload": {"gradients": "nvme"}, "accumulate": 4,
    "tile": {"head": 2}, "host_budget": 99, "delayed_update": 1,
    "wire": "int8", "max_grad_norm": 1.0, "grad_norms": True, "keep_gradients": ("head.*",),
    "cuda_graphs": True, "prefetch": 0, "keep_gathered": "all", "mesh": Mesh(replicate=2, model=2),
    "states_over": "shard", "shardings": {"*.up": "column"},
}  # fmt: skip


def test_what_is_compared_is_what_something_follows_from() -> None:
    plain = _options()
    left_out: dict[str, set[str]] = {
        purpose: {
            name
            for name, value in CHANGED.items()
            if replace(plain, **{name: value}).texts(purpose) == plain.texts(purpose)
        }
        for purpose in get_args(Purpose)
    }
    assert left_out == {
        "ranks": {"cuda_graphs", "prefetch", "keep_gathered"},
        "plan": {"cuda_graphs", "max_shapes", "accumulate"},
        "step": {"cuda_graphs", "max_shapes"},
        "evaluation": {
            "accumulate", "delayed_update", "grad_norms", "keep_gathered", "keep_gradients", "max_grad_norm", "wire",
        },
        "sharing": {
            "stage", "memory_budget", "recompute", "offload", "host_budget", "delayed_update", "prefetch",
            "keep_gathered", "states_over",
        },
    }  # fmt: skip


def test_the_order_of_names_is_not_compared_and_that_of_a_mapping_is() -> None:
    def compared(**changed: Any) -> list[str]:
        return replace(_options(), **changed).texts("plan")

    assert compared(keep_gathered=("a", "b")) == compared(keep_gathered={"b", "a"})
    assert compared(tile={"a": 2, "b": 2}) != compared(tile={"b": 2, "a": 2})


@pytest.mark.parametrize(
    "field",
    [{"keep_fp32": (torch.nn.LayerNorm,)}, {"reduce_dtype": "fp32"}, {"state_dtype": "bf16"}, {"loss_scale": 2}],
)
@pytest.mark.parametrize("purpose", get_args(Purpose))
def test_all_of_a_precision_is_compared(field: Any, purpose: Purpose) -> None:
    plain, other = _options(precision="bf16"), _options(precision=Precision("bf16", **field))
    assert plain.texts(purpose) != other.texts(purpose) and plain != other


EXCLUDED: Sequence[tuple[dict[str, Any], str]] = [
    ({"average": EMA(), "precision": Precision("bf16", state_dtype="bf16")}, "a small step of an average is lost"),
    ({"plan": "p.json", "lengths": 128}, "found plan='p.json' and lengths=128: a plan is for one length; leave one"),
    ({"loss_fn": print, "forward": print}, "which exclude each other so, found forward="),
    ({"forward": print, "outputs": "all"}, "outputs='all': what forward returns after its loss is handed out"),
    ({"reduce": "each", "stage": 0}, "reduce='each' and stage=0: every rank has all gradients"),
    ({"reduce": "each", "accumulate": 2, "offload": {"gradients": "host"}}, "no whole gradients wait"),
    ({"order": "layer", "reduce": "each"}, "order='layer' and reduce='each': a layer's gradients are reduced once"),
    ({"mesh": {"pipe": 2}, "order": "interleaved", "offload": {"gradients": "host"}}, "no gradients wait for the next"),
    ({"order": "zero-bubble", "mesh": {"shard": 2}}, "order='zero-bubble' and mesh={'shard': 2}: it is an order"),
    ({"wire": "int8", "stage": 0}, "wire='int8' and stage=0: whole gradients are reduced"),
    ({"wire": "int8", "mesh": "auto"}, "wire='int8' and mesh='auto': meshes are compared"),
    ({"delayed_update": 1, "offload": "none"}, "delayed_update=1 and offload='none': the optimizer's states are in"),
    ({"delayed_update": 0, "precision": "fp16"}, "delayed_update=0 and precision='fp16': all gradients of a scaled"),
    ({"delayed_update": 1, "max_grad_norm": 1}, "delayed_update=1 and max_grad_norm=1: the norm of all gradients"),
    ({"delayed_update": 1, "on_nonfinite": "skip"}, "on_nonfinite='skip': updates are under way"),
    ({"arena": True, "backend": "eager"}, "arena=True and backend='eager': ATen's operators allocate for themselves"),
    ({"arena": True, "backend": "inductor", "cuda_graphs": True}, "arena=True and cuda_graphs=True: CUDA graphs have"),
    ({"mesh": {"pipe": 2}, "cuda_graphs": True}, "messages between stages are awaited by the host"),
    ({"copied_experts": 1, "precision": Precision("bf16", fp8="tensorwise")}, "copies are multiplied as they come"),
    ({"mesh": {"pipe": 2}, "saved": "int8"}, "stages hand activations on from micro-batch to micro-batch as they are"),
]


@pytest.mark.parametrize(("given", "why"), EXCLUDED, ids=lambda case: "-".join(case) if isinstance(case, dict) else "")
def test_options_that_exclude_each_other_are_refused_with_why(given: Any, why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        _options(**given)


def test_all_exclusions_are_tried() -> None:
    pairs = {(name, other.other) for name, entry in entries(CompileOptions).items() for other in entry.excludes}
    assert all(any({*pair} <= {"stage", *given} for given, _ in EXCLUDED) for pair in pairs)
    assert len(EXCLUDED) == len(pairs)


def test_one_table_has_the_options_of_functions_their_defaults_and_what_is_said_of_them() -> None:
    known = entries(CompileOptions)
    assert set(known) == {"stage", *CompileKeywords.__annotations__} == set(texts(CompileOptions))
    assert entries(Precision).keys() == texts(Precision).keys()
    for function, keywords, own in (
        (zerofx.compile, CompileKeywords, {"model", "optimizer", "example_batch"}),
        (zerofx.plan, PlanKeywords, {"model", "optimizer", "batch", "world_size"}),
        (zerofx.tune, TuneKeywords, {"model", "optimizer", "batch", "num_steps", "num_candidates", "save"}),
    ):
        called: Any = function
        parameters, told = inspect.signature(function).parameters, " ".join((inspect.getdoc(function) or "").split())
        assert set(parameters) - own - {"machine"} == {"stage", *keywords.__annotations__} - {"machine"}
        for name in keywords.__annotations__:
            assert parameters[name].default == known[name].default
            assert f" {name}: {texts(CompileOptions)[name]}" in told.replace("``", "")
        with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'memory'"):
            called(*[None] * 3, memory=1)


def test_a_text_that_is_no_size_is_refused_by_the_name_of_its_option() -> None:
    with pytest.raises(UsageError, match=r"expected memory_budget to be a size .* found '12 apples'"):
        _options(memory_budget="12 apples")


@pytest.mark.parametrize("name", entries(CompileOptions))
def test_what_an_option_cannot_be_is_refused_with_what_it_is_for(name: str) -> None:
    known = entries(CompileOptions)[name]
    assert known.accepts(known.default)
    with pytest.raises(UsageError, match=f"expected {name} ") as refusal:
        _options(**{name: [1.5]})
    if name not in ("mesh", "lengths"):
        assert f"found [1.5]: {texts(CompileOptions)[name]}" in str(refusal.value)
