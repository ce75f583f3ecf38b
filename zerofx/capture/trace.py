"""Capture: one joint graph of forward, loss and backward of an unmodified module, on fake tensors.

This is the only file that touches torch's private tracing interfaces. AOTAutograd's joint export gives the graph; hooks
that stand on the modules for the time of the capture tell each node the module it came from, in forward *and* backward.
Nothing of the model is computed or changed: its parameters and buffers are stood in for by fake tensors and put back.
"""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses import FakeTensor, FakeTensorMode

from zerofx.capture.blame import explain, unknown_input
from zerofx.capture.canonicalise import (
    assert_values,
    check_results,
    handed_out,
    lift_constants,
    name_kinds_of_devices,
    own_storage,
    real_gradient,
    real_parameters,
    refuse_mixed_products,
    refuse_sparse,
    replace_tangent,
    sum_gradients,
)
from zerofx.capture.compat.decompositions import decompositions
from zerofx.capture.layer_annotations import LAYER_KEY, LINE_KEY, LOSS_LAYER, SourceLines, annotated, layer_annotations
from zerofx.capture.layers import find_units
from zerofx.capture.loss import Loss, LossModule, Objective
from zerofx.capture.outside import OutsideFoundError, StandInMaker
from zerofx.capture.randomness import drawing_with_torch
from zerofx.capture.values.collective_calls import traceable_collectives
from zerofx.capture.values.known import KnownValues
from zerofx.capture.values.watched_calls import CallWatcher
from zerofx.errors import CaptureError, ZeroFXError, warn, working
from zerofx.ir.batch import Batch as Batch
from zerofx.ir.facts import Origin, Phase, Placeholder, Role, origin, set_origin, set_placeholder, set_source_line
from zerofx.ir.graph import ParameterInfo, StepGraph, Strides, cast_of, parameter_infos
from zerofx.torch_private.checkpoints import without_checkpoints
from zerofx.torch_private.dispatch import without_log_of_fakes, without_modes
from zerofx.torch_private.modules import buffer_table, parameter_table


def capture(
    model: nn.Module,
    batch: Batch,
    *,
    loss_fn: Loss = None,
    compute_dtype: torch.dtype | None = None,
    num_micro_batches: int = 1,
    strides: Strides = MappingProxyType({}),
) -> StepGraph:
    """Trace ``loss = model(*batch)`` and its backward.

    Args:
        model: any module; parameters and buffers may be on ``meta``.
        batch: the batch; only shapes, dtypes and constants are used.
        loss_fn: called as ``loss_fn(outputs, *rest)`` where the model does not return its loss (``calling.py``), or the
            step's whole objective.
        compute_dtype: the dtype in which the graph reads floating-point parameters and batch tensors; None as they are.
        num_micro_batches: what the loss is divided by, where ``batch`` is one of several whose gradients are summed.
        strides: those of parameters whose tensors do not have them now, because their values are elsewhere.

    Returns:
        A ``StepGraph`` whose placeholders are parameters, buffers and batch tensors, and whose outputs are the loss,
        the next values of mutated buffers, and a gradient for each parameter that the loss depends on.

    Raises:
        CaptureError: the model cannot be one graph; the message names the source line.
    """
    parameters = parameter_infos(model, compute_dtype, strides)
    objective = Objective.of(loss_fn)
    return objective.outside.traced(
        lambda: _captured(model, batch, objective, compute_dtype, num_micro_batches, strides, parameters)
    )


def _captured(
    model: nn.Module,
    batch: Batch,
    objective: Objective,
    compute_dtype: torch.dtype | None,
    num_micro_batches: int,
    strides: Strides,
    parameters: tuple[ParameterInfo, ...],
) -> StepGraph:
    """What ``capture`` gives.

    Raises:
        OutsideFoundError: the objective uses tensors that it had not been known to use.
    """
    watcher = CallWatcher()
    with (
        traceable(model, batch, objective, compute_dtype, num_micro_batches, strides) as (lossy, fakes, device, _),
        watcher,
        SourceLines(),
        contextlib.ExitStack() as inner,
    ):
        try:
            joint = aot_export_joint_with_descriptors(inner, lossy, fakes, decompositions=decompositions(device))
        except (ZeroFXError, OutsideFoundError):
            raise
        except Exception as error:
            raise explain(error, batch) from error
    if lossy.counts:
        warn(
            f"expected a forward that changes no Python values of its modules from call to call, found that it changes "
            f"{', '.join(lossy.counts)}: the step has what they were while it was captured; register what is to change "
            f"as a buffer"
        )
    with working("make a step graph of what was captured"):
        return _to_step_graph(joint.graph_module, model, batch, parameters, device, watcher, lossy)


