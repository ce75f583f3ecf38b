"""Small models of other libraries, built from configurations, and whole training scripts in plain torch.

A case gives a module that returns its loss, and a function that draws a batch. Libraries are those of
``tests/nets/requirements.txt``; a case whose library is not installed raises ``ImportError``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Any, ...]


@dataclass(frozen=True)
class ModelCase:
    """``library`` is the module it is imported from, ``""`` for a script in plain torch; ``build`` gives model and
    batches. ``constant`` names what of a batch is the same in every step."""

    name: str
    library: str
    build: Callable[[], tuple[nn.Module, Callable[[], Batch]]]
    constant: tuple[str, ...] = ()


class Loss(nn.Module):
    """``model`` with what a training script computes of it: ``compute(model, *batch)`` is the loss."""

    def __init__(self, model: nn.Module, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self.compute = compute

    def forward(self, *batch: Any) -> Tensor:
        return self.compute(self.model, *batch)


def squared(model: nn.Module, *batch: Any) -> Tensor:
    """The mean square of what the model gives first."""
    found: Any = model(*batch)
    while not isinstance(found, Tensor):
        found = next(iter(found.values())) if isinstance(found, dict) else found[0]
    return found.float().square().mean()


def _get(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _of(path: str, sizes: tuple[int, ...] | Callable[[], Batch], compute: Callable[..., Tensor] = squared,
        **options: Any) -> Callable[[], tuple[nn.Module, Callable[[], Batch]]]:  # fmt: skip
    """A case whose model is called ``path``, made with ``options``, for tensors of ``sizes``."""

    def build() -> tuple[nn.Module, Callable[[], Batch]]:
        draw = sizes if callable(sizes) else lambda: (torch.randn(sizes),)
        return Loss(_get(path)(**options), compute), draw

    return build


def _tokens() -> Batch:
    return (torch.randint(0, 32, (2, 8)),)


_GRAPH = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])


def _graph() -> Batch:
    return torch.randn(6, 8), _GRAPH


def _geometric(name: str, **options: Any) -> ModelCase:
    path = f"torch_geometric.nn.{name}"
    return ModelCase(f"torch_geometric {name}", "torch_geometric", _of(path, _graph, **options), ("batch[1]",))


def _vit(module: str, name: str, **options: Any) -> ModelCase:
    base = {"image_size": 16, "patch_size": 8, "num_classes": 4, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 16}
    path = f"vit_pytorch.{module}.{name}"
    return ModelCase(f"vit-pytorch {module}", "vit_pytorch", _of(path, (2, 3, 16, 16), **{**base, **options}))


def _x_transformer(what: str, **options: Any) -> ModelCase:
    def build() -> tuple[nn.Module, Callable[[], Batch]]:
        lib = importlib.import_module("x_transformers")
        attention = lib.Decoder(dim=16, depth=2, heads=2, **options)
        model = lib.TransformerWrapper(num_tokens=32, max_seq_len=8, attn_layers=attention)
        return Loss(model, squared), _tokens

    return ModelCase(f"x-transformers {what}", "x_transformers", build)


def _monai(name: str, sizes: tuple[int, ...], **options: Any) -> ModelCase:
    return ModelCase(f"monai {name}", "monai", _of(f"monai.networks.nets.{name}", sizes, **options))


def _diffusion_loss(model: nn.Module, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    noisy = x * (1 - time / 10).view(-1, 1, 1, 1) + noise * (time / 10).view(-1, 1, 1, 1)
    return F.mse_loss(model(noisy, time).sample, noise)


def _images() -> Batch:
    return torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16), torch.randint(0, 10, (2,))


def _likelihood(model: nn.Module, x: Tensor) -> Tensor:
    return -model.log_prob(x).mean()  # type: ignore[operator, no-any-return]  # a method of flows


def _nflow() -> tuple[nn.Module, Callable[[], Batch]]:
    transforms = importlib.import_module("nflows.transforms")
    base = _get("nflows.distributions.StandardNormal")([4])
    layers = [transforms.MaskedAffineAutoregressiveTransform(4, 8), transforms.ReversePermutation(4)]
    return Loss(_get("nflows.flows.Flow")(transforms.CompositeTransform(layers), base), _likelihood), _points


def _normflow() -> tuple[nn.Module, Callable[[], Batch]]:
    flows = importlib.import_module("normflows")
    layers = [flows.flows.AffineCouplingBlock(flows.nets.MLP([2, 8, 4], init_zeros=True)), flows.flows.Permute(4)]
    model = flows.NormalizingFlow(flows.distributions.DiagGaussian(4, trainable=False), layers)
    return Loss(model, lambda flow, x: flow.forward_kld(x)), _points


def _points() -> Batch:
    return (torch.randn(8, 4),)


def _ode() -> tuple[nn.Module, Callable[[], Batch]]:
    solve = _get("torchdiffeq.odeint")

    def compute(net: nn.Module, x: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 3)
        return solve(lambda _, y: net(y), x, times, method="rk4")[-1].square().mean()  # type: ignore[no-any-return]

    return Loss(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), compute), _points


def _tab() -> tuple[nn.Module, Callable[[], Batch]]:
    model = _get("tab_transformer_pytorch.TabTransformer")(
        categories=(4, 3), num_continuous=4, dim=16, dim_out=1, depth=2, heads=2
    )
    return Loss(model, squared), lambda: (torch.randint(0, 3, (4, 2)), torch.randn(4, 4))


def _ft() -> tuple[nn.Module, Callable[[], Batch]]:
    model = _get("tab_transformer_pytorch.FTTransformer")(
        categories=(4, 3), num_continuous=4, dim=16, dim_out=1, depth=2, heads=2
    )
    return Loss(model, squared), lambda: (torch.randint(0, 3, (4, 2)), torch.randn(4, 4))


def _litgpt() -> tuple[nn.Module, Callable[[], Batch]]:
    config = _get("litgpt.config.Config")(
        block_size=8, n_layer=2, n_embd=16, n_head=2, padded_vocab_size=32, intermediate_size=32
    )
    return Loss(_get("litgpt.model.GPT")(config), squared), _tokens


def _hyper_connected() -> tuple[nn.Module, Callable[[], Batch]]:
    model = _get("hyper_connections.HyperConnections")(num_residual_streams=4, dim=8, branch=nn.Linear(8, 8))
    return Loss(model, squared), lambda: (torch.randn(4, 8, 8),)


# Whole training scripts in plain torch.


class _Dpo(nn.Module):
    """Direct preference optimization (2305.18290) without a reference model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))

    def likelihood(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x[:, :-1]).log_softmax(-1).gather(-1, x[:, 1:, None]).sum((1, 2))
        return found

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -F.logsigmoid(self.likelihood(chosen) - self.likelihood(rejected)).mean()


