"""Parameters whose values a step holds: the user's own objects, of which all but the values can be asked."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.lib.runs.pairs import compile_eager
from tests.lib.users import Tiny, adamw, ids, tiny
from zerofx import ShardedParametersError, Step, ZeroFXWarning
from zerofx.runtime.state.held import allow_reads, hold, release

Held = Callable[[nn.Parameter], Any]


def _held() -> nn.Parameter:
    parameter = nn.Parameter(torch.randn(4, 3))
    hold([parameter])
    return parameter


def _trained() -> tuple[Tiny, Step]:
    """A model that computes in bfloat16, whose own parameters are held."""
    model = tiny()
    step = compile_eager(model, adamw(model), precision="bf16")
    step(ids(), labels=ids(1))
    return model, step


def _foreach(parameter: nn.Parameter) -> Any:
    return torch._foreach_lerp_([torch.zeros(4, 3)], [parameter.detach()], 0.1)


READ: dict[str, Held] = {
    "a sum": lambda p: p + 1,
    "a sum from the right": lambda p: torch.ones(4, 3) + p,
    "a product": lambda p: torch.ones(2, 4) @ p,
    "a linear layer": lambda p: nn.functional.linear(torch.ones(2, 3), p),
    "an element": lambda p: p[0, 0].item(),
    "a list": lambda p: p.tolist(),
    "an array": lambda p: np.asarray(p.detach()),
    "a norm": lambda p: torch.linalg.vector_norm(p),
    "a norm of many": lambda p: torch._foreach_norm([p]),
    "an average": _foreach,
    "an average in place": lambda p: torch.zeros(4, 3).lerp_(p, 0.1),
    "a copy": lambda p: torch.zeros(4, 3).copy_(p),
    "a clone of what is detached": lambda p: p.detach().clone(),
    "a clone of data": lambda p: p.data.clone(),
    "a deep copy": copy.deepcopy,
    "a pickle": pickle.dumps,
    "a file": lambda p: torch.save(p, io.BytesIO()),
    "another dtype": lambda p: p.double(),
    "a transposed view": lambda p: p.T,
    "a part": lambda p: p.chunk(2),
    "an operator": lambda p: torch.ops.aten.add.Tensor(p, 1),
    "a flat vector": lambda p: nn.utils.parameters_to_vector([p]),
    "equality": lambda p: torch.equal(p, torch.ones(4, 3)),
    "a condition": lambda p: bool((p == p).all()),
}
WRITTEN: dict[str, Held] = {
    "clamped": lambda p: p.data.clamp_(-1, 1),
    "an element": lambda p: p.data.__setitem__(0, 1.0),
    "an initialisation": nn.init.normal_,
    "zero": lambda p: p.detach().zero_(),
    "copied to": lambda p: p.data.copy_(torch.ones(4, 3)),
    "one of many": lambda p: torch._foreach_add_([p.data], [torch.ones(4, 3)]),
    "a result": lambda p: torch.add(torch.ones(4, 3), 1, out=p.data),
    "shared memory": lambda p: p.share_memory_(),
}  # fmt: skip


@pytest.mark.parametrize("use", [*READ.values(), *WRITTEN.values()], ids=[*READ, *(f"w: {name}" for name in WRITTEN)])
def test_whoever_reads_or_writes_values_is_told_what_to_do(use: Held) -> None:
    with pytest.raises(ShardedParametersError, match=r"(?s)parameters are whole.*inside `with step.full_parameters"):
        use(_held())


ASKED: dict[str, Held] = {
    "shape": lambda p: p.shape,
    "size": lambda p: (p.size(), p.size(0), len(p), p.dim(), p.ndim),
    "numbers of elements": lambda p: (p.numel(), torch.numel(p), p.nelement(), p.nbytes, p.element_size()),
    "dtype": lambda p: (p.dtype, p.is_floating_point(), torch.is_complex(p)),
    "device": lambda p: (p.device, p.is_cuda, p.get_device()),
    "gradients": lambda p: (p.requires_grad, p.grad, p.is_leaf, p.grad_fn),
    "a hash": lambda p: hash(p) == id(p),
    "the class": lambda p: (isinstance(p, nn.Parameter), type(p).__name__),
    "others like it": lambda p: (torch.zeros_like(p), torch.ones_like(p), p.new_zeros(2), type(torch.zeros_like(p))),
    "data": lambda p: (p.data.shape, p.detach().dtype),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_what_is_no_value_is_as_ever(ask: Held) -> None:
    parameter = nn.Parameter(torch.randn(4, 3))
    expected = repr(ask(parameter))
    hold([parameter])
    assert repr(ask(parameter)) == expected


def test_a_held_parameter_is_shown_as_one_and_is_what_it_was_once_it_is_given_data() -> None:
    parameter = _held()
    assert repr(parameter) == "Parameter containing:\n<[4, 3] of torch.float32 on cpu, held by a compiled step>"
    assert f"{parameter}" == str(parameter) and parameter.to("cpu") is parameter is parameter.float()
    assert parameter.requires_grad_(False) is parameter and not parameter.requires_grad
    optimizer = torch.optim.AdamW([parameter.requires_grad_()])
    optimizer.zero_grad()
    assert optimizer.state_dict()["param_groups"][0]["params"] == [0]
    with allow_reads([parameter]):
        assert type(parameter) is nn.Parameter
    assert type(parameter) is not nn.Parameter
    parameter.data = torch.ones(4, 3)
    assert type(parameter) is nn.Parameter and parameter.sum() == 12
    hold([parameter])
    hold([parameter])
    release([parameter])
    assert type(parameter) is nn.Parameter


def test_a_class_of_the_users_own_comes_back() -> None:
    class Own(nn.Parameter):
        def twice(self) -> torch.Tensor:
            return 2 * self

    parameter = Own(torch.ones(2))
    hold([parameter])
    assert isinstance(parameter, Own)
    with pytest.raises(ShardedParametersError):
        parameter.twice()
    release([parameter])
    assert type(parameter) is Own and parameter.twice().sum() == 4


def test_a_compiled_model_is_the_users_own_and_is_read_where_it_is_whole() -> None:
    model, step = _trained()
    average = AveragedModel(tiny(), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    own = list(model.parameters())
    with pytest.raises(ShardedParametersError, match="full_parameters"):
        average.update_parameters(model)
    with pytest.raises(ShardedParametersError, match="clamp_"):
        model.head.weight.data.clamp_(-1, 1)
    model.to("cpu")
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(p.numel() for p in tiny().parameters())
    step(ids(), labels=ids(1))
    step(ids(1), labels=ids(1))
    with pytest.warns(ZeroFXWarning, match="another shape"):  # which is captured while parameters are held
        step(torch.cat([ids(), ids()]), labels=torch.cat([ids(1), ids(1)]))
    with step.full_parameters():
        average.update_parameters(model)
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(parameter.isfinite().all() for parameter in average.parameters())
    step.close()
    assert all(map(lambda one, other: one is other, model.parameters(), own))
    assert all(type(parameter) is nn.Parameter and parameter.isfinite().all() for parameter in own)
