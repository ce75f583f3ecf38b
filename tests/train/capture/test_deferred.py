"""Tensors that do not exist have the values that they would have: whatever is done to them, and in whatever order."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import zerofx
from zerofx import UsageError
from zerofx.deferred import DeferredTensor
from zerofx.scheduler.cost.cpu.peaks import CpuPeak


def made(tensor: Tensor) -> Tensor:
    """The values of a deferred tensor."""
    assert isinstance(tensor, DeferredTensor)
    return tensor.materialise()


def drawn_in_many_ways() -> list[Tensor]:
    base = torch.empty(5, 7).uniform_(-1, 1)
    base[1].normal_(std=3.0)
    base.t()[2:4].exponential_()
    short = torch.randn(3)
    permuted = torch.randperm(11)
    masked = torch.bernoulli(torch.full((4, 4), 0.3)) * torch.rand(4, 4).mul_(2)
    own = torch.randn(6, generator=torch.Generator().manual_seed(7))
    chosen = torch.multinomial(torch.rand(9), 4)
    return [base, short, permuted, masked, own, chosen, torch.randint(9, (3,)), torch.normal(torch.zeros(4), 2.0)]


def of_other_tensors() -> list[Tensor]:
    weight = torch.empty(6, 4)
    nn.init.kaiming_uniform_(weight)
    copied = weight.clone()
    nn.init.normal_(weight)
    norms = weight.norm(dim=1)
    weight.mul_(2)
    table = 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8)
    outside = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    outside.add_(1)
    return [weight, copied, norms, table, torch.outer(table, norms[:3]), outside, torch.tril(torch.ones(3, 3)).bool()]


def of_its_values() -> list[Tensor]:
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
    weight = torch.randn(8, 8)
    if weight.max() > 1:
        weight.clamp_(max=1.0)
    found = torch.nonzero(weight > 0)
    weight[found[:, 0], found[:, 1]] = 0.5
    return [torch.full((2,), rates[2]), weight, found, torch.tensor(weight.sum(0).tolist())]


def of_modules() -> list[Tensor]:
    embedding, attention, recurrent = nn.Embedding(5, 3, padding_idx=1), nn.MultiheadAttention(8, 2), nn.LSTM(4, 5)
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(5, 7)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
        nn.BatchNorm1d(7),
        attention,
        recurrent,
        embedding,
        nn.Conv2d(2, 3, 3),
        nn.TransformerEncoderLayer(8, 2, 8),
    )
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's overloads lack it
    nn.init.orthogonal_(embedding.weight)
    nn.init.trunc_normal_(attention.in_proj_weight)
    nn.init.sparse_(recurrent._parameters["weight_ih_l0"], 0.3)  # type: ignore[arg-type]  # a parameter, which may be None by its type
    return [*model.parameters(), *model.buffers()]


def of_converted_modules() -> list[Tensor]:
    linear = nn.Linear(3, 4)
    model = copy.deepcopy(nn.Sequential(linear, nn.BatchNorm1d(4))).to(torch.bfloat16)
    linear.bias.data = torch.zeros(4, dtype=torch.bfloat16)
    linear.weight.data.mul_(3)
    return [*linear.parameters(), *model.double().parameters(), *model.buffers()]


def of_another_default_dtype() -> list[Tensor]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        layer = nn.Linear(3, 2)
        return [*layer.parameters(), torch.ones(3), torch.arange(3) * 0.1, torch.full((2,), 0.1), torch.randn(4)]
    finally:
        torch.set_default_dtype(default)


PROGRAMS = [
    of_another_default_dtype,
    drawn_in_many_ways,
    of_other_tensors,
    of_its_values,
    of_modules,
    of_converted_modules,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_values_are_those_of_a_normal_construction(program: Callable[[], list[Tensor]]) -> None:
    expected = program()
    after = torch.rand(3)
    torch.manual_seed(0)
    with zerofx.empty_init():
        found = program()
    assert torch.equal(torch.rand(3), after), "the generator goes on as if tensors had been made"
    for one, other in reversed(list(zip(expected, found, strict=True))):
        assert isinstance(other, DeferredTensor)
        assert (other.shape, other.stride(), other.dtype) == (one.shape, one.stride(), one.dtype)
        assert other.requires_grad == one.requires_grad and isinstance(other, nn.Parameter) == isinstance(
            one, nn.Parameter
        )
        for _ in range(2):
            again = made(other)
            assert type(again) is Tensor and torch.equal(again, one) and again.stride() == one.stride()


def test_making_values_leaves_the_generator_alone() -> None:
    with zerofx.empty_init():
        weight = torch.randn(20)
    before = torch.get_rng_state()
    made(weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_changes_after_the_block_are_kept() -> None:
    with zerofx.empty_init():
        layer = nn.Linear(3, 3)
    held = layer.weight
    nn.init.eye_(layer.weight)
    layer.to(torch.bfloat16)
    copied = copy.deepcopy(layer)
    layer.weight.data.mul_(2)
    assert layer.weight is held and isinstance(held, nn.Parameter) and held.dtype == torch.bfloat16
    assert isinstance(copied.weight, DeferredTensor) and isinstance(copied.weight, nn.Parameter)
    assert made(held).equal(2 * torch.eye(3, dtype=torch.bfloat16))
    assert made(copied.weight).equal(torch.eye(3, dtype=torch.bfloat16))


def test_real_data_makes_a_parameter_real() -> None:
    with zerofx.empty_init():
        layer = nn.Linear(3, 3)
    held = layer.weight
    vars(held)["note"] = "kept"
    held.data = torch.ones(3, 3)
    assert layer.weight is held and type(held) is nn.Parameter and held.equal(torch.ones(3, 3)) and held.requires_grad
    assert vars(held)["note"] == "kept"


def test_tensors_on_meta_stay_there() -> None:
    with zerofx.empty_init():
        assert type(torch.empty(3, device="meta")) is Tensor
        with torch.device("meta"):
            assert type(torch.ones(3)) is Tensor


def test_what_comes_from_outside_is_used_as_it_is() -> None:
    table = torch.arange(4.0)
    with zerofx.empty_init():
        assert type(table + 1) is Tensor
        weight = torch.zeros(4).add_(table)
    assert made(weight).equal(table)
    table.add_(1)
    with pytest.raises(UsageError, match=r"found one of shape \[4\] changed in place since: clone\(\) it"):
        made(weight)


def test_what_cannot_be_recorded_is_refused() -> None:
    table = torch.zeros(4)
    with zerofx.empty_init():
        weight = torch.ones(4)
        with pytest.raises(UsageError, match=r"found aten.copy_.default into a real tensor of shape \[4\]"):
            table.copy_(weight)
        with pytest.raises(UsageError, match=r"numpy\(\) called on it"):
            weight.numpy()
        with pytest.raises(UsageError, match=r"found aten.unsqueeze_.default changing them in place"):
            weight.unsqueeze_(0)
    with pytest.raises(UsageError, match="found that they are deferred"):
        pickle.dumps(weight)
    assert table.equal(torch.zeros(4))
    assert repr(weight) == "<deferred tensor of shape [4], torch.float32, on cpu>"


def test_a_table_that_outlives_the_model_computes_with_what_is_real() -> None:
    with zerofx.empty_init():
        table, weight = torch.tensor([1.0, 2.0]).double(), torch.ones(2)
        changed = torch.tensor([1.0, 2.0]).mul_(weight)
    real = torch.ones(2)
    for other, kind in ((table, Tensor), (weight, DeferredTensor), (changed, DeferredTensor)):
        assert type(real + other) is kind
    assert (real + table).equal(torch.tensor([2.0, 3.0]).double()) and made(real + changed).equal(
        torch.tensor([2.0, 3.0])
    )
    table.mul_(real)  # is part of the recipe, as ever
    assert type(real + table) is DeferredTensor and made(table).equal(torch.tensor([1.0, 2.0]).double())


class Tagged(nn.Parameter):
    """A parameter with an attribute, which makes itself of memory as many libraries' do."""

    tag: str

    @staticmethod
    def __new__(cls, data: Tensor, tag: str) -> Tagged:
        tagged: Tagged = Tensor._make_subclass(cls, data, False)
        tagged.tag = tag
        return tagged


