"""Optimizers that cannot run on flat shards are refused, with what is in the way."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.lib.optimizers import CASES, Lion
from zerofx.errors import OptimizerError
from zerofx.optimizers import ShadowOptimizer, StandIn, check_elementwise, check_supported
from zerofx.optimizers.blame import NotElementwiseError

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
        check_elementwise(optimizer)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_elementwise_optimizers_pass(make: Any) -> None:
    check_elementwise(make([matrix()]))


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_optimizers_are_refused_by_name(name: str) -> None:
    with pytest.raises(OptimizerError, match=name):
        check_elementwise(getattr(torch.optim, name)([matrix()]))


def test_a_subclass_of_a_refused_optimizer_is_refused() -> None:
    class Mine(torch.optim.LBFGS):
        pass

    with pytest.raises(OptimizerError, match="Mine: its step needs a closure"):
        check_elementwise(Mine([matrix()]))


def test_a_closure_is_refused() -> None:
    class Closure(Lion):
        def step(self, closure: Any) -> None:  # type: ignore[override]  # what is tested
            super().step()

    with pytest.raises(OptimizerError, match=re.escape("Closure.step(closure)")):
        check_elementwise(Closure([matrix()]))


def test_differentiable_is_refused() -> None:
    with pytest.raises(OptimizerError, match="differentiable"):
        check_elementwise(torch.optim.Adam([matrix()], differentiable=True))


def test_complex_parameters_are_refused_where_their_parts_are_not_updated_apart() -> None:
    parameter = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
    check_supported(torch.optim.Adam([parameter]))
    with pytest.raises(OptimizerError, match=r"parts of a complex parameter .* SGD does not"):
        check_supported(torch.optim.SGD([parameter], lr=0.1))


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
        (lambda p, g, s: p.sub_(torch.ones(5).sum()), "shape"),
        (lambda p, g, s: s.update(history=[p.grad]), r'keeps a list in state\["history"\]'),
        (lambda p, g, s: p.sub_(p.grad, alpha=float(p.detach().numpy().max())), r"numpy\(\) on a whole tensor"),
        (
            lambda p, g, s: p.sub_(p.grad, alpha=random.random()),
            "when the same step is run again: it depends on random",
        ),
        (lambda p, g, s: p.sub_(p.grad * 2 if p.numel() > 4096 else p.grad), "leaves another parameter"),
        (lambda p, g, s: torch._foreach_norm([p]), "aten.linalg_vector_norm.default"),
        (lambda p, g, s: g.update(count=g["count"] + 1), r'another param_groups\["count"\]'),
        (
            lambda p, g, s: [p.mul_(0.5) for _ in range(s.setdefault("n", [1])[0])] and s["n"].append(s["n"].pop() + 1),
            "more than 8 forms",
        ),
        (lambda p, g, s: s.clear() if s else s.update(m=torch.zeros_like(p)), "drops state 'm'"),
        (lambda p, g, s: p.mul_(g["absent"]), r"Custom.step\(\).*KeyError"),
    ],
)
def test_what_a_flat_shard_cannot_do_is_refused(update: Update, match: str) -> None:
    refused(update, match)


def test_tensors_from_outside_are_refused() -> None:
    mask = torch.ones(1)
    refused(lambda p, g, s: p.mul_(mask), "neither parameter, gradient, state")  # type: ignore[arg-type]  # returns what nobody reads


def test_states_of_something_else_than_a_parameter_are_refused() -> None:
    class Shared(Lion):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
            self.state["all"]["count"] = 1  # type: ignore[index]  # as people do
            super().step()

    model = torch.nn.Linear(4, 4)
    with pytest.raises(OptimizerError, match="keeps state for something other than a parameter"):
        check_elementwise(Shared(model.parameters()))


def test_counters_that_depend_on_the_number_of_parameters_are_refused() -> None:
    class Counter(Lion):
        count = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
            self.count += len(self.param_groups[0]["params"])
            super().step()

    optimizer = Counter([matrix()])
    with pytest.raises(OptimizerError, match="another attribute 'count' in step 1"):
        check_elementwise(optimizer)
    assert optimizer.count == 0


def test_optimizers_in_optimizers_are_refused() -> None:
    class Wrapper(Lion):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.inner = torch.optim.SGD(self.param_groups, lr=0.1)

    with pytest.raises(OptimizerError, match="found the SGD in inner of Wrapper"):
        check_elementwise(Wrapper([matrix()]))


def test_parameters_that_are_updated_in_pairs_are_refused() -> None:
    class Pairs(Lion):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
            super().step()
            first, *others = self.param_groups[0]["params"]
            for p in others:
                p.add_(first.flatten()[0])

    with pytest.raises(OptimizerError, match="Pairs leaves another parameter in step 1"):
        check_elementwise(Pairs([matrix(), matrix()]))


def test_a_state_that_an_option_adds_half_way_is_refused() -> None:
    optimizer = torch.optim.RMSprop([matrix()], momentum=0.9)
    before = StandIn(0, torch.float32, (("square_avg", torch.float32),), (("step", torch.tensor(1.0)),))
    with pytest.raises(OptimizerError, match="momentum_buffer"):
        ShadowOptimizer(optimizer).programs([before])


def test_an_update_by_blocks_of_large_parameters_is_not_elementwise() -> None:
    class OfBlocks(Lion):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
            for p in self.param_groups[0]["params"]:
                if p.numel() >= 4096 and p.numel() % 256 == 0:  # as 8-bit optimizers decide it
                    p.sub_((p.grad.view(-1, 256) / p.grad.view(-1, 256).abs().amax(1, keepdim=True)).view_as(p))
                else:
                    p.sub_(p.grad)

    with pytest.raises(NotElementwiseError, match="leaves another parameter in step 1"):
        check_elementwise(OfBlocks([matrix()]))
