"""Weights in 4 bits from files, for models without values: as a library has stored them, or quantised while read."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import batches, tokens
from tests.lib.models.cases import Case
from tests.lib.models.low_bits import Tuned, nf4
from tests.lib.runs.low_bits import MAKERS, optimizer_of, values_of
from tests.lib.runs.training import world
from zerofx import UsageError

KINDS = {"bitsandbytes": False, "bitsandbytes, double": True}


def _packed(double: bool) -> Callable[[int, int], nn.Module]:
    """Layers of bitsandbytes that are not quantised yet."""
    from bitsandbytes.nn import Linear4bit

    return lambda out, inside: Linear4bit(inside, out, bias=False, quant_type="nf4", compress_statistics=double)


def _plain(out: int, inside: int) -> nn.Module:
    return nn.Linear(inside, out, bias=False).requires_grad_(False)


def _saved(folder: Path, how: str, kind: str, **sizes: Any) -> Path:
    """A file of a model's weights: ``"stored"`` in 4 bits, or its own values with layers in 16 or 32."""
    torch.manual_seed(11)
    dtype = torch.float32 if how == "32 bits" else torch.bfloat16
    plain = Tuned(_plain, **sizes).state_dict()
    state = {name: one.to(dtype) if name.endswith("base.weight") else one for name, one in plain.items()}
    if how == "stored":
        model = _loaded(state, kind, **sizes)
        state = model.state_dict()
    save_file({name: one.contiguous() for name, one in state.items()}, folder / f"{how}.safetensors")
    return folder / f"{how}.safetensors"


def _loaded(state: dict[str, Tensor], kind: str, **sizes: Any) -> nn.Module:
    """A model with a file's values, whose weights the library has quantised as a whole."""
    from bitsandbytes.nn import Params4bit

    model = Tuned(MAKERS[kind], **sizes)
    layers = {name: module for name, module in model.named_modules() if name.endswith("base")}
    for name, layer in layers.items():
        values = state[f"{name}.weight"]
        weight = Params4bit(
            values, requires_grad=False, quant_type="nf4", compress_statistics=KINDS[kind], module=layer
        )
        layer.weight = weight.to("cpu")
    model.load_state_dict({name: one for name, one in state.items() if "base" not in name}, strict=False)
    return model


def _without_values(kind: str, **sizes: Any) -> nn.Module:
    with torch.device("meta"):
        return Tuned(_packed(KINDS[kind]), **sizes)


def _inside_empty_init(kind: str) -> nn.Module:
    with zerofx.empty_init():
        return Tuned(_packed(KINDS[kind]))


def _train(model: nn.Module, **options: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    step = zerofx.compile(model, optimizer_of(model), backend="eager", **options)
    rank = 0 if "mesh" in options else world()[0]  # ranks of one computation have the same batch
    torch.manual_seed(rank)
    losses = [step(*args).clone() for args, _ in batches(Case(nn.Identity, tokens), rank, 2)]
    step.close()
    return losses, values_of(model)


def _unlike(expected: tuple[list[Tensor], dict[str, Tensor]], model: nn.Module, **options: Any) -> list[str]:
    """What differs once ``model`` has been trained, from what another has come to."""
    (losses, values), (found, ours) = expected, _train(model, **options)
    wrong = [f"loss {one} for {other}" for one, other in zip(found, losses, strict=True) if not torch.equal(one, other)]
    assert ours.keys() == values.keys()
    for name, one in values.items():
        if ours[name].dtype != one.dtype or not torch.equal(ours[name], one):
            wrong.append(name)
    return wrong


def _all_unlike(folder: str, kind: str, **options: Any) -> list[list[str]]:
    """What differs, from stored weights and from those that are quantised while they are read."""
    files = {how: Path(folder) / f"{how}.safetensors" for how in ("16 bits", "stored")}
    expected = _train(_loaded(load_file(files["16 bits"]), kind), **options)
    models = [build(kind) for build in (_without_values, _inside_empty_init) for _ in files]
    paths = [*files.values()] * 2
    return [_unlike(expected, model, weights=path, **options) for model, path in zip(models, paths, strict=True)]


def _save_all(folder: Path, kind: str) -> None:
    pytest.importorskip("bitsandbytes", reason="its weights are tried too, where it is installed")
    for how in ("16 bits", "stored"):
        _saved(folder, how, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_values_trains_as_one_that_was_quantised_whole(kind: str, tmp_path: Path) -> None:
    _save_all(tmp_path, kind)
    assert _all_unlike(str(tmp_path), kind, stage=3) == [[]] * 4


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("bitsandbytes, double", 3),
        *(pytest.param(kind, stage, marks=pytest.mark.slow) for kind in KINDS for stage in (0, 1, 2)),
    ],
)
def test_so_it_does_on_two_ranks(kind: str, stage: int, tmp_path: Path) -> None:
    _save_all(tmp_path, kind)
    assert run_ranks(partial(_all_unlike, stage=stage), 2, str(tmp_path), kind) == [[[]] * 4] * 2


