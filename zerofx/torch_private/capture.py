"""Tracing: AOTAutograd's joint graph, the descriptions of its inputs and outputs, and fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import config as _functorch_config
from torch._functorch._aot_autograd.descriptors import BufferAOTInput as BufferAOTInput
from torch._functorch._aot_autograd.descriptors import GradAOTOutput as GradAOTOutput
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput as InputMutationAOTOutput
from torch._functorch._aot_autograd.descriptors import ParamAOTInput as ParamAOTInput
from torch._functorch._aot_autograd.descriptors import PlainAOTInput as PlainAOTInput
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput as PlainAOTOutput
from torch._functorch._aot_autograd.descriptors import TangentAOTInput as TangentAOTInput
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._subclasses import FakeTensor
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch.utils._pytree import tree_map_only

from zerofx.torch_private import operators as operators  # whose fakes a trace needs
from zerofx.torch_private.versions import TORCH


def joint_graph(
    module: nn.Module, fakes: tuple[torch.Tensor, ...], decompositions: Mapping[Any, Callable[..., Any]]
) -> fx.GraphModule:
    """Trace a module's forward and backward; ``descriptions`` name its inputs and outputs."""
    tables: list[dict[str, Any]] = [table for part in module.modules() for table in (part._parameters, part._buffers)]
    before = [dict(table) for table in tables]
    with contextlib.ExitStack() as stack, _keep_checks():
        joint = aot_export_joint_with_descriptors(stack, module, fakes, decompositions=dict(decompositions))
    for table, entries in zip(tables, before, strict=True):  # torch leaves a tensor of its own in what has two names
        table.update(entries)
    for node in joint.graph_module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns:
            node.meta.setdefault("val", None)  # which a trace leaves out
    return joint.graph_module


def leaves_out_checks() -> bool:
    """True if tracing drops the checks of linear algebra, since nothing reads their results: to torch 2.12."""
    return TORCH < (2, 13)


@contextlib.contextmanager
def _keep_checks() -> Iterator[None]:
    """While open, tracing keeps the checks of linear algebra in order, by tokens."""
    if not leaves_out_checks():
        yield
        return
    handle = _register_effectful_op("aten::_linalg_check_errors", _EffectType.ORDERED)
    try:
        yield
    finally:
        handle.destroy()


def descriptions(node: fx.Node) -> Any:
    """The meaning of a joint graph's placeholder; of its output node, the meaning of each result, in order."""
    return node.meta["desc"]


def is_tangent(node: fx.Node) -> bool:
    """True if a node of a joint graph is the gradient that goes into its backward."""
    return isinstance(node.meta.get("desc"), TangentAOTInput)


def aot_configuration() -> str:
    """AOTAutograd's settings, as a text."""
    return repr(sorted(_functorch_config.save_config_portable().items()))


def fake_mode() -> FakeTensorMode:
    """A mode that makes the fake tensors of a captured graph."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class AbsentDeviceFakes(FakeTensorMode):
    """Makes fake tensors on the CPU for a trace that is then moved to ``device``, which need not be there.

    What a CPU has no kernel for, as a histogram of integers, is asked of the device's: operators that write to nothing,
    and give no view. Others are refused as on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._absent = device

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().dispatch(func, types, args, kwargs or {})
        except RuntimeError:
            schema = getattr(func, "_schema", None)
            if schema is None or any(entry.alias_info for entry in (*schema.arguments, *schema.returns)):
                raise
            given = tree_map_only(FakeTensor, partial(self._move, device=self._absent), (args, kwargs or {}))
            with contextlib.suppress(RuntimeError):
                result = super().dispatch(func, types, *given)
                return tree_map_only(FakeTensor, partial(self._move, device=torch.device("cpu")), result)
            raise

    def _move(self, fake: FakeTensor, device: torch.device) -> torch.Tensor:
        return fake_tensor(self, fake.shape, fake.stride(), fake.dtype, device)


def is_fake(tensor: torch.Tensor) -> bool:
    """True for a tensor without values, of a fake mode."""
    return isinstance(tensor, FakeTensor)


def expect_fake(tensor: torch.Tensor) -> FakeTensor:
    """The tensor, asserted to be a fake one."""
    assert isinstance(tensor, FakeTensor), "a captured graph has fake values"
    return tensor


def fake_tensor(
    mode: FakeTensorMode, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A fake tensor with memory of its own: the result of ``empty_strided`` in ``mode``, at a tenth of its cost."""
    meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, device)


def fake_device(fake: torch.Tensor) -> torch.device:
    """The device that a fake tensor reports to the dispatcher."""
    assert isinstance(fake, FakeTensor)
    return fake.device


def forward_class(function: Any) -> type | None:
    """The ``torch.autograd.Function`` that a node of autograd's graph is the backward of; None for one in C++."""
    return getattr(type(function), "_forward_cls", None)


def saves_by_hook() -> bool:
    """True if tensors for backward are saved through hooks, as ``torch.utils.checkpoint`` does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def pretend_compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true, which libraries ask before they look at a tensor's values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """That of an NVIDIA GPU; None for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and not torch.version.hip else None


@contextlib.contextmanager
def pretend_capability(capability: tuple[int, int]) -> Iterator[None]:
    """Make ``torch.cuda.get_device_capability()`` say that of an absent GPU, by which libraries choose kernels."""
    before = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: capability
    try:
        yield
    finally:
        torch.cuda.get_device_capability = before


def rename(node: fx.Node, name: str) -> None:
    """Name a node ``name``, with a number appended if the name is taken."""
    node.name = node.graph._graph_namespace.create_name(name, None)