def test_a_class_may_make_itself_of_a_deferred_tensor() -> None:
    with zerofx.empty_init():
        inside = Tagged(torch.randn(3, 2), "inside")
        weight = torch.randn(4)
    for tagged, tag in ((inside, "inside"), (Tagged(weight, "after"), "after"), (copy.deepcopy(inside), "inside")):
        assert isinstance(tagged, Tagged) and isinstance(tagged, DeferredTensor) and tagged.tag == tag
        assert not tagged.requires_grad
    inside.data = torch.ones(5)
    assert type(inside) is Tagged and inside.equal(torch.ones(5)) and inside.tag == "inside"


def test_what_was_overwritten_is_not_made() -> None:
    with zerofx.empty_init():
        weight = torch.empty(100)
        for _ in range(5):
            weight.normal_()
        seen = weight.sum()
        weight.zero_()
    assert isinstance(weight, DeferredTensor) and isinstance(seen, DeferredTensor)
    names = [str(one.function) for one in weight.recipe.cell.operations]
    assert names == ["aten.empty.memory_format", "aten.normal_.default", "aten.zero_.default"]
    torch.manual_seed(0)
    for _ in range(5):
        expected = torch.randn(100)
    assert made(seen).equal(expected.sum()) and made(weight).equal(torch.zeros(100))


def test_one_tensor_at_a_time_is_in_memory() -> None:
    def build() -> nn.Module:
        with zerofx.empty_init():
            return nn.Sequential(*(nn.Linear(128, 128) for _ in range(10)))

    build()
    with CpuPeak() as peak:
        model = build()
    one = 128 * 128 * 4
    states = 20 * 5056  # of the generator, before each of the 20 random operations
    assert one < peak.num_bytes < one + states + 4096
    with CpuPeak() as peak:
        for parameter in model.parameters():
            made(parameter)
    assert one <= peak.num_bytes < one + 3 * 5056
