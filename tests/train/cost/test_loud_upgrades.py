"""What would be wrong without a word with another torch is an error: an ``InternalError`` that names its version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn

from zerofx.capture.layers import LAYER_KEY
from zerofx.capture.normalise.set_origins import set_origins
from zerofx.capture.trace import Batch, capture
from zerofx.errors import InternalError
from zerofx.scheduler.cost.cpu.calls import OperatorCall
from zerofx.scheduler.cost.cpu.kernel_memory import call_memories
from zerofx.scheduler.cost.cpu.peaks import CpuPeak
from zerofx.torch_private import profiler, tensors
from zerofx.torch_private.capture import TangentAOTInput
from zerofx.torch_private.tensors import elementwise_order, suggest_memory_format

VERSION = torch.__version__.split("+")[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).sum()
        return loss


def test_layers_that_no_node_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerofx.torch_private.modules._ENTRIES", "renamed")
    with pytest.raises(InternalError, match=f"none of the forward .* torch {VERSION}"):
        capture(Net(), Batch.from_call((torch.ones(2, 4),), {}))


def test_layers_that_no_node_of_the_backward_was_told() -> None:
    graph = fx.Graph()
    x, tangent = graph.placeholder("x"), graph.placeholder("tangent")
    tangent.meta["desc"] = object.__new__(TangentAOTInput)
    made = graph.call_function(torch.ops.aten.relu.default, (x,))
    made.meta["custom"] = {LAYER_KEY: "layers.0"}
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (tangent, made)))
    set_origins(graph, has_layers=False)
    with pytest.raises(InternalError, match=f"none of the backward .* torch {VERSION}"):
        set_origins(graph, has_layers=True)


@pytest.mark.parametrize("name", ["_MEMORY", "_PROBE_BYTES"])
def test_a_peak_of_which_the_profiler_records_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its events have another name; they have other bytes."""
    peak = CpuPeak()
    peak.__enter__()
    monkeypatch.setattr(profiler, name, "[renamed]" if name == "_MEMORY" else 1)
    with pytest.raises(InternalError, match=f"misses one of .* torch {VERSION}"):
        peak.__exit__()


def test_what_a_kernel_takes_is_not_taken_for_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "_MEMORY", "[renamed]")
    x = torch.ones(3, 5, 7)
    call = OperatorCall.from_arguments(torch.ops.aten.logcumsumexp.default, (x, 1), {}, (x,))
    assert call is not None
    with pytest.raises(InternalError, match=f"torch {VERSION}"):
        call_memories([call])


def test_a_peak_does_not_count_the_probe() -> None:
    with CpuPeak() as nothing:
        pass
    with CpuPeak() as peak:
        held = torch.ones(1000)
    assert (nothing.num_bytes, peak.num_bytes) == (0, held.untyped_storage().nbytes())


@pytest.fixture
def _unchecked() -> Iterator[None]:
    tensors._check_layouts.cache_clear()
    yield
    tensors._check_layouts.cache_clear()


@pytest.mark.usefixtures("_unchecked")
def test_strides_that_are_not_those_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 3)
    assert elementwise_order(x.t(), x.t()) == [1, 0]
    tensors._check_layouts.cache_clear()
    private = "compute_elementwise_output_logical_to_physical_perm"
    monkeypatch.setattr(tensors, private, lambda *operands: (list(range(operands[0].dim())), False))
    with pytest.raises(InternalError, match=f"other strides with torch {VERSION}"):
        elementwise_order(x.t(), x.t())


@pytest.mark.usefixtures("_unchecked")
def test_a_memory_format_that_is_not_that_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_suggest_memory_format", lambda _: torch.contiguous_format)
    with pytest.raises(InternalError, match=f"other strides with torch {VERSION}"):
        suggest_memory_format(torch.ones(1, 2, 3, 4))