@contextlib.contextmanager
def traceable(
    model: nn.Module,
    batch: Batch,
    loss_fn: Loss,
    compute_dtype: torch.dtype | None,
    num_micro_batches: int,
    strides: Strides,
) -> Iterator[tuple[LossModule, tuple[torch.Tensor, ...], torch.device, FakeTensorMode]]:
    """While open, the model is on fake tensors, and what runs knows its layer (``running_layer``).

    Gives the module that makes the loss, the fake tensors of the batch to call it with, their device, and their mode.
    """
    mode, device = fake_mode(), tracing_device(model, batch)
    with (
        torch.enable_grad(),
        without_log_of_fakes(),
        _fake_state(model, mode, compute_dtype, device, strides) as of_model,
        layer_annotations(model),
        _compiling(),
        without_checkpoints(),
        traceable_collectives(),
        drawing_with_torch(),
    ):
        fakes = tuple(_fake(mode, t, t.stride(), cast_of(t, compute_dtype), device) for t in batch.tensors)
        loss_scope = partial(annotated, LOSS_LAYER)

        def outside(real: torch.Tensor) -> torch.Tensor:
            where = device if real.is_meta else real.device
            with without_modes():
                fake = _fake(mode, real, real.stride(), real.dtype, where)
            return _fake_parameter(fake, requires_grad=True) if real.requires_grad else fake

        maker = StandInMaker(outside, of_model)
        with KnownValues() as known:
            lossy = LossModule(model, batch, Objective.of(loss_fn), num_micro_batches, loss_scope, known, maker)
            yield lossy, fakes, device, mode


def fake_mode() -> FakeTensorMode:
    """What makes the fake tensors of a captured graph."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_device(fake: torch.Tensor) -> torch.device:
    """The device that a fake tensor stands for a tensor of: what its mode answers when the dispatcher asks."""
    assert isinstance(fake, FakeTensor)
    return fake.device


def tracing_settings() -> tuple[str, ...]:
    """What tracing may depend on beside the model, its batch and the versions of what is installed, as texts."""
    kinds = ("cpu", "cuda")
    return (
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        repr(sorted(functorch_config.save_config_portable().items())),
        f"{torch.get_default_dtype()} {torch.is_grad_enabled()} {torch.is_inference_mode_enabled()}",
        f"autocast {[(torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in kinds]}",
        f"deterministic {torch.are_deterministic_algorithms_enabled()} {torch.backends.cudnn.deterministic}",
        f"libraries {torch.backends.mkldnn.enabled} {torch.backends.cudnn.enabled} {torch.backends.cudnn.benchmark}",
        torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
    )


def dtype_settings() -> dict[str, str]:
    """What programs change of those from call to call, under names of two words each."""
    autocast = [
        f"{torch.get_autocast_dtype(kind)} on {kind}" for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    ]
    return {"default dtype": str(torch.get_default_dtype()), "autocast to": ", ".join(autocast) or "none"}


def saves_by_hook() -> bool:
    """Whether what backward needs is saved through hooks, as ``torch.utils.checkpoint`` does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def tracing_device(model: nn.Module, batch: Batch) -> torch.device:
    """The device to trace on: the model's, or the batch's when the model is on ``meta``, or the CPU."""
    for tensor in (*model.parameters(), *batch.tensors):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


