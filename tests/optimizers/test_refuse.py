"""Optimizers that cannot run on flat shards are refused, with what is in the way."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zerofx
from tests.optimizers.cases import CASES, Lion
from zerofx.errors import OptimizerError
from zerofx.optimizers import check_supported, trace_update

Update = Callable[[torch.Tensor, dict[str, Any], dict[str, Any]], None]


def matrix() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))


class Custom(torch.optim.Optimizer):
    """An optimizer whose update of one parameter is a function."""

    def __init__(self, params: Any, update: Update) -> None:
        super().__init__(params, {"lr": 0.1, "beta": 0.9, "count": 2})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group, self.state[p])


def refused(update: Update, match: str) -> None:
    optimizer = Custom([matrix()], update)
    with pytest.raises(OptimizerError, match=match):
        check_supported(optimizer)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_elementwise_optimizers_pass(make: Any) -> None:
    check_supported(make([matrix()]))


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon", "SparseAdam"])
def test_whole_tensor_optimizers_are_refused_by_name(name: str) -> None:
    with pytest.raises(OptimizerError, match=name):
        check_supported(getattr(torch.optim, name)([matrix()]))


def test_a_subclass_of_a_refused_optimizer_is_refused() -> None:
    class Mine(torch.optim.LBFGS):
        pass

    with pytest.raises(OptimizerError, match="Mine: its step needs a closure"):
        check_supported(Mine([matrix()]))


def test_a_closure_is_refused() -> None:
    class Closure(Lion):
        def step(self, closure: Any) -> None:  # type: ignore[override]  # what is tested
            super().step()

    with pytest.raises(OptimizerError, match=re.escape("Closure.step(closure)")):
        check_supported(Closure([matrix()]))


def test_differentiable_is_refused() -> None:
    with pytest.raises(OptimizerError, match="differentiable"):
        check_supported(torch.optim.Adam([matrix()], differentiable=True))


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(OptimizerError, match=r"complex64: .*torch.view_as_complex"):
        check_supported(torch.optim.Adam([torch.zeros(3, dtype=torch.complex64, requires_grad=True)]))


def test_layerwise_norms_are_refused_with_the_operator_and_the_line() -> None:
    def lars(p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        assert p.grad is not None
        p.add_(p.grad * (p.norm() / p.grad.norm()), alpha=-group["lr"])

    refused(lars, r"Custom calls aten.linalg_vector_norm.default, which is not elementwise.*test_refuse\.py:\d+")


@pytest.mark.parametrize(
    ("update", "match"),
    [
        (lambda p, g, s: p.sub_(p.mean()), "aten.mean.default"),
        (lambda p, g, s: p.add_(torch.rand_like(p)), "aten.rand_like.default, which draws random numbers"),
        (lambda p, g, s: p.sub_(p.grad.cumsum(0)), "aten.cumsum.default"),
        (lambda p, g, s: p.sub_(p.flatten()[1]), "aten.select.int, which takes a tensor apart"),
        (lambda p, g, s: p.sub_(p.grad.max().item()), "aten.max.default"),
        (lambda p, g, s: p.sub_(p.grad, alpha=g["lr"] / p.numel()), "shapes differently"),
        (lambda p, g, s: p.sub_(p.grad @ p.t() @ p if p.dim() > 1 else p.grad), "aten.t.default"),
        (lambda p, g, s: p.sub_(p.grad * 2 if p.dim() > 1 else p.grad), "shapes differently"),
        (lambda p, g, s: p.sub_(p.grad, alpha=math.sqrt(g["lr"])), "through a function of math or numpy"),
        (lambda p, g, s: p.sub_(p.grad, alpha=float(g["lr"])), r'group\["lr"\] to reach .* float\(\)'),
        (lambda p, g, s: p.sub_(p.grad, alpha=math.sqrt(g["lr"]) * g["beta"]), "math or numpy"),
        (lambda p, g, s: p.sub_(torch.ones(5).sum()), "shape"),
        (lambda p, g, s: s.update(history=[1]), r'keeps a list in state\["history"\]'),
        (lambda p, g, s: g.update(count=g["count"] + 1), r'changes param_groups\["count"\]'),
        (lambda p, g, s: torch._foreach_mul_([p], 0.5), "lists of tensors"),
        (lambda p, g, s: p.mul_(g["absent"]), r"Custom.step\(\).*KeyError"),
    ],
)
def test_what_a_flat_shard_cannot_do_is_refused(update: Update, match: str) -> None:
    refused(update, match)


def test_tensors_from_outside_are_refused() -> None:
    mask = torch.ones(1)
    refused(lambda p, g, s: p.mul_(mask), "neither parameter, gradient, state")  # type: ignore[arg-type]  # returns what nobody reads


def test_counters_outside_the_state_are_refused() -> None:
    class Counter(Lion):
        count = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
            self.count += 1
            super().step()

    with pytest.raises(OptimizerError, match="attribute 'count'"):
        check_supported(Counter([matrix()]))
    model = torch.nn.Linear(4, 4)
    with pytest.raises(OptimizerError, match=r"where .* was expected; use"):  # no line: none of the optimizer's runs
        zerofx.compile(model, Counter(model.parameters()))


def test_a_branch_that_tracing_cannot_see_is_found_by_checking() -> None:
    def update(p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        assert p.grad is not None
        p.sub_(p.grad, alpha=2.0 if math.sqrt(group["lr"]) > 0.1 else 1.0)

    refused(update, "same bits")


def test_counts_among_hyperparameters_may_be_integers() -> None:
    def update(p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        assert p.grad is not None
        for _ in range(group["count"]):
            p.sub_(p.grad, alpha=group["lr"])

    optimizer = Custom([matrix()], update)
    program = trace_update(optimizer, optimizer.param_groups[0])
    assert program.host()({"lr": 0.5, "count": 2}, {}) == (-0.5,) or program.num_scalars == 1
    assert program.host()({"lr": 0.5, "count": 3}, {}) is None


def test_a_state_that_an_option_adds_half_way_is_refused() -> None:
    optimizer = torch.optim.RMSprop([matrix()], momentum=0.9)
    with pytest.raises(OptimizerError, match="momentum_buffer"):
        trace_update(
            optimizer,
            optimizer.param_groups[0],
            state_present=frozenset({"step", "square_avg"}),
            scalar_values={"step": 1},
        )
