"""The rewrites of a traced joint graph, in order."""

from __future__ import annotations

from zerofx.capture.checkpointed.bring_forward import BringForward
from zerofx.capture.normalise.checks import CheckResults, Refuse
from zerofx.capture.normalise.gradients import BeginBackward, RealGradients, SumGradients
from zerofx.capture.normalise.inputs import LiftConstants, NameDevices, NameInputs, RealParameters
from zerofx.capture.normalise.joint import Normalisation
from zerofx.capture.normalise.outputs import CheckFirst, HandOut, OwnLoss, SortOutputs, WriteOutputs
from zerofx.capture.normalise.set_origins import SetOrigins

NORMALISATIONS: tuple[Normalisation, ...] = (
    CheckResults(),  # results of linear algebra are read after their check
    BringForward(),  # what is run again for buffers, right after its inputs
    SetOrigins(),  # layer, phase and line of every call
    NameInputs(),  # parameters, buffers and batch tensors by name, each once
    BeginBackward(),  # the loss's own gradient is 1, after what forward checks of values
    LiftConstants(),  # tensors that the model holds elsewhere become inputs
    RealParameters(),  # complex parameters come as real numbers
    NameDevices(),  # "cuda", not "cuda:1"
    SortOutputs(),  # loss, extras, buffers and gradients told apart
    RealGradients(),  # complex gradients as real numbers
    Refuse(),  # sparse gradients, products of several dtypes
    OwnLoss(),  # a loss that is a view is copied
    SumGradients(),  # one gradient for a tied parameter
    HandOut(),  # extras as the step may hand them out
    CheckFirst(),  # what an evaluation gives, after what its forward checks of values
    WriteOutputs(),  # the output node, and nothing that is not read
)
