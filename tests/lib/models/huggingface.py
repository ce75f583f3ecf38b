"""Models of the transformers library, as small as their configurations allow."""

from __future__ import annotations

from typing import Any

from torch import nn


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"num_hidden_layers": 2, **options}
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=16, **sizes,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def qwen3_next() -> nn.Module:
    """A layer of linear attention, whose decay is a softplus, and one of attention; four experts, of which two work."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=16, linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=8, shared_expert_intermediate_size=8, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def mixtral(**options: Any) -> nn.Module:
    """Four experts a layer, of which two work for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, **options,
    }  # fmt: skip
    config = MixtralConfig(
        vocab_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        **sizes,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def qwen3_moe(**options: Any) -> nn.Module:
    """Eight experts a layer, of which three work for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(  # type: ignore[call-arg]  # its base class takes the rest
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=16, num_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=options.get("intermediate_size", 8),
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def olmoe() -> nn.Module:
    """Four experts a layer, of which two work for each token."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, num_experts=4, num_experts_per_tok=2, pad_token_id=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return OlmoeForCausalLM(config)


def gpt_oss() -> nn.Module:
    """Four experts a layer with biases, of which two work for each token; every second layer's attention is local."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=16, num_local_experts=4, num_experts_per_tok=2,
        attention_bias=False, sliding_window=4, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = GptOssForCausalLM._from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):  # zeros, unless told otherwise
            nn.init.normal_(parameter, std=0.02)
    return model


def deepseek_v3() -> nn.Module:
    """A dense layer, and one of four experts and a shared one; two, of one group, work for each token."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_shared_experts=1, n_routed_experts=4, num_experts_per_tok=2,
        n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=16,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def t5(dropout: float = 0.0) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(  # type: ignore[call-arg]  # its base class takes the rest
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=dropout,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def bert(dropout: float = 0.0) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return BertForMaskedLM(config)


def vit(dropout: float = 0.0) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(  # type: ignore[call-arg]  # its base class takes the rest
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_labels=5, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return ViTForImageClassification(config)