@pytest.mark.parametrize("options", [{"mesh": {"pipe": 2}, "accumulate": 2}, {"mesh": {"model": 2}}])
def test_so_it_does_on_a_mesh(options: dict[str, Any], tmp_path: Path) -> None:
    kind = "bitsandbytes, double"
    _save_all(tmp_path, kind)
    assert run_ranks(partial(_all_unlike, **options), 2, str(tmp_path), kind) == [[[]] * 4] * 2


class Reads:
    """Tells what is read of files, and how many bytes all tensors have when something is."""

    def __init__(self, files: Any) -> None:
        self._files, self.path, self.tensors = files, files.path, files.tensors
        self.num_bytes: dict[str, int] = {}
        self.most = 0

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        found: Tensor = self._files.rows(name, start, stop)
        self.num_bytes[name] = self.num_bytes.get(name, 0) + found.nbytes
        self.most = max(self.most, live_bytes())
        return found

    def release(self) -> None:
        self._files.release()


def live_bytes() -> int:
    """The bytes of all storages that Python's tensors lie in."""
    plain = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter) and one.device.type == "cpu"]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in plain}
    return sum(storages.values())


SIZES = {"width": 256, "inside": 512}


def _reads(path: str, kind: str) -> tuple[dict[str, int], int]:
    before = live_bytes()
    model = _without_values(kind, **SIZES)
    step = zerofx.compile(model, optimizer_of(model), 3, backend="eager", weights=path)
    reads = step._steps.values._files = Reads(step._steps.values._files)
    args, _ = next(batches(Case(nn.Identity, tokens), 0, 1))
    step.prepare(*args)
    return reads.num_bytes, reads.most - before


@pytest.mark.parametrize("kind", ["bitsandbytes, double"])
def test_each_rank_reads_its_slices_of_codes(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="its weights are tried too, where it is installed")
    path = _saved(tmp_path, "stored", kind, **SIZES)
    files = load_file(path)
    of_ranks = [reads for reads, _ in run_ranks(_reads, 2, str(path), kind)]
    for name, stored in files.items():
        if name.endswith("base.weight"):
            assert sum(reads.get(name, 0) for reads in of_ranks) == stored.nbytes
    read = [sum(size for name, size in reads.items() if "base" in name) for reads in of_ranks]
    assert max(read) < 0.6 * sum(stored.nbytes for name, stored in files.items() if "base" in name)


def test_no_more_than_one_weight_is_there_in_16_bits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="its weights are tried too, where it is installed")
    path = _saved(tmp_path, "16 bits", "bitsandbytes", **SIZES)
    sizes = {name: one.nbytes for name, one in load_file(path).items()}
    weights = [size for name, size in sizes.items() if name.endswith("base.weight")]
    others = sum(sizes.values()) - sum(weights)
    codes = sum(weights) * (4 + 32 / 64) / 16
    num_bytes, most = _reads(str(path), "bitsandbytes")
    assert num_bytes.keys() == sizes.keys() and [num_bytes[name] for name in sizes] == list(sizes.values())
    assert most < others + 1.02 * codes + max(weights) + 65536  # and the batch, tables, ...
    assert sum(weights) > 1.5 * (1.02 * codes + max(weights))


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="its weights are tried too, where it is installed")
    kind = "bitsandbytes, double"
    state = load_file(_saved(tmp_path, "stored", kind))
    first = "layers.0.up.base.weight"
    del state[f"{first}.absmax"]
    state[f"{first}.zero_point"] = torch.zeros(1)
    second = "layers.1.down.base.weight"
    state[second] = state[second][:-1].clone()
    save_file(state, tmp_path / "wrong.safetensors")
    model = _without_values(kind)
    before = {name: (type(one), one.shape, one.device) for name, one in model.named_parameters()}
    with pytest.raises(UsageError) as caught:
        zerofx.compile(model, optimizer_of(model), backend="eager", weights=tmp_path / "wrong.safetensors")
    for part in (
        f"1 missing ({first}.absmax)",
        f"not ({first}.zero_point)",
        "1 of another shape",
        f"{second} ([8703, 1]",
    ):
        assert part in str(caught.value)
    assert {name: (type(one), one.shape, one.device) for name, one in model.named_parameters()} == before
    for name in [name for name in state if name.endswith("quant_map")]:
        del state[name]
    save_file(state, tmp_path / "wrong.safetensors")
    with pytest.raises(UsageError, match=r"9 missing \((\S+, ){4}\S+ and 4 more\)"):
        zerofx.compile(model, optimizer_of(model), backend="eager", weights=tmp_path / "wrong.safetensors")


