"""A contender of ``benchmarks/peers/``: tensor parallelism as DTensor's users write it by hand, model by model.

The plan is torchtitan's: matrices by columns and then by rows, embeddings and the loss by vocabulary, and between them
norms and residuals in parts of the sequence. The last is for a model that is written for it: forward of the Llama of
transformers takes lengths from what are parts then, so that its streams are whole.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from benchmarks.lib.models import Workload


class HeadsAttention(nn.Module):
    """The attention of ``examples/gpt.py`` as it has to be written for parts of heads: queries, keys and values in
    three matrices, and as many heads as there are in what these give."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        qkv, out = attention.qkv, attention.out
        assert isinstance(qkv, nn.Linear) and isinstance(out, nn.Linear) and isinstance(attention.heads, int)
        self.head_dim = out.in_features // attention.heads
        self.q, self.k, self.v = map(_linear, qkv.weight.chunk(3), qkv.bias.chunk(3))
        self.out = out

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (of(x).view(batch, time, -1, self.head_dim).transpose(1, 2) for of in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, -1))
        return mixed


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A layer with copies of these."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=weight.dtype)
    linear.weight, linear.bias = (nn.Parameter(part.detach().clone()) for part in (weight, bias))
    return linear


def parallelize(work: Workload, mesh: DeviceMesh) -> None:
    """Share the workload's model among the ranks of ``mesh``, in place."""
    (_share_llama if hasattr(work.model, "lm_head") else _share_gpt)(work, mesh)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters by the mesh that they lie on, if any: torch's fused updates take those of one at a time."""
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return [{"params": parameters} for parameters in by_mesh.values()]


def _share_gpt(work: Workload, mesh: DeviceMesh) -> None:
    for block in work.blocks:
        block.attention = HeadsAttention(block.attention)  # type: ignore[arg-type]  # torch types attributes as either
        gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        parallelize_module(
            block,
            mesh,
            {
                "norm1": SequenceParallel(),
                "attention": gathered,
                **dict.fromkeys(("attention.q", "attention.k", "attention.v", "mlp.up"), ColwiseParallel()),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "norm2": SequenceParallel(),
                "mlp": gathered,
                "mlp.out": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    parallelize_module(
        work.model,
        mesh,
        {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )


def _share_llama(work: Workload, mesh: DeviceMesh) -> None:
    for block in work.blocks:
        columns = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
        rows = ["self_attn.o_proj", "mlp.down_proj"]
        parallelize_module(
            block, mesh, dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())
        )
    model: Any = work.model
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )
    # A sum under way is a tensor of a class of its own, which backward of a compiled block does not know: add to it.
    model.model.embed_tokens.register_forward_hook(lambda _module, _args, stream: stream + 0)
