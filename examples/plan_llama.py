"""Plan a model of eight billion parameters on a laptop: shapes are all a plan needs, so nothing here takes memory.

zerofx plan examples/plan_llama.py:llama_8b --world-size 8 --machine h100-sxm --precision bf16 --html plan.html
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

BLOCK, BATCH_SIZE = 4096, 1  # tokens of a sequence, sequences per process and step


def llama_8b() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor]]:
    """A model of the shape of Llama 3 8B (arXiv 2407.21783, table 3), its optimizer, and the batch of one process."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        use_cache=False,  # the key-value cache is for generating text
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
        tokens = torch.zeros(BATCH_SIZE, BLOCK, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return model, optimizer, {"input_ids": tokens, "labels": tokens.clone()}
