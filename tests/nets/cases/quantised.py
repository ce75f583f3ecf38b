"""Small models of ``transformers`` whose linear layers are quantised as their users do it, most of them with adapters.

Weights are quantised by the library's own configuration where it can do it on a CPU (``BitsAndBytesConfig``,
``TorchAoConfig``, ``quantize_``, ``convert_to_float8_training``); what is frozen in few bits is trained through
``peft``.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.nets.cases.case import Batch, Loss, ModelCase

_INT4: Any = vars(torch)["int4"]  # which torch's annotations lack
Built = tuple[nn.Module, Callable[[], Batch]]
_SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# What a family calls those, or has besides.
_FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 8},
    "Phi3": {},
    "StableLm": {},
    "GPTNeoX": {},
    "Olmo2": {},
    "Cohere": {},
    "Granite": {},
    "Starcoder2": {},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.1},
    "Bloom": {"n_head": 4, "n_layer": 2},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
}


def _transformers() -> Any:
    return importlib.import_module("transformers")


def _causal(family: str) -> nn.Module:
    lib = _transformers()
    config = getattr(lib, f"{family}Config")(**{**_SMALL, **_FAMILIES[family]}, attn_implementation="eager")
    model: nn.Module = lib.AutoModelForCausalLM.from_config(config)
    return model


def _tokens(length: int = 12) -> Batch:
    return (torch.randint(3, 96, (2, length)),)


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def _with_adapters(model: nn.Module, **options: Any) -> nn.Module:
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options})
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def _load(model: nn.Module, config: Any) -> nn.Module:
    """The same model, read from a folder as ``config`` quantises it."""
    with tempfile.TemporaryDirectory() as folder:
        # Every rank writes a folder of its own, where the library's `save_pretrained` writes on rank 0 alone.
        model.config.save_pretrained(folder)  # type: ignore[operator, union-attr]  # a method of the library's
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # tied ones apart
        save_file(state, f"{folder}/model.safetensors", {"format": "pt"})
        loaded: nn.Module = _transformers().AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    return loaded


def _bitsandbytes(family: str, *, bits: int = 4, dora: bool = False, **options: Any) -> ModelCase:
    def build() -> Built:
        importlib.import_module("bitsandbytes")
        kind = {f"load_in_{bits}bit": True, **options}
        model = _load(_causal(family), _transformers().BitsAndBytesConfig(**kind))
        return Loss(_with_adapters(model.train(), use_dora=dora), _loss), _tokens

    said = "".join(f", {name}={value}" for name, value in options.items()) + (", DoRA" if dora else "")
    return ModelCase(f"{family}, BitsAndBytesConfig {bits} bits{said}", "bitsandbytes", build)


def _torchao(family: str, kind: str, *, dora: bool = False, **options: Any) -> ModelCase:
    """``kind`` is the name of a configuration of ``torchao.quantization``."""

    def build() -> Built:
        config = getattr(importlib.import_module("torchao.quantization"), kind)(**options)
        model = _load(_causal(family), _transformers().TorchAoConfig(config))
        return Loss(_with_adapters(model.train(), use_dora=dora), _loss), _tokens

    return ModelCase(f"{family}, TorchAoConfig {kind}{', DoRA' if dora else ''}", "torchao", build)


def _fp8(family: str, recipe: str) -> ModelCase:
    def build() -> Built:
        lib = importlib.import_module("torchao.float8")
        config = lib.Float8LinearConfig.from_recipe_name(recipe)
        object.__setattr__(config, "emulate", True)
        model = _causal(family).to(torch.bfloat16)
        lib.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "lm_head")
        return Loss(model.train(), _loss), _tokens

    return ModelCase(f"{family}, float8 training, {recipe}", "torchao", build)


def _aware(family: str, **options: Any) -> ModelCase:
    """Trained with weights and activations rounded (QAT)."""

    def build() -> Built:
        quantization = importlib.import_module("torchao.quantization")
        qat = importlib.import_module("torchao.quantization.qat")
        model = _causal(family)
        weights = qat.IntxFakeQuantizeConfig(_INT4, group_size=32)
        inputs = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
        quantization.quantize_(model, qat.QATConfig(activation_config=inputs, weight_config=weights, step="prepare"))
        return Loss(model.train(), _loss), _tokens

    return ModelCase(f"{family}, QATConfig", "torchao", build)


def _swapped(family: str, *, mx: bool) -> ModelCase:
    """Modules of ``torchao.prototype`` that multiply in MXFP8 (as emulated) or in int8, with plain parameters."""

    def to_mx(layer: nn.Linear) -> nn.Module:
        kinds = importlib.import_module("torchao.prototype.moe_training.mxfp8_linear")
        made: nn.Module = kinds.MXFP8Linear(
            layer.in_features, layer.out_features, layer.bias is not None, dtype=layer.weight.dtype,
            kernel_preference=kinds.KernelPreference.EMULATED,
        )  # fmt: skip
        made.load_state_dict(layer.state_dict())
        return made

    def build() -> Built:
        model = _causal(family).to(torch.bfloat16)
        inner = model.get_submodule("model")
        if mx:
            for name, layer in list(inner.named_modules()):
                if isinstance(layer, nn.Linear):
                    inner.set_submodule(name, to_mx(layer))
        else:
            training = importlib.import_module("torchao.prototype.quantized_training")
            config = training.Int8MixedPrecisionTrainingConfig(module_swap=True)
            importlib.import_module("torchao.quantization").quantize_(inner, config)
        return Loss(model.train(), _loss), partial(_tokens, 16)  # blocks of 32 tokens

    return ModelCase(f"{family}, {'MXFP8Linear' if mx else 'Int8MixedPrecisionTrainingLinear'}", "torchao", build)


def _trained(family: str, kind: str) -> ModelCase:
    """Weights that are trained in the form that ``kind`` of ``torchao.prototype.quantized_training`` gives them."""

    def build() -> Built:
        config = getattr(importlib.import_module("torchao.prototype.quantized_training"), kind)()
        model = _causal(family)
        importlib.import_module("torchao.quantization").quantize_(model.get_submodule("model"), config)
        return Loss(model.train(), _loss), _tokens

    return ModelCase(f"{family}, {kind}", "torchao", build)


QUANTISED = (
    *(_bitsandbytes(family, bnb_4bit_quant_type="nf4") for family in ("Llama", "Mistral", "Gemma2", "OPT", "Bloom")),
    *(
        _bitsandbytes(family, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        for family in ("Qwen2", "Phi3", "StableLm", "Falcon")
    ),
    *(_bitsandbytes(family, bnb_4bit_quant_type="fp4") for family in ("Qwen3", "GPTNeoX")),
    _bitsandbytes("Granite", bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_type="nf4"),
    _bitsandbytes("Llama", bits=8),
    _bitsandbytes("Llama", dora=True, bnb_4bit_quant_type="nf4"),
    _bitsandbytes("Gemma2", dora=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    *(_torchao(family, "Int8WeightOnlyConfig") for family in ("Llama", "Cohere", "Starcoder2")),
    _torchao("Llama", "Int8WeightOnlyConfig", dora=True),
    _torchao("Olmo2", "Float8WeightOnlyConfig"),
    _torchao("Qwen2", "IntxWeightOnlyConfig", weight_dtype=_INT4),
    _torchao("Mistral", "Int8DynamicActivationInt8WeightConfig"),
    *(_fp8("Llama", recipe) for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")),
    _fp8("Olmo2", "rowwise"),
    _aware("Llama"),
    _aware("Gemma2"),
    *(_swapped(family, mx=mx) for family in ("Llama", "Qwen3") for mx in (True, False)),
    *(
        _trained("Llama", kind)
        for kind in ("int8_weight_only_quantized_training", "int8_mixed_precision_training", "bitnet_training")
    ),
)
