"""One graph of forward, loss and backward, whose nodes know where they come from."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.lib.models import CASES, DIM, ROWS, Case, Regression, batches
from tests.lib.runs.training import compare_function, differences, train_compiled, train_plain
from zerofx.capture.compat.decompositions import eager_decompositions
from zerofx.capture.trace import capture
from zerofx.errors import ZeroFXWarning
from zerofx.ir.batch import Batch
from zerofx.ir.facts import Origin, Phase, Role, origin, placeholder, source_line
from zerofx.ir.graph import StepGraph
from zerofx.ir.serialise import from_json, to_json
from zerofx.ir.text import target_name
from zerofx.torch_private.capture import fake_mode

MODELS = [
    "gpt",
    "tied",
    "batchnorm",
    "repeated",
    "borrowed",
    "shared module",
    "parametrised",
    "dropout",
    "loss function",
]


def _capture(case: Case, model: nn.Module | None = None) -> StepGraph:
    args, kwargs = next(batches(case, 0, 1))
    return capture(model or case.model(), Batch.from_call(args, kwargs), loss_fn=case.loss_fn)


@functools.cache
def captured(name: str) -> StepGraph:
    """The graph of a case; to be read only."""
    return _capture(CASES[name])


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", [*MODELS, "loss function", "llama", "gpt2"])
def test_every_call_knows_its_module_and_phase(name: str) -> None:
    model = CASES[name].model()
    paths = {path for path, _ in model.named_modules()} | {"", "loss"}
    step = captured(name)
    origins = [node.meta.get("zerofx_origin") for node in step.calls()]
    assert all(isinstance(origin, Origin) and origin.layer in paths for origin in origins)
    phases = [origin.phase for origin in origins if origin is not None]
    assert phases == sorted(phases, key=[Phase.FORWARD, Phase.BACKWARD].index)
    assert set(phases) == {Phase.FORWARD, Phase.BACKWARD}


def test_calls_know_the_users_line_in_forward_and_in_backward_and_after_a_round_trip() -> None:
    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        scale = torch.exp(outputs)
        return (scale * targets).sum()

    x, y = torch.zeros(ROWS, DIM), torch.zeros(ROWS, DIM)
    step = capture(nn.Linear(DIM, DIM), Batch.from_call((x, y), {}), loss_fn=lambda outputs, _x, y: loss_fn(outputs, y))
    again = from_json(to_json(step), replace(step, graph=fx.Graph()), fake_mode())
    for graph in (step, again):
        lines = {node.name: (origin(node).phase, source_line(node)) for node in graph.calls()}
        (exponential,) = [found for name, found in lines.items() if name.startswith("exp") and "expand" not in name]
        where = "test_capture.py, test_calls_know_the_users_line_in_forward_and_in_backward_and_after_a_round_trip"
        assert exponential == (Phase.FORWARD, f"{where}.<locals>.loss_fn: scale = torch.exp(outputs)")
        assert (Phase.BACKWARD, exponential[1]) in lines.values()


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2"])
def test_every_layer_has_forward_and_backward_of_its_own(name: str) -> None:
    step = captured(name)
    found = {(step.unit_of(node), node.meta["zerofx_origin"].phase) for node in step.calls() if step.unit_of(node)}
    assert found == {(unit, phase) for unit in step.units for phase in (Phase.FORWARD, Phase.BACKWARD)}


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_layers_of_one_kind_have_as_many_nodes_each(name: str) -> None:
    step = captured(name)
    counts = {unit: sum(step.unit_of(node) == unit for node in step.calls()) for unit in sorted(step.units)}
    # The sum of two gradients that meet in front of a layer may count with either.
    assert max(counts.values()) - min(counts.values()) <= 2, counts


def test_tied_parameters_are_one_with_one_gradient() -> None:
    step = captured("tied")
    parameters = [placeholder(node).name for node in step.placeholders(Role.PARAMETER)]
    assert parameters.count("embed.weight") == 1 and "head.weight" not in parameters
    assert "embed.weight" in step.gradients and "head.weight" not in step.gradients
    assert next(info for info in step.parameters if info.name == "embed.weight").aliases == (
        "embed.weight",
        "head.weight",
    )


def test_gradients_of_a_parameter_with_three_names_are_summed_as_they_arrive() -> None:
    step = _capture(CASES["t5"])
    order = step.positions()
    total = step.gradients["shared.weight"]
    late = total.args[1]
    inner = total.args[0]
    assert isinstance(late, torch.fx.Node) and isinstance(inner, torch.fx.Node)
    assert target_name(total) == target_name(inner) == "aten.add.Tensor"
    first, second = inner.args
    assert isinstance(first, torch.fx.Node) and isinstance(second, torch.fx.Node)
    assert order[first] < order[second] < order[late]


def test_outputs_of_a_backward_stay_with_it_where_gradients_are_summed() -> None:
    """What would stand between them, such as a collective of ranks that share a sum, would part them."""
    tied = nn.LayerNorm(DIM)
    tied.bias = tied.weight
    for layer, inputs in ((nn.Conv1d(3, 3, 1), torch.zeros(2, 3, 5)), (tied, torch.zeros(2, DIM))):
        twice = nn.Sequential(layer, layer)
        step = capture(twice, Batch.from_call((inputs,), {}), loss_fn=lambda outputs: outputs.square().mean())
        step.graph.lint()
        parts = [node for node in step.calls() if node.target is operator.getitem]
        assert all(node.prev is node.args[0] or node.prev.args[:1] == node.args[:1] for node in parts), step


class Translation(nn.Module):
    """An embedding that is looked up twice under one name, and is the output layer under another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(50, DIM), nn.Transformer(DIM, 2, 1, 1, DIM, dropout=0.0, batch_first=True)
        self.head = nn.Linear(DIM, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        decoded = self.inner(self.embed(source), self.embed(target), tgt_mask=self.mask, tgt_is_causal=True)
        return nn.functional.cross_entropy(self.head(decoded).flatten(0, 1), target.flatten())


def _sentences(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(torch.randint(0, 50, (3, length), generator=generator) for length in (7, 5)), {}


def test_gradients_of_a_parameter_that_one_name_has_two_of_are_summed_as_they_arrive() -> None:
    case = Case(Translation, _sentences)
    assert differences(train_plain(case, 3), train_compiled(case, 3, 3)) == []


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    assert {n for n in _capture(CASES["lora"]).gradients if "base" in n} == set()
    unused = _capture(CASES["unused"])
    assert {n for n in unused.gradients if n.startswith("spare") or n.endswith("extra")} == set()


def test_mutated_buffers_are_outputs_by_name() -> None:
    assert set(_capture(CASES["buffers"]).mutations) == {"count", "mean", "previous"}
    assert _capture(CASES["evaluating"]).mutations == {}


def test_capture_leaves_model_and_random_numbers_alone() -> None:
    case = CASES["buffers"]
    model = case.model()
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    random = torch.get_rng_state()
    _capture(case, model)
    _capture(CASES["dropout"], CASES["dropout"].model().train())
    torch.set_rng_state(random)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor is tensors[name] and torch.equal(tensor, values[name])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not torch.compiler.is_compiling()


class Asking(Regression):
    """Computes the sine where it is compiled, else the cosine, after what a trace may refuse."""

    def __init__(self, before: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear, self.before = nn.Linear(DIM, DIM), before

    def predict(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if torch.compiler.is_compiling():
            return y.sin()
        self.before(y)
        return y.cos()


@pytest.mark.parametrize(
    ("before", "expected"),
    [(Tensor.detach, "cos"), (lambda x: float(x.sum()) > 0, "sin"), (Tensor.nonzero, "sin")],
    ids=["nothing", "a value", "as many as values say"],
)
def test_a_forward_that_asks_is_told_that_it_is_compiled_only_where_it_would_read_values(
    before: Callable[[Tensor], object], expected: str
) -> None:
    text = _capture(CASES["stack"], Asking(before)).text()
    calls = {
        line.split("aten.")[1].split(".")[0] for line in text.splitlines() if "forward" in line and "aten." in line
    }
    assert calls & {"sin", "cos"} == {expected}


def test_a_forward_that_cannot_be_traced_as_in_eager_mode_for_another_reason_warns() -> None:
    with pytest.warns(
        ZeroFXWarning, match=r"found RuntimeError: Cannot access data pointer.*, at\n .*test_capture.py:"
    ):
        assert "aten.sin.default" in _capture(CASES["stack"], Asking(Tensor.data_ptr)).text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grouped_products_are_captured_in_all_dtypes_of_their_kernels(dtype: torch.dtype) -> None:
    """Else a forward would be told that it is compiled, and libraries go another way than in eager mode."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 16, 16, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            y = x.sin() if torch.compiler.is_compiling() else x.cos()
            ends = torch.tensor([1, 4], dtype=torch.int32)
            return nn.functional.grouped_mm(y, self.weight, offs=ends).square().mean()

    assert "aten.cos.default" in capture(Grouped(), Batch.from_call((torch.zeros(4, 16, dtype=dtype),), {})).text()


def test_two_captures_of_a_model_are_the_same() -> None:
    assert _capture(CASES["gpt"]).fingerprint() == _capture(CASES["gpt"]).fingerprint()


def test_tensors_outside_parameters_and_buffers_become_constants() -> None:
    class WithConstant(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)
            self.table = [torch.arange(DIM).float()]

        def predict(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.table[0] + torch.tensor([1.0] * DIM)  # type: ignore[no-any-return]  # what calling a module gives is untyped

    step = _capture(CASES["stack"], WithConstant())
    values = [step.constants[placeholder(node).name] for node in step.placeholders(Role.CONSTANT)]
    assert any(torch.equal(value, torch.arange(DIM).float()) for value in values)


def _functions() -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    functional = torch.nn.functional
    yield "dropout", lambda x: functional.dropout(x, 0.15)
    yield "dropout of what is transposed", lambda x: functional.dropout(x.t(), 0.15).t()
    yield "dropout of what overlaps", lambda x: functional.dropout(x[None].expand(3, ROWS, DIM), 0.15).sum(0)
    yield "dropout of everything", lambda x: functional.dropout(x, 1.0)
    yield "dropout in place", lambda x: functional.dropout(x * 1, 0.15, inplace=True)
    yield "alpha dropout", lambda x: functional.alpha_dropout(x, 0.3, training=True)
    yield "alpha dropout of what is transposed", lambda x: functional.alpha_dropout(x.t(), 0.3, training=True).t()
    yield (
        "feature alpha dropout of what is permuted",
        lambda x: functional.feature_alpha_dropout(x.view(2, 2, 2, -1).permute(2, 3, 0, 1), 0.3, training=True),
    )
    yield "leaky slopes", lambda x: functional.rrelu(x.t(), training=True)
    yield "gumbel softmax", lambda x: functional.gumbel_softmax(x.t())
    yield "draws in place", lambda x: x.t() * torch.empty_like(x.t()).bernoulli_(0.4)
    yield "draws elsewhere", lambda x: x.t() * torch.bernoulli(x.detach().t(), 0.4)
    yield "draws with probabilities", lambda x: x.t() * x.detach().t().sigmoid().bernoulli()
    yield "exponentials", lambda x: x.t() + torch.empty_like(x.t()).exponential_()
    yield "normal numbers", lambda x: x.t() + torch.empty_like(x.t()).normal_() + torch.randn_like(x.t())
    yield "feature dropout", lambda x: functional.dropout2d(x[None, None], 0.3)
    yield (
        "attention dropout",
        lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.15),
    )
    yield "noise", lambda x: x + torch.randn_like(x) + torch.rand(DIM) + x.detach().sigmoid().bernoulli()
    yield (
        "a norm of what is transposed",
        lambda x: functional.batch_norm(x.t(), None, None, training=True).t().reshape(-1),
    )
    yield (
        "a loss of what is transposed",
        lambda x: functional.mse_loss(x.view(-1).view(DIM, -1).t(), torch.zeros(ROWS, DIM)),
    )
    yield "bilinear", lambda x: functional.interpolate(x[None, None], scale_factor=2, mode="bilinear")
    yield "bicubic", lambda x: functional.interpolate(x[None, None], size=(7, 5), mode="bicubic")


@pytest.mark.days(3)
@pytest.mark.sweep(11)
@pytest.mark.parametrize("name", [name for name, _ in _functions()])
def test_operators_that_tracing_takes_apart_give_the_bits_of_eager_mode(name: str) -> None:
    assert compare_function(dict(_functions())[name]) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_zeros_that_forward_mode_derivatives_begin_with_have_memory(device: str) -> None:
    def begun(x: Tensor) -> Tensor:
        zeros: Tensor = torch.ops.aten._efficientzerotensor([2, 3], dtype=torch.float64)
        return x + zeros

    traced = make_fx(begun, decomposition_table=eager_decompositions(torch.device(device)), tracing_mode="fake")
    x = torch.randn(2, 3)
    graph: Any = traced(x)
    assert {target_name(node) for node in graph.graph.nodes if node.op == "call_function"} >= {"aten.zeros.default"}
    assert torch.equal(graph(x), x.double())
