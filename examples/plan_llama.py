"""Plan models of billions of parameters on a laptop. A plan needs shapes only, so that nothing here takes memory.

zerofx plan examples/plan_llama.py:llama_8b --world-size 8 --machine h100-sxm --precision bf16 --html plan.html
zerofx plan examples/plan_llama.py:llama_70b --world-size 1024 --machine h100-sxm --precision bf16 --memory-budget 80GB
zerofx plan examples/plan_llama.py:llama_405b --world-size 8192 --machine h100-sxm --precision bf16 --memory-budget 80GB

With frozen weights in 4 bits and adapters (QLoRA, needs bitsandbytes and peft), on one card:

zerofx plan examples/plan_llama.py:llama_8b_qlora --machine rtx-4090 --memory-budget 8GiB
zerofx plan examples/plan_llama.py:llama_70b_qlora --machine rtx-4090 --memory-budget 24GB --host-budget 64GiB
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

Planned = tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor]]


def llama_8b() -> Planned:
    """A model of the shape of Llama 3 8B (arXiv 2407.21783, table 3), its optimizer, and the batch of one process."""
    return _llama(num_layers=32, dim=4096, inner=14_336, num_heads=32, block=4096)


def llama_70b() -> Planned:
    """The same for Llama 3 70B, with sequences of 8192 tokens."""
    return _llama(num_layers=80, dim=8192, inner=28_672, num_heads=64, block=8192)


def llama_405b() -> Planned:
    """The same for Llama 3.1 405B, with sequences of 8192 tokens."""
    return _llama(num_layers=126, dim=16_384, inner=53_248, num_heads=128, block=8192)


def llama_8b_qlora() -> Planned:
    """Llama 3 8B with its layers' weights in 4 bits, and adapters that are trained; sequences of 4096 tokens."""
    return _with_adapters(llama_8b())


def llama_70b_qlora() -> Planned:
    """The same for Llama 3 70B."""
    return _with_adapters(_llama(num_layers=80, dim=8192, inner=28_672, num_heads=64, block=4096))


def _with_adapters(planned: Planned) -> Planned:
    from peft import LoraConfig, get_peft_model

    model, _, batch = planned
    model.to(torch.bfloat16).requires_grad_(False)
    layers = model.get_submodule("model.layers")
    for layer in list(layers.modules()):
        for name, child in list(layer.named_children()):
            if isinstance(child, nn.Linear):
                setattr(layer, name, _in_4_bits(child))
    lora = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, lora)
    for parameter in adapted.parameters():  # peft makes adapters of weights in 4 bits in float32
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=2e-4)
    return adapted, optimizer, batch


def _in_4_bits(linear: nn.Linear) -> nn.Module:
    """A layer without values: codes of 4 bits, a scale in 8 bits for each 64 weights, one of these for each 256."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit, Params4bit

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    blocks = linear.weight.numel() // 64
    scales = QuantState(empty(-(-blocks // 256)), code=empty(256), blocksize=256, dtype=torch.float32)
    state = QuantState(
        empty(blocks, dtype=torch.uint8), linear.weight.shape, empty(16), 64, "nf4", torch.bfloat16, empty(), scales
    )
    layer: nn.Module = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=torch.bfloat16,
        quant_type="nf4",
        device="meta",
    )
    codes = empty(linear.weight.numel() // 2, 1, dtype=torch.uint8)
    layer.weight = Params4bit(codes, quant_state=state, quant_type="nf4", bnb_quantized=True)
    return layer


def _llama(num_layers: int, dim: int, inner: int, num_heads: int, block: int) -> Planned:
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=dim,
        intermediate_size=inner,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        use_cache=False,  # the key-value cache is for generating text
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
        tokens = torch.zeros(1, block, dtype=torch.long)  # one sequence for each process and step
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return model, optimizer, {"input_ids": tokens, "labels": tokens.clone()}
