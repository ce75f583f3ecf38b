"""The rewrites of a traced joint graph, in order."""

from __future__ import annotations

from zerofx.capture.checkpointed.bring_forward import BringForward
from zerofx.capture.normalise.begin_backward import BeginBackward
from zerofx.capture.normalise.check_first import CheckFirst
from zerofx.capture.normalise.check_results import CheckResults
from zerofx.capture.normalise.hand_out import HandOut
from zerofx.capture.normalise.joint import Normalisation
from zerofx.capture.normalise.lift_constants import LiftConstants
from zerofx.capture.normalise.name_devices import NameDevices
from zerofx.capture.normalise.name_inputs import NameInputs
from zerofx.capture.normalise.own_loss import OwnLoss
from zerofx.capture.normalise.real_gradients import RealGradients
from zerofx.capture.normalise.real_parameters import RealParameters
from zerofx.capture.normalise.refuse import Refuse
from zerofx.capture.normalise.set_origins import SetOrigins
from zerofx.capture.normalise.sort_outputs import SortOutputs
from zerofx.capture.normalise.sum_gradients import SumGradients
from zerofx.capture.normalise.write_outputs import WriteOutputs

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
