"""No operator that draws is run again in backward: it would draw something else than the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zerofx
from tests.lib.models import DIM, Case, Layer, Regression, batches, rows
from tests.lib.runs.training import Trained, build, differences, train_plain
from zerofx.ir.facts import is_random
from zerofx.torch_private.operators import OpOverload, base_name, disable_onednn, is_out, schema_of

aten = torch.ops.aten


def drawing() -> Iterator[OpOverload[..., object]]:
    """The operators of torch that draw from a generator, without those that write into what they are given for it."""
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        packet, _, overload = name.partition(".")
        if namespace == "aten":
            operator = getattr(getattr(aten, packet), overload or "default")
            if torch.Tag.nondeterministic_seeded in operator.tags and not is_out(operator):
                yield operator


def _recurrent(name: str, gates: int) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        weights = [x.new_full((gates * DIM, DIM), 0.1) for _ in range(4)]
        states = [x.new_zeros(2, 1, DIM) for _ in range(2 if name == "lstm" else 1)]
        state = states if name == "lstm" else states[0]
        with disable_onednn():  # its layer rounds otherwise
            return cast(Tensor, getattr(torch, name)(x[None], state, weights, False, 2, 0.5, True, False, True)[0][0])

    return run


def _attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0]


# By the operator's name, of a tensor with a gradient: what is drawn is something that backward needs.
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "_sample_dirichlet": lambda x: x * torch._sample_dirichlet(x.detach().sigmoid()),
    "_scaled_dot_product_attention_math": lambda x: aten._scaled_dot_product_attention_math(x, x, x, None, 0.5)[0],
    "_standard_gamma": lambda x: x * torch._standard_gamma(x.sigmoid()),
    "alpha_dropout": lambda x: torch.alpha_dropout(x, 0.5, True),
    "alpha_dropout_": lambda x: torch.alpha_dropout_(x * 2, 0.5, True),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "binomial": lambda x: x * torch.binomial(torch.full_like(x, 4.0), x.detach().sigmoid()),
    "cauchy": lambda x: x * aten.cauchy(x.detach()).tanh(),
    "cauchy_": lambda x: x * torch.empty_like(x).cauchy_().tanh(),
    "dropout": lambda x: torch.dropout(x, 0.5, True),
    "dropout_": lambda x: torch.dropout_(x * 2, 0.5, True),
    "exponential": lambda x: x * aten.exponential(x.detach()).tanh(),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_().tanh(),
    "feature_alpha_dropout": lambda x: torch.feature_alpha_dropout(x, 0.5, True),
    "feature_alpha_dropout_": lambda x: torch.feature_alpha_dropout_(x * 2, 0.5, True),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.5, True),
    "feature_dropout_": lambda x: torch.feature_dropout_(x * 2, 0.5, True),
    "geometric": lambda x: x * aten.geometric(x.detach(), 0.5).tanh(),
    "geometric_": lambda x: x * torch.empty_like(x).geometric_(0.5).tanh(),
    "gru": _recurrent("gru", 3),
    "log_normal": lambda x: x * aten.log_normal(x.detach()).tanh(),
    "log_normal_": lambda x: x * torch.empty_like(x).log_normal_().tanh(),
    "lstm": _recurrent("lstm", 4),
    "multinomial": lambda x: x.gather(1, torch.multinomial(x.detach().sigmoid(), 2)).sin().sum(1, keepdim=True) * x,
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "normal": lambda x: x * torch.normal(x.detach(), 1.0),
    "normal_": lambda x: x * torch.empty_like(x).normal_(),
    "normal_functional": lambda x: x * aten.normal_functional(x.detach()),
    "poisson": lambda x: x * torch.poisson(x.detach().exp()).tanh(),
    "rand": lambda x: x * torch.rand(x.shape),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randint": lambda x: x * torch.randint(0, 5, x.shape),
    "randint_like": lambda x: x * torch.randint_like(x, 5),
    "randn": lambda x: x * torch.randn(x.shape),
    "randn_like": lambda x: x * torch.randn_like(x),
    "random": lambda x: x * aten.random(x.detach(), 5),
    "random_": lambda x: x * torch.empty_like(x).random_(5),
    "randperm": lambda x: x[:, torch.randperm(DIM)].sin() * x,
    "rnn_relu": _recurrent("rnn_relu", 1),
    "rnn_tanh": _recurrent("rnn_tanh", 1),
    "rrelu": lambda x: torch.rrelu(x, training=True),
    "rrelu_": lambda x: torch.rrelu_(x * 2, training=True),
    "rrelu_with_noise": lambda x: aten.rrelu_with_noise(x, torch.empty_like(x), training=True),
    "rrelu_with_noise_": lambda x: aten.rrelu_with_noise_(x * 2, torch.empty_like(x), training=True),
    "scaled_dot_product_attention": _attention,
    "uniform": lambda x: x * aten.uniform(x.detach()),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(),
}

_NOT_ON_CPUS = {
    "_cudnn_attention_backward",
    "_cudnn_attention_forward",
    "_cudnn_init_dropout_state",
    "_cudnn_rnn",
    "_efficient_attention_forward",
    "_fill_mem_eff_dropout_mask_",
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
    "_fused_dropout",
    "_fused_sdp_choice",
    "_lstm_mps",
    "_nested_tensor_softmax_with_shape",
    "_scaled_dot_product_attention_math_for_mps",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",  # without dropout alone
    "_scaled_dot_product_fused_attention_overrideable",
    "_triton_scaled_dot_attention",
    "lstm_mps_backward",
    "miopen_rnn",
    "rrelu_with_noise_functional",  # which has no kernel: tracing makes it of the one with an underscore
}


class Drawing(Regression):
    """Layers with a draw behind each."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.draw = nn.ModuleList(Layer() for _ in range(3)), draw

    def predict(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.draw(layer(x)).sin()
        return x


def test_all_operators_that_draw_are_tried() -> None:
    names = {base_name(operator) for operator in drawing()}
    assert names - DRAWS.keys() - _NOT_ON_CPUS == set()
    assert len(names) > 60


@pytest.mark.days(3)
@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", DRAWS)
def test_what_is_computed_again_draws_nothing(name: str) -> None:
    case = Case(lambda: Drawing(DRAWS[name]), rows)
    model = build(case)
    torch.manual_seed(0)
    step = zerofx.compile(model, case.optimizer(model), 0, recompute="full", backend="eager")
    losses = [step(*args, **kwargs).clone() for args, kwargs in batches(case, 0, 3)]
    assert step.plan.recomputes
    assert differences(train_plain(case, 3), Trained(losses, step.full_state_dict())) == []


def test_every_operator_that_draws_is_known_as_one() -> None:
    graph = fx.Graph()
    for operator in drawing():
        has_rate = any(argument.name == "dropout_p" for argument in schema_of(operator).arguments)
        node = graph.call_function(operator, (), {"dropout_p": 0.5} if has_rate else {})
        assert is_random(node), operator
