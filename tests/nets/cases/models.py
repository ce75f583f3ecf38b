"""Small models of other libraries, built from configurations.

A case gives a module that returns its loss, and a function that draws a batch. Libraries are those of
``tests/nets/requirements.txt``; a case whose library is not installed raises ``ImportError``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.nets.cases.built import (
    diffusion_loss,
    ft,
    graph,
    hyper_connected,
    images,
    litgpt,
    nflow,
    normflow,
    ode,
    of,
    tab,
    tokens,
)
from tests.nets.cases.case import Batch, Loss, ModelCase, squared
from tests.nets.cases.quantised import QUANTISED
from tests.nets.cases.scripts import SCRIPTS


def _geometric(name: str, **options: Any) -> ModelCase:
    path = f"torch_geometric.nn.{name}"
    return ModelCase(f"torch_geometric {name}", "torch_geometric", of(path, graph, **options), ("batch[1]",))


def _vit(module: str, name: str, **options: Any) -> ModelCase:
    base = {"image_size": 16, "patch_size": 8, "num_classes": 4, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 16}
    path = f"vit_pytorch.{module}.{name}"
    return ModelCase(f"vit-pytorch {module}", "vit_pytorch", of(path, (2, 3, 16, 16), **{**base, **options}))


def _x_transformer(what: str, **options: Any) -> ModelCase:
    def build() -> tuple[nn.Module, Callable[[], Batch]]:
        lib = importlib.import_module("x_transformers")
        attention = lib.Decoder(dim=16, depth=2, heads=2, **options)
        model = lib.TransformerWrapper(num_tokens=32, max_seq_len=8, attn_layers=attention)
        return Loss(model, squared), tokens

    return ModelCase(f"x-transformers {what}", "x_transformers", build)


def _monai(name: str, sizes: tuple[int, ...], **options: Any) -> ModelCase:
    return ModelCase(f"monai {name}", "monai", of(f"monai.networks.nets.{name}", sizes, **options))


_CHANNELS = {"in_channels": 8, "hidden_channels": 8, "num_layers": 2, "out_channels": 4}
_UNET = {"sample_size": 16, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "block_out_channels": (8, 16),
         "norm_num_groups": 4, "attention_head_dim": 4}  # fmt: skip

LIBRARIES = (
    _geometric("GCN", **_CHANNELS),
    _geometric("GAT", **_CHANNELS),
    _geometric("GraphSAGE", **_CHANNELS),
    _geometric("GIN", **_CHANNELS),
    _geometric("PNA", aggregators=["mean", "max"], scalers=["identity"], deg=torch.tensor([0, 4, 2]), **_CHANNELS),
    _geometric("EdgeCNN", **_CHANNELS),
    _geometric("TransformerConv", in_channels=8, out_channels=4, heads=2),
    _geometric("GATv2Conv", in_channels=8, out_channels=4, heads=2),
    _geometric("ChebConv", in_channels=8, out_channels=4, K=2),
    _geometric("GraphConv", in_channels=8, out_channels=4),
    _geometric("GATConv", in_channels=8, out_channels=4, heads=2),
    _geometric("SAGEConv", in_channels=8, out_channels=4),
    _geometric("GatedGraphConv", out_channels=64, num_layers=2),
    _geometric("ARMAConv", in_channels=8, out_channels=4),
    _geometric("TAGConv", in_channels=8, out_channels=4),
    _geometric("SGConv", in_channels=8, out_channels=4),
    _x_transformer("decoder"),
    _x_transformer("rotary", rotary_pos_emb=True),
    _x_transformer("glu, rmsnorm", ff_glu=True, use_rmsnorm=True),
    _x_transformer("alibi", alibi_pos_bias=True),
    _vit("simple_vit", "SimpleViT"),
    ModelCase(
        "diffusers UNet2DModel",
        "diffusers",
        of(
            "diffusers.UNet2DModel",
            images,
            diffusion_loss,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            **_UNET,
        ),
    ),
    ModelCase(
        "diffusers AutoencoderKL",
        "diffusers",
        of(
            "diffusers.AutoencoderKL",
            (1, 3, 16, 16),
            lambda m, x: m(x).sample.square().mean(),
            block_out_channels=(8,),
            norm_num_groups=4,
        ),
    ),
    _monai("UNet", (1, 1, 16, 16), spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,)),
    _monai("SegResNet", (1, 1, 16, 16), spatial_dims=2, init_filters=8, in_channels=1, out_channels=2),
    _monai("BasicUNet", (1, 1, 32, 32), spatial_dims=2, in_channels=1, out_channels=2, features=(4, 4, 8, 8, 8, 4)),
    _monai(
        "ViT",
        (1, 1, 16, 16),
        in_channels=1,
        img_size=(16, 16),
        patch_size=(8, 8),
        hidden_size=16,
        mlp_dim=16,
        num_layers=2,
        num_heads=2,
        spatial_dims=2,
    ),
    _monai(
        "AttentionUnet", (1, 1, 16, 16), spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,)
    ),
    ModelCase("torchdiffeq rk4", "torchdiffeq", ode),
    ModelCase("tab-transformer-pytorch TabTransformer", "tab_transformer_pytorch", tab),
    ModelCase("tab-transformer-pytorch FTTransformer", "tab_transformer_pytorch", ft),
    ModelCase(
        "pytorch-tabnet TabNet",
        "pytorch_tabnet",
        of(
            "pytorch_tabnet.tab_network.TabNetNoEmbeddings",
            (8, 6),
            input_dim=6,
            output_dim=2,
            n_d=4,
            n_a=4,
            virtual_batch_size=8,
        ),
    ),
    ModelCase(
        "rtdl MLP",
        "rtdl_revisiting_models",
        of("rtdl_revisiting_models.MLP", (4, 6), d_in=6, d_out=2, n_blocks=2, d_block=8, dropout=0.1),
    ),
    ModelCase(
        "rtdl ResNet",
        "rtdl_revisiting_models",
        of(
            "rtdl_revisiting_models.ResNet",
            (4, 6),
            d_in=6,
            d_out=2,
            n_blocks=2,
            d_block=8,
            d_hidden=8,
            d_hidden_multiplier=None,
            dropout1=0.1,
            dropout2=0.0,
        ),
    ),
    ModelCase(
        "rtdl-num-embeddings PLR",
        "rtdl_num_embeddings",
        of("rtdl_num_embeddings.PeriodicEmbeddings", (4, 6), n_features=6, d_embedding=8, lite=False),
    ),
    ModelCase(
        "vector-quantize-pytorch VQ",
        "vector_quantize_pytorch",
        of(
            "vector_quantize_pytorch.VectorQuantize",
            (2, 8, 8),
            lambda m, x: m(x)[2].sum() + m(x)[0].square().mean(),
            dim=8,
            codebook_size=8,
            learnable_codebook=True,
            ema_update=False,
        ),
    ),
    ModelCase(
        "vector-quantize-pytorch FSQ",
        "vector_quantize_pytorch",
        of("vector_quantize_pytorch.FSQ", (2, 8, 8), dim=8, levels=[4, 4]),
    ),
    ModelCase(
        "vector-quantize-pytorch LFQ",
        "vector_quantize_pytorch",
        of("vector_quantize_pytorch.LFQ", (2, 8, 8), dim=8, codebook_size=16),
    ),
    ModelCase(
        "performer-pytorch PerformerLM",
        "performer_pytorch",
        of("performer_pytorch.PerformerLM", tokens, num_tokens=32, max_seq_len=8, dim=16, depth=1, heads=2, dim_head=8),
    ),
    ModelCase(
        "linear-attention-transformer LM",
        "linear_attention_transformer",
        of(
            "linear_attention_transformer.LinearAttentionTransformerLM",
            tokens,
            num_tokens=32,
            dim=16,
            heads=2,
            depth=2,
            max_seq_len=8,
            causal=False,
        ),
    ),
    ModelCase(
        "local-attention LocalTransformer",
        "local_attention",
        of(
            "local_attention.LocalTransformer",
            tokens,
            num_tokens=32,
            dim=16,
            depth=2,
            max_seq_len=8,
            local_attn_window_size=4,
            heads=2,
        ),
    ),
    ModelCase(
        "axial-positional-embedding",
        "axial_positional_embedding",
        of("axial_positional_embedding.AxialPositionalEmbedding", (2, 16, 8), dim=8, axial_shape=(4, 4)),
    ),
    ModelCase(
        "conformer ConformerBlock",
        "conformer",
        of("conformer.ConformerBlock", (2, 8, 16), dim=16, heads=2, dim_head=8),
    ),
    ModelCase(
        "conformer Conformer",
        "conformer",
        of("conformer.Conformer", (2, 8, 16), dim=16, depth=2, heads=2, dim_head=8),
    ),
    ModelCase("litgpt GPT", "litgpt", litgpt),
    ModelCase("nflows MAF", "nflows", nflow),
    ModelCase("normflows RealNVP", "normflows", normflow),
    ModelCase("kornia ResNet-like HardNet", "kornia", of("kornia.feature.HardNet", (2, 1, 32, 32), pretrained=False)),
    ModelCase("kornia SOSNet", "kornia", of("kornia.feature.SOSNet", (2, 1, 32, 32), pretrained=False)),
    ModelCase("hyper-connections residual", "hyper_connections", hyper_connected),
    ModelCase(
        "linformer LM",
        "linformer",
        of("linformer.LinformerLM", tokens, num_tokens=32, dim=16, seq_len=8, depth=2, heads=2, k=4),
    ),
    ModelCase(
        "reformer-pytorch LM",
        "reformer_pytorch",
        of(
            "reformer_pytorch.ReformerLM",
            tokens,
            num_tokens=32,
            dim=16,
            depth=2,
            heads=2,
            max_seq_len=8,
            bucket_size=4,
            causal=True,
        ),
    ),
    ModelCase(
        "CoLT5-attention feed-forward",
        "colt5_attention",
        of(
            "colt5_attention.ConditionalRoutedFeedForward",
            (2, 16, 16),
            dim=16,
            light_ff_mult=0.5,
            heavy_ff_mult=2,
            num_heavy_tokens=4,
        ),
    ),
    ModelCase(
        "UMNN MonotonicNN",
        "UMNN",
        of(
            "UMNN.MonotonicNN",
            lambda: (torch.randn(4, 1), torch.randn(4, 3)),
            in_d=4,
            hidden_layers=[8],
            nb_steps=5,
            dev="cpu",
        ),
    ),
    _x_transformer("qk norm", attn_qk_norm=True),
    _x_transformer("grouped queries", attn_kv_heads=1),
    _x_transformer("relative positions", rel_pos_bias=True),
    _monai(
        "DenseNet",
        (2, 1, 32, 32),
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        init_features=4,
        growth_rate=4,
        block_config=(2, 2),
    ),
    _monai("HighResNet", (1, 1, 16, 16), spatial_dims=2, in_channels=1, out_channels=2),
    _monai(
        "AttentionUnet", (1, 1, 16, 16), spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,)
    ),
    _monai("VNet", (1, 1, 32, 32), spatial_dims=2, in_channels=1, out_channels=2),
    ModelCase(
        "diffusers DiT",
        "diffusers",
        of(
            "diffusers.DiTTransformer2DModel",
            lambda: (torch.randn(2, 4, 8, 8), torch.randint(0, 10, (2,)), torch.randint(0, 4, (2,))),
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            sample_size=8,
            num_embeds_ada_norm=10,
            norm_num_groups=2,
        ),
    ),
    ModelCase(
        "diffusers VQModel",
        "diffusers",
        of(
            "diffusers.VQModel",
            (2, 3, 16, 16),
            block_out_channels=(8,),
            norm_num_groups=4,
            latent_channels=4,
            num_vq_embeddings=16,
        ),
    ),
)

CASES = {case.name: case for case in (*SCRIPTS, *LIBRARIES, *QUANTISED)}
