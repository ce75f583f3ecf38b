"""Capture: one joint graph of forward, loss and backward of an unmodified module, on fake tensors.

AOTAutograd's joint export gives the graph; hooks that are on the modules during the capture tell each node the module
it came from, in forward *and* backward. Nothing of the model is computed or changed (``traceable.py``).
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import nn

from zerofx.capture.blame import explain
from zerofx.capture.compat.decompositions import eager_decompositions
from zerofx.capture.for_gpu.gpu import retarget
from zerofx.capture.free_tensors.free_tensors import RetraceError
from zerofx.capture.layers import SourceLines
from zerofx.capture.normalise.joint import Joint
from zerofx.capture.normalise.phase import NORMALISATIONS
from zerofx.capture.objective.loss import LossModule
from zerofx.capture.objective.two_calls import check_second_call
from zerofx.capture.replay import trace_logging
from zerofx.capture.traceable import CaptureOptions, Forward, traceable
from zerofx.capture.values.watched_calls import CallWatcher
from zerofx.errors import ZeroFXError, warn, wrap_defects
from zerofx.ir.batch import Batch as Batch
from zerofx.ir.graph import StepGraph
from zerofx.ir.returned import Returned
from zerofx.torch_private.capture import FakeTensorMode, compute_capability, joint_graph
from zerofx.units import first_few


def capture(model: nn.Module, batch: Batch, **options: Unpack[CaptureOptions]) -> StepGraph:
    """Trace ``loss = model(*batch)`` and its backward.

    Args:
        model: any module; parameters and buffers may be on ``meta``.
        batch: the batch; only shapes, dtypes and constants are used.
        loss_fn: called as ``loss_fn(outputs, *rest)`` if the model does not return its loss (``calling.py``), or the
            step's whole objective.
        compute_dtype: the dtype in which the graph reads floating-point parameters and batch tensors, with the modules
            that keep their own, if any; None as they are.
        num_micro_batches: the divisor of the loss, if ``batch`` is one of several whose gradients are summed.
        strides: strides of parameters whose tensors do not have them at present, because their values are elsewhere.
        gpu: an absent GPU to capture for; None for the model's device.

    Returns:
        A ``StepGraph`` whose placeholders are parameters, buffers and batch tensors, and whose outputs are the loss,
        the next values of mutated buffers, and a gradient for each parameter that the loss depends on.

    Raises:
        CaptureError: the model cannot be one graph; the message names the source line.
    """
    return capture_forward(Forward(model, batch, **options))


def capture_forward(forward: Forward, returned: Returned | None = None) -> StepGraph:
    """The result of ``capture``; views are shown by the strides of ``returned``, the extras of an untraced forward."""
    return trace_logging(forward, lambda compiled: _capture(forward, compiled, returned))


def _capture(forward: Forward, compiled: bool, returned: Returned | None) -> StepGraph:
    """The result of ``capture`` for a forward that is told whether it is ``compiled``.

    Raises:
        RetraceError: the objective uses free tensors that were not known.
    """
    watcher, batch, gpu = CallWatcher(), forward.batch, forward.gpu
    with traceable(forward, compiled=compiled) as traced, watcher, SourceLines():
        lossy, fakes, here, mode = traced
        device = here if gpu is None else gpu.device
        try:
            joint = joint_graph(lossy, fakes, eager_decompositions(device))
            _check_calls(lossy, fakes, mode)
        except (ZeroFXError, RetraceError):
            raise
        except Exception as error:
            raise explain(error, batch) from error
    if gpu is not None:
        retarget(joint, device, mode)
    with wrap_defects("make a step graph of what was captured"):
        step = StepGraph(joint.graph, device, forward.parameters(), forward.units())
        if returned is not None and returned.num_tensors == lossy.returned.num_tensors:
            lossy.returned = returned
        capability = compute_capability(device) if gpu is None else gpu.capability
        rewritten = Joint(step, joint, forward.model, batch, watcher, lossy, capability)
        for rewrite in NORMALISATIONS:
            rewrite.run(rewritten)
        return step


def check_calls(forward: Forward) -> None:
    """Give the errors and warnings of ``capture_forward`` about attributes left on modules, if the graph is known.

    Raises:
        CaptureError: later calls differ from the first.
    """

    def call(compiled: bool) -> None:
        with traceable(forward, compiled=compiled) as (lossy, fakes, _, mode):
            with mode:
                lossy(*fakes)
            _check_calls(lossy, fakes, mode)

    trace_logging(forward, call)


def _check_calls(lossy: LossModule, fakes: tuple[torch.Tensor, ...], mode: FakeTensorMode) -> None:
    """Check that a step can be the first call of a forward, again and again; ``lossy`` has been called."""
    if lossy.objective.logging.is_on:  # whose replay does all of it in each step
        return
    check_second_call(lossy, fakes, mode)
    if lossy.left:
        warn(
            f"expected a forward that leaves no tensors on its modules, found that it leaves {first_few(lossy.left)}: "
            f"a step leaves none, and each call has those that were there while it was captured; register as a buffer "
            f"what the next call is to have, and return from forward= what is to be looked at"
        )
