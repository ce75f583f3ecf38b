"""Make a model's forward see an absent GPU while it is traced on a CPU's fake tensors.

Tensors report the GPU as their device, tensors created there are created on the CPU, the GPU's compute capability is
told, and operators that torch decomposes by device are decomposed as on the GPU. The traced graph is then moved to the
GPU (``retarget``).

Does not handle: a tensor that is created on the CPU in a forward and moved to the GPU, whose copy leaves no trace;
batch norm, which has a cuDNN operator of its own, and recurrent layers; group norm of images in channels_last, whose
gradient autograd lays out by device. A GPU captures other graphs for these, and refuses the plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from zerofx.capture.for_gpu.attention import Attention, attend, kernel_of
from zerofx.capture.layers import LINE_KEY
from zerofx.errors import CaptureError
from zerofx.torch_private.capture import FakeTensorMode, fake_tensor, pretend_capability
from zerofx.torch_private.dispatch import override_composite, python_dispatcher
from zerofx.torch_private.modules import annotations_of
from zerofx.torch_private.tensors import is_traced

_CPU = torch.device("cpu")
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
# What torch composes of others by the device. Python's dispatcher has a GPU's dropout; it is not left on for the rest,
# because it takes apart what a GPU has operators for, too.
_COMPOSED = frozenset({F.scaled_dot_product_attention, F.multi_head_attention_forward, F.dropout, torch.dropout})


@dataclass(frozen=True)
class AbsentGpu:
    """An NVIDIA GPU of that compute capability."""

    capability: tuple[int, int]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    @contextlib.contextmanager
    def emulate(self) -> Iterator[None]:
        """While open, tracing on the CPU records the operators that the GPU would run."""

        def attention(
            query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
            is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
        ) -> Tensor:  # fmt: skip
            call = Attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            return attend(call, kernel_of(call, self.capability))

        with override_composite(_ATTENTION, attention), pretend_capability(self.capability), _Disguise(self.device):
            yield


class _Disguise(TorchFunctionMode):
    """Makes traced tensors report ``device``, and creates tensors on the CPU that are asked for there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._answers: dict[Any, Any] = {
            Tensor.device.__get__: device,
            Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
            Tensor.get_device: device.index,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._answers and is_traced(args[0]):
            return self._answers[func]
        if func is Tensor.cuda:
            return args[0]
        if func in _COMPOSED:
            with python_dispatcher():
                return func(*args, **(kwargs or {}))
        if func is torch.device:  # a name, and nothing is made
            return func(*args, **(kwargs or {}))
        named = {name: self._to_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._to_cpu, args), **named)

    def _to_cpu(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return _CPU if value.type == self._device.type else value
        return _CPU if isinstance(value, str) and value.partition(":")[0] == self._device.type else value


def retarget(graph_module: fx.GraphModule, device: torch.device, mode: FakeTensorMode) -> None:
    """Move a joint graph's nodes to ``device``; ``mode`` is that of its fake tensors.

        arange(8, device="cpu")            strides and dtypes of a CPU's kernels
          ->  arange(8, device="cuda:0")   those of the GPU's

    Operators are run again on fake tensors of the GPU, one by one, because some results depend on the device:
    statistics of a norm in another dtype, an image in another memory format.

    Raises:
        CaptureError: an operator does not work on what others give on ``device``; with its line.
    """

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device == _CPU:
            return fake_tensor(mode, value.shape, value.stride(), value.dtype, device)
        return value

    def rename(arg: Any) -> Any:
        return device if isinstance(arg, torch.device) and arg == _CPU else arg

    with mode, torch.no_grad():
        for node in graph_module.graph.nodes:
            if node.op == "placeholder" or node.op == "get_attr":
                node.meta["val"] = map_aggregate(node.meta["val"], move)
            elif node.op == "call_function":
                node.args, node.kwargs = map_aggregate(node.args, rename), map_aggregate(node.kwargs, rename)
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
                try:
                    node.meta["val"] = node.target(*args, **kwargs)
                except RuntimeError as error:
                    line = annotations_of(node).get(LINE_KEY, "(line not found)")
                    raise CaptureError(
                        f"expected operators that run on {device.type}, found that {node.target} does not: {error}, "
                        f"at\n  {line}\nChange what it is given, or replace it."
                    ) from error
