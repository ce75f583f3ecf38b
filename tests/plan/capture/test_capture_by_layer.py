"""A deep model is captured from four of its layers, to the last name; one whose layers differ is captured whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt import GPT
from tests.lib.models import DIM, ROWS, Adapted, Layer, Regression, adamw
from zerofx.capture.by_layer import by_layer
from zerofx.capture.by_layer.by_layer import capture_by_layer
from zerofx.capture.by_layer.repeats import find_repeats
from zerofx.capture.trace import capture
from zerofx.capture.traceable import Forward
from zerofx.driver.plan_only import plan
from zerofx.ir.batch import Batch
from zerofx.ir.casts import Casts
from zerofx.ir.facts import origin
from zerofx.ir.graph import StepGraph

DEPTH = 15
FEATURES = (torch.zeros(ROWS, DIM), torch.zeros(ROWS, DIM))
IDS = (torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))


def compare(model: nn.Module, batch: tuple[Tensor, ...] = FEATURES, **options: Any) -> str:
    """Capture both ways, which has to give the same, and the model left as it was; returns what was said."""
    said: list[str] = []
    before = [(name, id(module)) for name, module in model.named_modules()]
    found = capture_by_layer(Forward(model, Batch.from_call(batch, {}), **options), say=said.append)
    assert [(name, id(module)) for name, module in model.named_modules()] == before
    check_equal(found, capture(model, Batch.from_call(batch, {}), **options))
    (text,) = said
    return text


def check_equal(found: StepGraph, expected: StepGraph) -> None:
    assert found.text() == expected.text()
    assert found.mutation_names == expected.mutation_names
    assert found.gradient_names == expected.gradient_names
    assert (found.parameters, found.units, found.device) == (expected.parameters, expected.units, expected.device)
    values = [[str(node.meta["val"]) for node in step.calls()] for step in (found, expected)]
    assert values[0] == values[1]


class Deep(Regression):
    """``DEPTH`` layers, and what a subclass makes of them."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(depth))

    def predict(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = self.run(index, layer, x)
        return x

    def run(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        out = layer(x)
        assert isinstance(out, Tensor)
        return out


class Residual(nn.Module):
    """A convolution with batch normalisation, dropout, and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.1)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.activation(self.dropout(self.norm(self.convolution(x))) + x)
        assert isinstance(out, Tensor)
        return out


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.body = nn.Sequential(*(Residual() for _ in range(DEPTH)))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.stem(x)).mean((2, 3))), y)


class Crossing(nn.Module):
    """A layer that reads what an encoder has made, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        gate = torch.sigmoid(self.own(x) + self.key(memory))
        return torch.addcmul(x, gate, self.value(memory))


class EncoderDecoder(nn.Module):
    def __init__(self, encoder: int, decoder: int) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Layer() for _ in range(encoder))
        self.decoder = nn.ModuleList(Crossing() for _ in range(decoder))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        memory = x
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return F.mse_loss(x, y)


@pytest.mark.days(3)
def test_a_gpt_with_tied_embeddings() -> None:
    assert compare(GPT(11, 8, DEPTH, 2, 4), IDS) == f"captured 4 of {DEPTH} layers of layers"


def test_convolutions_with_buffers_and_dropout() -> None:
    images = (torch.zeros(2, 3, 6, 6), torch.zeros(2, dtype=torch.long))
    assert compare(Convolutions(), images) == f"captured 4 of {DEPTH} layers of body"


@pytest.mark.slow
def test_an_encoder_and_a_decoder_of_different_depths() -> None:
    said = compare(EncoderDecoder(23, 27))
    assert said == "captured 4 of 27 layers of decoder, captured 4 of 23 layers of encoder"


def test_layers_with_frozen_parameters() -> None:
    assert compare(Deep(Adapted)) == f"captured 4 of {DEPTH} layers of layers"


def test_functions_with_a_backward_in_python() -> None:
    assert compare(Custom()) == f"captured 4 of {DEPTH} layers of layers"


@pytest.mark.days(3)
def test_precision_micro_batches_and_a_loss_function() -> None:
    assert "captured 4" in compare(Deep(), compute_dtype=torch.bfloat16, num_micro_batches=2)
    plain = nn.Sequential(*(Layer() for _ in range(DEPTH)))
    assert "captured 4" in compare(plain, loss_fn=lambda out, x, y: F.mse_loss(out, y))


def test_modules_that_keep_float32() -> None:
    for kept, said in ((nn.LayerNorm, "captured 4 of"), ("layers.7", "captured layer by layer: NotRepeatedError")):
        model = Deep()
        assert said in compare(model, compute_dtype=Casts.from_model(model, torch.bfloat16, (kept,)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=19, hidden_size=8, intermediate_size=16, num_hidden_layers=DEPTH, num_attention_heads=2,
            num_key_value_heads=1, use_cache=False, tie_word_embeddings=True,
        )  # fmt: skip
        model: nn.Module = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            vocab_size=19, n_positions=8, n_embd=8, n_layer=DEPTH, n_head=2, use_cache=False, bos_token_id=None,
            eos_token_id=None,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.ones(2, 5, dtype=torch.long)
    said: list[str] = []
    batch = Batch.from_call((), {"input_ids": ids, "labels": ids})
    check_equal(capture_by_layer(Forward(model, batch), say=said.append), capture(model, batch))
    assert said[0].startswith(f"captured 4 of {DEPTH} layers of ")


class Tapped(Deep):
    """What one of the layers makes is used again at the end."""

    def predict(self, x: Tensor) -> Tensor:
        kept = x
        for index, layer in enumerate(self.layers):
            x = layer(x)
            kept = x if index == 8 else kept
        return x + kept


class Scaled(Deep):
    """One layer's result is multiplied by something else."""

    def run(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        return super().run(index, layer, x) * (0.5 if index == 8 else 1.0)


class Dropping(Deep):
    """Dropout grows with depth."""

    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(self.layers):
            layer.register_module("dropout", nn.Dropout(0.01 * index))
            layer.register_forward_hook(lambda layer, _, out: layer.dropout(out))


class Collected(Deep):
    """All layers' results are stacked."""

    def predict(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return torch.stack(found).mean(0)


class Counted(Deep):
    """A layer is asked for by its number."""

    def predict(self, x: Tensor) -> Tensor:
        for index in range(DEPTH):
            x = self.layers[index](x)
        return x


class Widened(Deep):
    """A layer in the middle has another size inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[7] = Layer(inner=17)


class Unfrozen(Deep):
    """A layer in the middle is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[7].requires_grad_(False)


class Gated(torch.autograd.Function):
    """Multiplies by a weight, whose gradient is left out; the gradient of ``x`` is multiplied by a factor, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, settings: Settings) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.settings = weight, settings
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradients[0] * ctx.weight * ctx.settings.factor, x * ctx.settings.scale, None


class Settings:
    """What a function's backward finds on its context: a number, and a tensor of the model's."""

    def __init__(self, factor: float, scale: Tensor, note: object = None) -> None:
        self.factor, self.scale, self.note = factor, scale, note


class Custom(Deep):
    """A function with a backward of its own, whose context has objects: ``factor`` and ``note`` in that of layer 8,
    and of the layer ``other`` a tensor."""

    def __init__(self, factor: float = 0.5, note: object = None, other: int = 8) -> None:
        super().__init__()
        for index, layer in enumerate(self.layers):
            source = self.layers[other] if index == 8 else layer
            given = (factor, source, note) if index == 8 else (0.5, source, None)
            layer.register_forward_hook(partial(self.gate, given))

    @staticmethod
    def gate(given: tuple[float, nn.Module, object], layer: nn.Module, _: object, out: Tensor) -> Tensor:
        factor, source, note = given
        assert isinstance(source, Layer) and isinstance(layer, Layer)
        settings = Settings(factor, source.down.bias * 2, note)
        found = Gated.apply(out, layer.down.bias, settings)  # type: ignore[no-untyped-call]  # torch's
        assert isinstance(found, Tensor)
        return found


def closing_over(factor: float) -> type[torch.autograd.Function]:
    """A function whose backward has a number that no context tells of."""

    class Scaling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * factor

    return Scaling


class Closing(Deep):
    """The backward of layer 8 has another factor, which is in its closure alone."""

    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(self.layers):
            function = closing_over(0.25 if index == 8 else 0.5)
            layer.register_forward_hook(lambda _, __, out, function=function: function.apply(out))


class Hooked(Deep):
    """A hook on one layer's result changes its gradient."""

    def run(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        x = super().run(index, layer, x)
        if index == 8:
            x.register_hook(lambda gradient: gradient * 2)
        return x


class Remembering(Deep):
    """A tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones(DIM)

    def run(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        return super().run(index, layer, x) * self.factor


@pytest.mark.days(3)
@pytest.mark.parametrize(
    "model",
    [
        Tapped, Scaled, Dropping, Collected, Counted, Widened, Unfrozen, Closing, Hooked, Remembering,
        partial(Custom, factor=0.25), partial(Custom, note=torch.relu), partial(Custom, other=3),
    ],
)  # fmt: skip
def test_layers_that_differ_are_captured_one_by_one(model: Callable[[], nn.Module]) -> None:
    said: list[str] = []
    found = capture_by_layer(Forward(model(), Batch.from_call(FEATURES, {})), say=said.append)
    assert said[0].startswith("captured layer by layer: ") and len(said[0]) > 30
    layers = {origin(node).layer.partition(".norm")[0] for node in found.calls()}
    assert layers >= {f"layers.{index}" for index in range(DEPTH)}


def test_few_layers_or_shared_ones_are_no_repeats() -> None:
    shared = Deep()
    shared.layers[3] = shared.layers[9]
    tied = Deep()
    first = tied.layers[0]
    for layer in tied.layers:
        assert isinstance(layer, Layer) and isinstance(first, Layer)
        layer.up.weight = first.up.weight
    assert [find_repeats(model) for model in (Deep(depth=9), shared, tied)] == [(), (), ()]
    assert [repeat.path for repeat in find_repeats(Deep())] == ["layers"]


def test_a_model_that_fails_is_left_as_it_was() -> None:
    model = Deep()
    layers = list(model.layers)
    model.layers[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(ValueError("no")))
    with pytest.raises(Exception, match="no"):
        capture_by_layer(Forward(model, Batch.from_call(FEATURES, {})))
    assert list(model.layers) == layers and all(not parameter.is_meta for parameter in model.parameters())


@pytest.mark.days(3)
def test_the_step_is_the_same_and_says_how_it_was_captured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def source() -> str:
        torch.manual_seed(0)
        model = GPT(11, 8, DEPTH, 2, 4)
        return plan(model, adamw(model), IDS, world_size=2).lowered.emitted.source

    monkeypatch.setenv("ZEROFX_DEBUG", "1")
    stamped = source()
    assert f"captured 4 of {DEPTH} layers of layers" in capsys.readouterr().err
    monkeypatch.setenv("ZEROFX_DISABLE", "stamp")
    assert source() == stamped
    assert "captured 4" not in capsys.readouterr().err


def test_what_is_stamped_out_is_checked_where_all_is(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = capture(Deep(depth=16), Batch.from_call(FEATURES, {}))
    monkeypatch.setattr(by_layer, "_stamp_layers", lambda *_: whole)
    with pytest.raises(AssertionError, match="stamped"):
        capture_by_layer(Forward(Deep(), Batch.from_call(FEATURES, {})), check=True)
