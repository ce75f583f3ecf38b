"""Weights in few bits between steps: shown, saved, loaded, evaluated, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.models import batches, tokens
from tests.lib.models.cases import Case
from tests.lib.models.low_bits import Flat, LowBits, Stateful, Tuned, flat, stateful
from tests.lib.runs.low_bits import MAKERS, OF_LIBRARIES, build, need, optimizer_of, unlike_eager_mode, values_of

KINDS = ["flat", "stateful", *OF_LIBRARIES]


def _batch() -> tuple[Tensor, ...]:
    (args, _), *_ = batches(Case(nn.Identity, tokens), 0, 1)
    x, y = args
    return x, y


def _step(model: nn.Module, **options: Any) -> zerofx.Step:
    return zerofx.compile(model, optimizer_of(model), backend="eager", **options)


@pytest.mark.days(3)
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_trains_adapters_like_eager_mode(kind: str) -> None:
    need(kind)
    assert unlike_eager_mode(kind, {"stage 3": {"stage": 3}, "micro-batches": {"stage": 0, "accumulate": 2}}) == {}


@pytest.mark.parametrize("kind", ["flat", "bitsandbytes", "bitsandbytes, double"])
def test_so_it_does_in_bfloat16(kind: str) -> None:
    need(kind)
    assert unlike_eager_mode(kind, {"stage 3": {"stage": 3}}, low=True) == {}


@pytest.mark.parametrize("kind", ["flat", "stateful"])
def test_scales_keep_their_dtype_whatever_is_computed_in(kind: str) -> None:
    model = build(kind)
    step = _step(model, precision="bf16")
    step(*_batch())
    kinds = {bucket.compute_dtype.removeprefix("torch.") for bucket in step.plan.buckets if bucket.group is None}
    assert kinds == {"uint8", "float32", "bfloat16"}  # codes, scales, norms


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_brings_codes_scales_and_tables(kind: str, tmp_path: Path) -> None:
    need(kind)
    model, batch = build(kind), _batch()
    step = _step(model)
    step(*batch)
    step.save_checkpoint(tmp_path / "saved")
    torch.manual_seed(99)
    other: nn.Module = Tuned(MAKERS[kind])
    resumed = _step(other, stage=1)
    if kind.endswith("double"):  # whose offsets are numbers in a file
        with pytest.raises(zerofx.CheckpointError, match=r"quantised as this one is|of another shape"):
            resumed.load_checkpoint(tmp_path / "saved")
        other = build(kind)
        resumed = _step(other, stage=1)
    resumed.load_checkpoint(tmp_path / "saved")
    torch.manual_seed(5)
    expected = step(*batch)
    torch.manual_seed(5)
    assert torch.equal(resumed(*batch), expected)
    step.close()
    resumed.close()
    values = values_of(model)
    assert values.keys() == values_of(other).keys()
    assert [name for name, value in values_of(other).items() if not torch.equal(value, values[name])] == []


@pytest.mark.days(3)
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_may_be_given_all_parameters(kind: str, tmp_path: Path) -> None:
    need(kind)
    batch, models = _batch(), [build(kind) for _ in range(2)]
    expected, step = _step(models[0]), _new_step_of_all(models[1])
    for _ in range(2):
        losses = []
        for trained in (expected, step):
            torch.manual_seed(5)
            losses.append(trained(*batch))
        assert torch.equal(*losses)
    step.save_checkpoint(tmp_path / "saved")
    resumed = _new_step_of_all(build(kind))
    resumed.load_checkpoint(tmp_path / "saved")
    for trained in (step, resumed):
        torch.manual_seed(5)
        trained(*batch)
    assert resumed.optimizer.state_dict()["param_groups"] == step.optimizer.state_dict()["param_groups"]
    step.close()
    resumed.close()


def _new_step_of_all(model: nn.Module) -> zerofx.Step:
    return zerofx.compile(model, torch.optim.AdamW(model.parameters(), 0.01, foreach=False), backend="eager")


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_computes_as_training_does(kind: str) -> None:
    need(kind)
    model, batch = build(kind), _batch()
    expected = model.train(False)(*batch) if "bitsandbytes" not in OF_LIBRARIES.get(kind, ()) else None
    model.train()
    step = _step(model)
    step.prepare(*batch)
    with step.full_parameters():
        before = values_of(model)
    model.train(False)
    loss = step.evaluate(*batch)
    assert expected is None or torch.equal(loss, expected)
    with step.full_parameters():
        assert all(torch.equal(value, before[name]) for name, value in values_of(model).items())


def _repack(model: nn.Module) -> None:
    """What a library may do to a weight that is evaluated: another order of codes, other scales."""
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(weight, Stateful):
            weight.data = weight.data.t().contiguous()
            weight.state.scales.of_blocks = weight.state.scales.of_blocks.bfloat16()
            weight.state.kind = "packed"


def test_what_an_evaluation_does_to_a_weight_is_put_back() -> None:
    model, batch = build("stateful"), _batch()
    reference, other = build("stateful"), _step(model)
    expected = _step(reference)
    torch.manual_seed(5)
    losses = [expected(*batch).clone() for _ in range(2)]
    torch.manual_seed(5)
    found = [other(*batch).clone()]
    with other.full_parameters():
        _repack(model)
    found.append(other(*batch).clone())
    assert losses == found
    with (
        pytest.raises(zerofx.UsageError, match="to have the parts that they had"),
        other.full_parameters(write_back=True),
    ):
        _repack(model)
    torch.manual_seed(6)
    last = expected(*batch)
    torch.manual_seed(6)
    assert torch.equal(other(*batch), last)


def test_a_parameter_that_an_evaluation_replaces_is_put_back() -> None:
    model, batch = build("stateful"), _batch()
    step = _step(model)
    step(*batch)
    before = dict(model.named_parameters())
    with step.full_parameters():
        model(*batch)  # whose layers have another parameter of the same memory then
        assert [name for name, parameter in model.named_parameters() if parameter is not before[name]] != []
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    step(*batch)
    step.close()


class _Casting(LowBits):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def test_a_forward_that_casts_a_weight_in_few_bits_is_refused() -> None:
    model = Tuned(lambda out, inside: _Casting(stateful(out, inside).weight))  # type: ignore[arg-type]  # no module
    with pytest.raises(zerofx.CaptureError, match=r"Stateful\.to\(torch\.float32\): do so before zerofx\.compile"):
        _step(model)(*_batch())


@pytest.mark.parametrize("kind", ["flat", "stateful", "bitsandbytes", "bitsandbytes, double", "nf4"])
def test_weights_that_are_made_and_quantised_without_memory_train_as_any(kind: str) -> None:
    need(kind)
    with zerofx.empty_init():
        model = build(kind)
    losses = []
    for trained in (build(kind), model):  # the first is quantised by tables that the library may have from the second
        step = _step(trained)
        torch.manual_seed(5)
        losses.append([step(*_batch()) for _ in range(2)])
        step.close()
    assert losses[0] == losses[1]
    values = values_of(model)
    assert [n for n, value in values_of(trained).items() if not torch.equal(value, values[n])] == []


class _Rounded(Flat):
    """Is updated by rounding at random."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.zeros_like.default:
            return torch.zeros(args[0].shape)
        if func is torch.ops.aten.add_.Tensor:
            args[0].codes.add_(torch.rand(args[0].shape).round().byte())
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Wrapper(Flat):
    """Is one plain tensor, and has no table."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes"], self.dtype


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Flat, "codes have none. Call requires_grad_"),
        (_Rounded, "rounds at random in each update, and .* Keep its layer in 16 or 32 bits.*; or call requires_grad_"),
        (_Wrapper, "it is one plain tensor, .* Have a module compute so with a plain parameter.*; or call requires_"),
    ],
)
def test_a_trained_parameter_of_parts_is_refused(kind: type[Flat], why: str) -> None:
    def make(out: int, inside: int) -> nn.Module:
        layer = flat(out, inside)
        of: Any = layer.weight
        codes = of.scales.new_ones(out, inside) if kind is _Wrapper else of.codes
        layer.weight = nn.Parameter(kind(codes, of.scales, of.table, torch.float32))
        return layer

    model = Tuned(make)
    before = torch.get_rng_state()
    with pytest.raises(zerofx.UsageError, match=rf"to be frozen, found that layers\.0\.up\.base\.weight, a .*{why}"):
        zerofx.compile(model, optimizer_of(model), backend="eager")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("int8_weight_only_quantized_training", "rounds at random in each update"),
        ("int8_mixed_precision_training", "it is one plain tensor"),
        ("bitnet_training", "it is one plain tensor"),
    ],
)
def test_why_weights_that_torchao_trains_are_refused(kind: str, why: str) -> None:
    training = pytest.importorskip("torchao.prototype.quantized_training")
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1))
    quantization.quantize_(model, getattr(training, kind)())
    with pytest.raises(zerofx.UsageError, match=why):
        zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager", loss_fn=Tensor.mean)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # which draws, in eager mode, just where that is the reason
    model(torch.randn(4, 32)).mean().backward()
    before = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), before) == (why == "it is one plain tensor")


def test_weights_from_files_are_refused(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = build("stateful")
    safetensors.save_file({"head.bias": torch.zeros(19)}, tmp_path / "model.safetensors")
    with pytest.raises(zerofx.UsageError, match=r"plain parameters, or in 4 bits .* in few bits"):
        _step(model, weights=tmp_path)(*_batch())


@pytest.mark.filterwarnings("ignore")  # of transformers and peft, of themselves
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_of_transformers_in_four_bits_with_adapters_of_peft(double: bool, dora: bool, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    quantised = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip

    def load() -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", quantization_config=quantised, dtype=torch.bfloat16, device_map={"": "cpu"}
        )
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=dora)
        return peft.get_peft_model(model.requires_grad_(False), lora).train()

    batch = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(2))
    eager, model = load(), load()
    optimizer, step = optimizer_of(eager), _step(model)
    torch.manual_seed(3)
    expected = []
    for _ in range(3):
        loss = eager(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.detach())
    torch.manual_seed(3)
    assert [step(input_ids=batch, labels=batch).clone() for _ in range(3)] == expected
    found, whole = step.full_state_dict(), eager.state_dict()
    assert found.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(found[name], whole[name])] == []
    step.close()
    merged, by_eager = model.merge_and_unload(), eager.merge_and_unload()
    assert merged.state_dict().keys() == by_eager.state_dict().keys()
    assert all(torch.equal(value, merged.state_dict()[name]) for name, value in by_eager.state_dict().items())