class _Vae(nn.Module):
    """A variational autoencoder (1312.6114) with noise drawn in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean() / 2
        loss: Tensor = F.mse_loss(self.decoder(drawn), x) + divergence
        return loss


def _pinn(net: nn.Module, x: Tensor) -> Tensor:
    """The residual of ``u'' = -u`` by ``torch.func``: second derivatives inside the loss."""

    def u(point: Tensor) -> Tensor:
        return net(point[None])[0].sum()  # type: ignore[no-any-return]

    second = torch.func.vmap(torch.func.grad(lambda p: torch.func.grad(u)(p).sum()))(x)
    loss: Tensor = (second + torch.func.vmap(u)(x)[:, None]).square().mean()
    return loss


def _flow_matching(net: nn.Module, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """Conditional flow matching (2210.02747)."""
    here = (1 - time) * noise + time * x
    loss: Tensor = F.mse_loss(net(torch.cat([here, time], -1)), x - noise)
    return loss


def _contrastive(net: nn.Module, first: Tensor, second: Tensor) -> Tensor:
    """InfoNCE (1807.03748) within the batch of a rank."""
    a, b = F.normalize(net(first), dim=-1), F.normalize(net(second), dim=-1)
    loss: Tensor = F.cross_entropy(a @ b.T / 0.1, torch.arange(a.shape[0]))
    return loss


def _mlp(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inside, 8), nn.Tanh(), nn.Linear(8, outside))


def _script(name: str, build: Callable[[], nn.Module], draw: Callable[[], Batch]) -> ModelCase:
    return ModelCase(f"script {name}", "", lambda: (build(), draw))


SCRIPTS = (
    _script("DPO", _Dpo, lambda: (torch.randint(0, 11, (4, 6)), torch.randint(0, 11, (4, 6)))),
    _script("VAE", _Vae, lambda: (torch.randn(4, 8),)),
    _script("PINN", lambda: Loss(_mlp(1, 1), _pinn), lambda: (torch.randn(8, 1),)),
    _script(
        "flow matching",
        lambda: Loss(_mlp(5, 4), _flow_matching),
        lambda: (torch.randn(8, 4), torch.randn(8, 4), torch.rand(8, 1)),
    ),
    _script("contrastive", lambda: Loss(_mlp(4, 4), _contrastive), lambda: (torch.randn(8, 4), torch.randn(8, 4))),
)

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
    _x_transformer("decoder"),
    _x_transformer("rotary", rotary_pos_emb=True),
    _x_transformer("glu, rmsnorm", ff_glu=True, use_rmsnorm=True),
    _x_transformer("alibi", alibi_pos_bias=True),
    _vit("simple_vit", "SimpleViT"),
    ModelCase(
        "diffusers UNet2DModel",
        "diffusers",
        _of(
            "diffusers.UNet2DModel",
            _images,
            _diffusion_loss,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            **_UNET,
        ),
    ),
    ModelCase(
        "diffusers AutoencoderKL",
        "diffusers",
        _of(
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
    ModelCase("torchdiffeq rk4", "torchdiffeq", _ode),
    ModelCase("tab-transformer-pytorch TabTransformer", "tab_transformer_pytorch", _tab),
    ModelCase("tab-transformer-pytorch FTTransformer", "tab_transformer_pytorch", _ft),
    ModelCase(
        "pytorch-tabnet TabNet",
        "pytorch_tabnet",
        _of(
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
        _of("rtdl_revisiting_models.MLP", (4, 6), d_in=6, d_out=2, n_blocks=2, d_block=8, dropout=0.1),
    ),
    ModelCase(
        "rtdl ResNet",
        "rtdl_revisiting_models",
        _of(
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
        _of("rtdl_num_embeddings.PeriodicEmbeddings", (4, 6), n_features=6, d_embedding=8, lite=False),
    ),
    ModelCase(
        "vector-quantize-pytorch VQ",
        "vector_quantize_pytorch",
        _of(
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
        _of("vector_quantize_pytorch.FSQ", (2, 8, 8), dim=8, levels=[4, 4]),
    ),
    ModelCase(
        "vector-quantize-pytorch LFQ",
        "vector_quantize_pytorch",
        _of("vector_quantize_pytorch.LFQ", (2, 8, 8), dim=8, codebook_size=16),
    ),
    ModelCase(
        "performer-pytorch PerformerLM",
        "performer_pytorch",
        _of(
            "performer_pytorch.PerformerLM", _tokens, num_tokens=32, max_seq_len=8, dim=16, depth=1, heads=2, dim_head=8
        ),
    ),
    ModelCase(
        "linear-attention-transformer LM",
        "linear_attention_transformer",
        _of(
            "linear_attention_transformer.LinearAttentionTransformerLM",
            _tokens,
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
        _of(
            "local_attention.LocalTransformer",
            _tokens,
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
        _of("axial_positional_embedding.AxialPositionalEmbedding", (2, 16, 8), dim=8, axial_shape=(4, 4)),
    ),
    ModelCase(
        "conformer ConformerBlock",
        "conformer",
        _of("conformer.ConformerBlock", (2, 8, 16), dim=16, heads=2, dim_head=8),
    ),
    ModelCase(
        "conformer Conformer", "conformer", _of("conformer.Conformer", (2, 8, 16), dim=16, depth=2, heads=2, dim_head=8)
    ),
    ModelCase("litgpt GPT", "litgpt", _litgpt),
    ModelCase("nflows MAF", "nflows", _nflow),
    ModelCase("normflows RealNVP", "normflows", _normflow),
    ModelCase("kornia ResNet-like HardNet", "kornia", _of("kornia.feature.HardNet", (2, 1, 32, 32), pretrained=False)),
    ModelCase("kornia SOSNet", "kornia", _of("kornia.feature.SOSNet", (2, 1, 32, 32), pretrained=False)),
    ModelCase("hyper-connections residual", "hyper_connections", _hyper_connected),
)

CASES = {case.name: case for case in (*SCRIPTS, *LIBRARIES)}