def test_weights_of_torchao_are_quantised_while_they_are_read(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="its weights are tried too, where it is installed")
    from torchao.quantization.quantize_.workflows import to_nf4

    path = _saved(tmp_path, "32 bits", "")
    state, model = load_file(path), Tuned(nf4)
    for name, module in model.named_modules():
        if name.endswith("base"):
            module.weight = nn.Parameter(to_nf4(state[f"{name}.weight"], 64, 16), requires_grad=False)
    model.load_state_dict({name: one for name, one in state.items() if "base" not in name}, strict=False)
    losses, values = _train(model)
    with zerofx.empty_init():
        deferred = Tuned(nf4)
    for other in (Tuned(nf4), deferred):
        found, ours = _train(other, stage=3, weights=path)
        assert found == losses and all(torch.equal(ours[name], one) for name, one in values.items())
    with torch.device("meta"):
        other = Tuned(nf4)
    with pytest.raises(UsageError, match=r"built inside zerofx.empty_init\(\).*layers.0.up.base.weight"):
        zerofx.compile(other, optimizer_of(other), backend="eager", weights=path)


def _pretrained(folder: Path, num_layers: int = 1) -> tuple[Any, Any]:
    """A model that transformers has saved in 16 bits, and how its weights are to be quantised."""
    import transformers

    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 272,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(vocab_size=32, num_hidden_layers=num_layers, **sizes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    return config, bits


_LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear"}


def _with_adapters(config: Any, bits: Any) -> Any:
    """A model in 4 bits without values, with adapters."""
    import peft
    import transformers
    from transformers.integrations import replace_with_bnb_linear  # type: ignore[attr-defined]  # lazily imported

    with zerofx.empty_init():
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        replace_with_bnb_linear(base, ["lm_head"], bits)
        base.is_loaded_in_4bit = True
        return peft.get_peft_model(base, peft.LoraConfig(**_LORA)).train()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_adapters_of_peft_stay_the_models_own(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="its weights are tried too, where it is installed")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config, bits = _pretrained(tmp_path / "own")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own", quantization_config=bits)
    loaded.save_pretrained(tmp_path / "stored")
    expected = peft.get_peft_model(loaded, peft.LoraConfig(**_LORA)).train()
    batch = torch.arange(32).view(2, 16)
    found: list[list[Tensor]] = []
    adapters: dict[str, Tensor] = {}
    for name in ("own", "stored", ""):
        if name:
            model = _with_adapters(config, bits)
        else:
            model = expected
            model.load_state_dict(adapters, strict=False)
        torch.manual_seed(8)
        weights = tmp_path / name if name else None
        step = zerofx.compile(model, optimizer_of(model), 3, backend="eager", weights=weights)
        step.prepare(input_ids=batch, labels=batch)
        if name:
            adapters = {key: one.clone() for key, one in step.full_state_dict().items() if "lora" in key}
        found.append([step(input_ids=batch, labels=batch).clone() for _ in range(2)])
        step.close()
    assert found[0] == found[1] == found[2]
    for key, one in adapters.items():
        assert one.any() == ("lora_A" in key), f"{key} does not begin as peft has it"


def _adapters_on_a_mesh(
    folder: str, config: Any, bits: Any, options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses, and adapters after them."""
    batch, model = torch.arange(64).view(4, 16) % 32, _with_adapters(config, bits)
    torch.manual_seed(8)
    step = zerofx.compile(model, optimizer_of(model), 0, backend="eager", weights=folder, accumulate=2, **options)
    torch.manual_seed(8)
    losses = [step(input_ids=batch, labels=batch).clone() for _ in range(2)]
    step.close()
    return losses, [one.detach() for name, one in model.named_parameters() if "lora" in name]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_stages_begin_with_the_adapters_of_one_process(tmp_path: Path) -> None:
    for library in ("bitsandbytes", "peft", "transformers"):
        pytest.importorskip(library, reason="its models are tried too, where it is installed")
    config, bits = _pretrained(tmp_path / "own", num_layers=2)
    given = str(tmp_path / "own"), config, bits
    losses, adapters = _adapters_on_a_mesh(*given, {})
    for found, ours in run_ranks(_adapters_on_a_mesh, 2, *given, {"mesh": {"pipe": 2}}):
        assert found == losses
        assert len(ours) == len(adapters) and all(map(torch.equal, ours, adapters))
