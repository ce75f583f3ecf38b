"""Move a graph that was traced on a CPU's fake tensors to a GPU: its devices, and the fake tensors of its nodes.

    arange(8, device="cpu")            strides and dtypes of a CPU's kernels
      ->  arange(8, device="cuda:0")   those of the GPU's

Operators are run anew on fake tensors of the GPU, one by one, because some say of their results what depends on the
device: statistics of a norm in another dtype, an image in another memory format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from zerofx.torch_private.capture import FakeTensorMode, fake_tensor

_CPU = torch.device("cpu")


def retarget(graph_module: fx.GraphModule, device: torch.device, mode: FakeTensorMode) -> None:
    """Move a joint graph's nodes to ``device``; ``mode`` is that of its fake tensors.

    Raises:
        RuntimeError: an operator does not work on what others give on ``device``, as torch says it.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device == _CPU:
            return fake_tensor(mode, value.shape, value.stride(), value.dtype, device)
        return value

    def renamed(arg: Any) -> Any:
        return device if isinstance(arg, torch.device) and arg == _CPU else arg

    with mode, torch.no_grad():
        for node in graph_module.graph.nodes:
            if node.op == "placeholder" or node.op == "get_attr":
                node.meta["val"] = map_aggregate(node.meta["val"], moved)
            elif node.op == "call_function":
                node.args, node.kwargs = map_aggregate(node.args, renamed), map_aggregate(node.kwargs, renamed)
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
