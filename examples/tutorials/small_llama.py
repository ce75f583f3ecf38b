"""The model of the tutorials, small enough for any machine: in the place of one of yours, or of `from_pretrained`."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make_small_llama(vocab_size: int = 512) -> LlamaForCausalLM:
    """A Llama of two layers with random weights, the same in each process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)