def _fake(
    mode: FakeTensorMode, real: torch.Tensor, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A fake tensor with memory of its own: what ``empty_strided`` gives in ``mode``, at a tenth of its cost."""
    meta = torch.empty_strided(real.shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, device)


def _fake_parameter(fake: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """``fake`` as a parameter: what ``nn.Parameter`` makes of a tensor of another class, but for a copy of it."""
    fake._is_param = True
    return fake.requires_grad_(requires_grad)


@contextlib.contextmanager
def _fake_state(
    model: nn.Module,
    mode: FakeTensorMode,
    compute_dtype: torch.dtype | None,
    device: torch.device,
    strides: Strides,
) -> Iterator[Mapping[int, tuple[dict[str, Any], str]]]:
    """Fake tensors in the places of the model's parameters and buffers, the same tensor where it was the same.

    Gives where each real one's stand-in is, by its identity.
    """
    fakes: dict[int, torch.Tensor] = {}
    saved: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    table: dict[str, Any]
    for module in model.modules():
        for table, cast in ((parameter_table(module), True), (buffer_table(module), False)):
            for name, real in table.items():
                if real is None:
                    continue
                if id(real) not in fakes:
                    dtype = cast_of(real, compute_dtype) if cast else real.dtype
                    fake = _fake(mode, real, strides.get(id(real), real.stride()), dtype, device)
                    fakes[id(real)] = _fake_parameter(fake, requires_grad=real.requires_grad) if cast else fake
                saved.append((table, name, real))
    for table, name, real in saved:
        table[name] = fakes[id(real)]
    try:
        yield {id(real): (table, name) for table, name, real in saved}
    finally:
        for table, name, real in saved:
            table[name] = real


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Let ``torch.compiler.is_compiling()`` be true, which libraries ask before they look at a tensor's values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _to_step_graph(
    traced: fx.GraphModule,
    model: nn.Module,
    batch: Batch,
    parameters: tuple[ParameterInfo, ...],
    device: torch.device,
    watcher: CallWatcher,
    lossy: LossModule,
) -> StepGraph:
    graph = traced.graph
    step = StepGraph(graph=graph, device=device, parameters=parameters, units=frozenset(find_units(model)))
    first_name = {alias: info.name for info in parameters for alias in info.aliases} | _buffer_names(model)
    check_results(graph)
    _set_origins(graph)
    merged: dict[str, fx.Node] = {}
    unread: list[fx.Node] = []  # of what is outside of the model
    for node in list(graph.find_nodes(op="placeholder")):
        desc = node.meta["desc"]
        match desc:
            case TangentAOTInput():
                one = replace_tangent(graph, node)
                if one is not None:
                    assert_values(graph, one, zip(_checks(graph, lossy), lossy.checked, strict=True))
            case ParamAOTInput(target=target) | BufferAOTInput(target=target) if _is_outside(target):
                if set(node.users) <= {graph.output_node()}:  # nothing reads it
                    unread.append(node)
                _rename(node, Role.OUTSIDE, lossy.outside_names[int(target.removeprefix(_OUTSIDE))])
            case ParamAOTInput(target=target) | BufferAOTInput(target=target):
                name = first_name[_inner_name(target)]
                role = Role.PARAMETER if isinstance(desc, ParamAOTInput) else Role.BUFFER
                if name in merged:
                    node.replace_all_uses_with(merged[name])
                    graph.erase_node(node)
                else:
                    merged[name] = _rename(node, role, name)
            case PlainAOTInput(idx=index):
                _rename(node, Role.INPUT, batch.names[index])
            case _:
                raise unknown_input(graph, desc)
    lift_constants(traced, step)
    real_parameters(step)
    name_kinds_of_devices(graph)
    _classify_outputs(step, first_name, batch, watcher, lossy)
    for node in unread:
        graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()
    return step


def _checks(graph: fx.Graph, lossy: LossModule) -> list[fx.Node]:
    """What the forward checks of values."""
    output = graph.output_node()
    outputs: Any = output.args[0]
    returned = [one for one, desc in zip(outputs, output.meta["desc"], strict=True) if isinstance(desc, PlainAOTOutput)]
    return returned[1 + len(lossy.rebound) :][: len(lossy.checked)]


def _classify_outputs(
    step: StepGraph,
    first_name: Mapping[str, str],
    batch: Batch,
    watcher: CallWatcher,
    lossy: LossModule,
) -> None:
    loss: fx.Node | None = None
    extras: list[fx.Node] = []
    mutations: dict[str, fx.Node] = {}
    arrived: dict[str, list[fx.Node]] = {}
    trainable = {info.name for info in step.parameters if info.requires_grad}
    outputs: Any = step.output.args[0]
    for node, desc in zip(outputs, step.output.meta["desc"], strict=True):
        match desc:
            case PlainAOTOutput(idx=0):
                loss = node
            # After what in-place calls make of a buffer; then come checks, which are part of the graph by now.
            case PlainAOTOutput(idx=index) if index <= len(lossy.rebound):
                mutations[lossy.rebound[index - 1]] = node
            case PlainAOTOutput(idx=index) if index > len(lossy.rebound) + len(lossy.checked):
                extras.append(node)
            case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=target) | ParamAOTInput(target=target)) if (
                _is_outside(target)
            ):
                name = lossy.outside_names[int(target.removeprefix(_OUTSIDE))]
                raise CaptureError(
                    f"expected a step that changes nothing outside of the model, found that it changes {name} in "
                    f"place: call eval() on its module if it is a statistic of a layer in training mode, make its "
                    f"module a part of the model, or change it between steps"
                )
            case GradAOTOutput(grad_of=ParamAOTInput(target=target)) if _is_outside(target) and node is not None:
                name = lossy.outside_names[int(target.removeprefix(_OUTSIDE))]
                raise CaptureError(
                    f"expected a loss whose gradients are those of the model's parameters, found that it has one for "
                    f"{name}, which is not of the model and would not be trained: compute with it inside "
                    f"torch.no_grad(), call requires_grad_(False) on it, or make its module a part of the model"
                )
            case GradAOTOutput(grad_of=ParamAOTInput(target=target)) if _is_outside(target):
                pass
            case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=target)):
                mutations[first_name[_inner_name(target)]] = node
            case InputMutationAOTOutput(mutated_input=changed):
                lines = "\n  ".join(list(dict.fromkeys(watcher.lines))[:5]) or "(line not found)"
                raise CaptureError(
                    f"expected a forward that leaves its batch and parameters as they are, found an in-place change of "
                    f"{_describe_input(changed, batch)}. In-place calls that were traced:\n  {lines}\n"
                    f"Use the out-of-place form (x = x + 1, not x.add_(1)), clone the tensor first, or build an "
                    f"Embedding without max_norm."
                )
            case GradAOTOutput(grad_of=ParamAOTInput(target=target)) if node is not None:
                name = first_name[_inner_name(target)]
                if name in trainable:
                    arrived.setdefault(name, []).append(real_gradient(step.graph, node))
            case _:
                pass
    if loss is None:
        raise CaptureError("the captured graph has no loss; return a scalar from the model or give loss_fn")
    if not arrived:
        raise CaptureError(
            "expected a loss that depends on a trainable parameter, found a scalar that depends on none of the "
            "model's: check that forward uses them and that nothing detaches the loss"
        )
    refuse_sparse(step.graph)
    refuse_mixed_products(step.graph)
    loss = own_storage(step.graph, loss)
    gradients = {name: sum_gradients(step.graph, nodes) for name, nodes in arrived.items()}
    step.returned = lossy.returned
    handed = [handed_out(step.graph, one, partial(lossy.returned.shows, i)) for i, one in enumerate(extras)]
    step.set_outputs(loss, mutations, gradients, extras=handed)
    step.output.meta.pop("desc")


def _buffer_names(model: nn.Module) -> dict[str, str]:
    """Of each buffer by each of its names: the one that ``named_buffers`` has, where modules share a tensor."""
    first = {buffer: name for name, buffer in model.named_buffers()}
    return {name: first[buffer] for name, buffer in model.named_buffers(remove_duplicate=False)}


def _set_origins(graph: fx.Graph) -> None:
    """Layer, phase and source line of every call.

    Backward starts at the first node that depends on the tangent. A node without a layer of its own (the sum of two
    gradients that flow into one tensor) belongs with its latest argument, whose arrival triggered it.
    """
    phase = Phase.FORWARD
    order: dict[fx.Node, int] = {}
    for position, node in enumerate(graph.nodes):
        order[node] = position
        if node.op != "call_function":
            continue
        if any(isinstance(arg.meta.get("desc"), TangentAOTInput) for arg in node.all_input_nodes):
            phase = Phase.BACKWARD
        annotations = node.meta.get("custom") or {}
        set_source_line(node, annotations.get(LINE_KEY, ""))
        layer = annotations.get(LAYER_KEY)
        if layer is None and node.all_input_nodes:
            layer = origin(max(node.all_input_nodes, key=order.__getitem__)).layer
        set_origin(node, Origin(layer or "", phase))


def _rename(node: fx.Node, role: Role, name: str) -> fx.Node:
    node.name = node.graph._graph_namespace.create_name(placeholder_name(role, name), None)
    node.target = node.name
    return set_placeholder(node, Placeholder(role, name))


def placeholder_name(role: Role, name: str) -> str:
    """What the placeholder of a parameter, a buffer or a batch tensor is called, unless the name is taken."""
    prefix = {Role.PARAMETER: "", Role.BUFFER: "buffer_", Role.INPUT: "batch_", Role.OUTSIDE: "outside_"}[role]
    stem = prefix + re.sub(r"\W+", "_", name).strip("_").removeprefix(prefix)
    return stem if stem and not stem[0].isdigit() else f"_{stem}"


_OUTSIDE = "outside."  # what names of stand-ins begin with in a ``LossModule``


def _is_outside(name: str) -> bool:
    return name.startswith(_OUTSIDE)


def _inner_name(name: str) -> str:
    return name.removeprefix("model.")


def _describe_input(desc: Any, batch: Batch) -> str:
    target = getattr(desc, "target", None)
    return f"parameter {_inner_name(target)}" if target else batch.names[desc.idx]
