"""Models whose frozen weights are tensor subclasses in few bits, with adapters that are trained next to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerofx.torch_private.tensors import make_wrapper

WIDTH, INSIDE = 64, 272  # so that scales are more than a table
BLOCK = 32
_aten = torch.ops.aten


def _to_codes(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of 8 bits, a scale for each block, and the table that codes are places in."""
    table = torch.linspace(-1, 1, 200)
    blocks = weight.detach().reshape(-1, BLOCK)
    scales = blocks.abs().amax(1)
    return torch.bucketize(blocks / scales[:, None], table[:-1]).to(torch.uint8).view(weight.shape), scales, table


def _to_weight(codes: Tensor, scales: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    values = table[codes.reshape(-1, BLOCK).int()] * scales[:, None]
    return values.reshape(codes.shape).to(dtype)


class _Product(torch.autograd.Function):
    """A product with a weight that backward makes of its codes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
        ctx.parts = codes, scales, table
        return F.linear(x, _to_weight(codes, scales, table, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        codes, scales, table = ctx.parts
        return gradient @ _to_weight(codes, scales, table, gradient.dtype), None, None, None


_multiply: Callable[..., Tensor] = _Product.apply


class Flat(Tensor):
    """A weight that says of what it consists, as ``torch.compile`` asks of it."""

    codes: Tensor
    scales: Tensor
    table: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, table: Tensor, dtype: torch.dtype) -> Flat:
        made = make_wrapper(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scales, made.table = codes, scales, table
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales", "table"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: Any, _size: Any, _stride: Any) -> Flat:
        return cls(**inner, dtype=dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            product = _multiply(x, weight.codes, weight.scales, weight.table)
            return product + bias[0] if bias and bias[0] is not None else product
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        whole = args[0]
        if func in (_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default):
            codes, scales, table = (func(part, *args[1:]) for part in (whole.codes, whole.scales, whole.table))
            return cls(codes, scales, table, whole.dtype)
        raise NotImplementedError(f"{func} of a weight in few bits")


class _Scales:
    def __init__(self, of_blocks: Tensor) -> None:
        self.of_blocks = of_blocks


class _State:
    """What a weight in ``Stateful`` has besides its codes; scales are in a state of their own."""

    def __init__(self, table: Tensor, scales: Tensor) -> None:
        self.table, self.scales, self.kind = table, _Scales(scales), "8 bits"


class Stateful(nn.Parameter):
    """A weight that is its codes, and has the rest as Python attributes."""

    state: _State

    @staticmethod
    def __new__(cls, data: Tensor, state: _State) -> Stateful:
        made: Stateful = Tensor._make_subclass(cls, data, False)
        made.state = state
        return made

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Another parameter of the same memory, as bitsandbytes makes."""
        return Stateful(super().to(*args, **kwargs), self.state)


class LowBits(nn.Module):
    """A linear layer with a weight of a subclass."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False) if isinstance(weight, Flat) else weight

    def forward(self, x: Tensor) -> Tensor:
        if type(self.weight).__name__ != "Stateful":  # as peft asks
            return F.linear(x, self.weight)
        weight: Any = self.weight.to(x.device)
        self.weight = weight
        return _multiply(x, weight, weight.state.scales.of_blocks, weight.state.table)


def flat(out: int, inside: int) -> nn.Module:
    """A frozen layer with a weight that flattens."""
    codes, scales, table = _to_codes(torch.randn(out, inside) / inside**0.5)
    return LowBits(Flat(codes, scales, table, torch.float32))


def stateful(out: int, inside: int) -> nn.Module:
    """A frozen layer with a weight that has attributes; one state is inside another."""
    codes, scales, table = _to_codes(torch.randn(out, inside) / inside**0.5)
    return LowBits(Stateful(codes, _State(table, scales)))


def fp8(recipe: str) -> Callable[[int, int], nn.Module]:
    """Layers of torchao that are trained in bfloat16, with products in fp8."""

    def make(out: int, inside: int) -> nn.Module:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear

        layer: nn.Module = Float8Linear.from_float(
            nn.Linear(inside, out, bias=False, dtype=torch.bfloat16), config=Float8LinearConfig.from_recipe_name(recipe)
        )
        return layer

    return make


def four_bits(*, double: bool, dtype: torch.dtype | None = None) -> Callable[[int, int], nn.Module]:
    """Layers of bitsandbytes, with scales in 8 bits or not."""

    def make(out: int, inside: int) -> nn.Module:
        import bitsandbytes

        layer = bitsandbytes.nn.Linear4bit(
            inside, out, bias=False, quant_type="nf4", compress_statistics=double, compute_dtype=dtype
        )
        quantised: nn.Module = layer.to(dtype or torch.float32).to("cpu")
        return quantised

    return make


def dora(*, double: bool) -> Callable[[int, int], nn.Module]:
    """Layers of bitsandbytes with adapters of peft, for which their weight is made whole, and its rows measured."""

    def make(out: int, inside: int) -> nn.Module:
        import peft

        base = nn.Sequential(four_bits(double=double)(out, inside))
        base.is_loaded_in_4bit = True  # type: ignore[assignment]  # by which peft chooses its layers
        adapted: Any = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["0"], use_dora=True))
        layer: nn.Module = adapted.base_model.model[0]
        return layer

    return make


def nf4(out: int, inside: int) -> nn.Module:
    """A layer with a weight of torchao's in 4 bits."""
    from torchao.quantization.quantize_.workflows import to_nf4

    layer = nn.Linear(inside, out, bias=False)
    layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 16), requires_grad=False)
    return layer


def int8(out: int, inside: int) -> nn.Module:
    """A layer with a weight of torchao's in 8 bits."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(inside, out, bias=False))
    quantize_(model, Int8WeightOnlyConfig(version=2))
    return model[0].requires_grad_(False)


class Adapted(nn.Module):
    """A frozen layer, and an update of low rank that is trained, with dropout in front of it."""

    def __init__(self, base: nn.Module, out: int, inside: int, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(dropout)
        self.down = nn.Linear(inside, 4, bias=False, dtype=dtype)
        self.up = nn.Linear(4, out, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.base(x)
        return base + self.up(self.down(self.dropout(x)))


class _Block(nn.Module):
    def __init__(
        self, make: Callable[[int, int], nn.Module], dropout: float, dtype: torch.dtype, width: int, inside: int
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.norm.requires_grad_(False)
        self.up = Adapted(make(inside, width), inside, width, dropout, dtype)
        self.down = Adapted(make(width, inside), width, inside, dropout, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tuned(nn.Module):
    """A small language model whose layers' weights come from ``make``; adapters and the head are trained."""

    def __init__(
        self, make: Callable[[int, int], nn.Module], dropout: float = 0.1, dtype: torch.dtype = torch.float32,
        width: int = WIDTH, inside: int = INSIDE,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(19, width, dtype=dtype)
        self.embedding.requires_grad_(False)
        self.layers = nn.ModuleList([_Block(make, dropout, dtype, width, inside) for _ in range(2)])
        self.head = nn.Linear(width, 19, dtype=dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), y.flatten())
