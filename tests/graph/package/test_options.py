"""Options are what was given to ``compile``, whatever becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import pytest
import torch

from zerofx.driver.asked import describe_request
from zerofx.options import CompileOptions, Purpose, check_options
from zerofx.precision import LossScale
from zerofx.scheduler.decide.residency import PolicyOptions
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
    described = {describe_request(model, optimizer, _WithOneMore(**given, added=n), read_settings()) for n in (1, 2)}
    assert len(described) == 2


CHANGED: Mapping[str, Any] = {
    "stage": 2, "precision": "bf16", "backend": "inductor", "max_shapes": 3, "memory_budget": 99, "recompute": "full",
    "offload": {"gradients": "nvme"}, "accumulate": 4, "tile": {"head": 2}, "host_budget": 99, "delayed_update": 1,
    "wire": "int8", "max_grad_norm": 1.0, "grad_norms": True, "keep_gradients": ("head.*",),
    "cuda_graphs": True, "loss_scale": LossScale(),
    "keep_fp32": (torch.nn.LayerNorm, "*.router"), "mesh": Mesh(replicate=2, model=2), "states_over": "shard",
    "shardings": {"*.up": "column"},
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
        "ranks": {"cuda_graphs"},
        "plan": {"cuda_graphs", "max_shapes", "accumulate"},
        "step": {"cuda_graphs", "max_shapes"},
    }


def test_all_of_the_policy_is_compared_but_for_the_order_of_names() -> None:
    def texts(*policy: Any) -> list[str]:
        return replace(_options(), policy=PolicyOptions(*policy)).texts("plan")

    assert texts(1, ("a", "b")) == texts(1, {"b", "a"})
    different = [texts(), texts(0), texts(1, ("a",)), texts(1, "all"), texts(1, (), False)]
    assert len(set(map(tuple, different))) == len(different)
    assert replace(_options(), tile={"a": 2, "b": 2}).texts("plan") != replace(_options(), tile={"b": 2, "a": 2}).texts(
        "plan"
    )
