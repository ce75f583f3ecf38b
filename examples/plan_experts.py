"""Plan mixtures of experts for machines that need not be there; eight ranks share the computation of eight sequences.

zerofx plan examples/plan_experts.py:qwen3_30b_a3b --mesh model=8 --machine h100-sxm --precision bf16
zerofx plan examples/plan_experts.py:deepseek_v3 --mesh shard=32,model=8 --machine h100-sxm --precision bf16

With `--memory-budget 72GiB`, what does not fit is computed again, or waits on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

Planned = tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor]]

SEQUENCES, TOKENS = 8, 4096


def qwen3_30b_a3b() -> Planned:
    """A model of the shape of Qwen3-30B-A3B (arXiv 2505.09388), its optimizer, and the batch of eight ranks."""
    config = Qwen3MoeConfig(  # type: ignore[call-arg]  # its base class takes the rest
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48, head_dim=128,
        num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        vocab_size=151936, max_position_embeddings=TOKENS, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return _planned(Qwen3MoeForCausalLM, config)


def deepseek_v3() -> Planned:
    """The same for DeepSeek-V3 (arXiv 2412.19437), without its prediction of a second token."""
    config = DeepseekV3Config(max_position_embeddings=TOKENS, use_cache=False)  # its defaults are that model's
    return _planned(DeepseekV3ForCausalLM, config)


def _planned(kind: type[nn.Module], config: object) -> Planned:
    with torch.device("meta"):
        model: nn.Module = kind(config)
        ids = torch.zeros(SEQUENCES, TOKENS, dtype=torch.int64)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), {"input_ids": ids, "labels": ids.clone()}
