"""Plan models of billions of parameters on a laptop. A plan needs shapes only, so that nothing here takes memory.

zerofx plan examples/plan_llama.py:llama_8b --world-size 8 --machine h100-sxm --precision bf16 --html plan.html
zerofx plan examples/plan_llama.py:llama_70b --world-size 1024 --machine h100-sxm --precision bf16 --memory-budget 80GB
zerofx plan examples/plan_llama.py:llama_405b --world-size 8192 --machine h100-sxm --precision bf16 --memory-budget 80GB
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
