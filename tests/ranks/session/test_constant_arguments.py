"""Arguments of a batch that ``constant=`` names have values that a traced forward may read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from zerofx.capture.values.constant_arguments import ConstantArguments
from zerofx.errors import CaptureError, RankMismatchError, UsageError
from zerofx.ir.batch import Batch

EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 2, 4, 5, 0, 0, 5]])


class Convolution(nn.Module):
    """Sums the neighbours' features, self-loops left out: as many edges as values say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[:, edges[0] != edges[1]]
        if target.max() >= len(x):
            raise ValueError("an edge to a node that is not there")
        h = self.linear(x)
        loss: Tensor = torch.zeros_like(h).index_add(0, target, h[source]).square().mean()
        return loss


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Convolution()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _compiled(**options: Any) -> zerofx.Step:
    return zerofx.compile(*_model(), **{"backend": "eager", "constant": ("edges",), **options})


def _batches(num: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(6, 8, generator=generator) for _ in range(num)]


def _losses(edges: Tensor) -> list[Tensor]:
    model, optimizer = _model()
    losses = []
    for x in _batches():
        optimizer.zero_grad()
        loss = model(x, edges)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


@pytest.mark.parametrize("names", [("edges",), ["batch[1]"]])
def test_shapes_that_follow_from_them_train_as_in_eager_mode(names: Any) -> None:
    step = _compiled(constant=names)
    assert all(map(torch.equal, _losses(EDGES), [step(x, EDGES.clone()) for x in _batches()]))
    assert step.measure(_batches()[0], EDGES, num_steps=1).peak_bytes["device"] == step.plan.peak_bytes["device"]


def test_they_may_be_given_by_name_and_stand_in_containers() -> None:
    class Named(Convolution):
        def forward(self, graph: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(graph["x"], graph["edges"])

    expected = _losses(EDGES)[0]
    assert torch.equal(_compiled()(_batches()[0], edges=EDGES), expected)
    torch.manual_seed(3)
    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = zerofx.compile(model, optimizer, backend="eager", constant=("batch[0]['edges']",))
    assert torch.equal(step({"x": _batches()[0], "edges": EDGES}), expected)


def test_forward_has_its_own_names_for_them() -> None:
    step = _compiled(forward=lambda model, x, graph: model(x, graph), constant=("graph",))
    assert torch.equal(step(_batches()[0], EDGES), _losses(EDGES)[0])


def test_other_values_are_captured_anew_until_there_are_too_many() -> None:
    step, other = _compiled(max_shapes=2), EDGES.flip(1)[:, 1:]
    step(_batches()[0], EDGES)
    changed = EDGES.clone()
    changed[0, 0] = 3
    with pytest.warns(zerofx.ZeroFXWarning, match=r"batch\[1\]: int64\[2, 8\] on cpu with values"):
        step(_batches()[1], changed)
    changed[0, 0] = 2  # in place: the hash is not the tensor's, but its values'
    with pytest.raises(UsageError, match="expected at most 2 batch shapes"):
        step(_batches()[1], changed)
    with pytest.raises(UsageError, match="expected at most 2 batch shapes"):
        step(_batches()[1], other)


def test_micro_batches_have_them_whole() -> None:
    constant = ConstantArguments(("edges",), Convolution(), None)
    batch = constant.add_hashes(Batch.from_call((torch.zeros(2, 8), EDGES), {}))
    assert batch.divided_names() == {"batch[0]"}
    assert constant.add_hashes(Batch.from_call((), {"edges": EDGES, "x": torch.zeros(6, 8)})).size() == 6


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.int16])
def test_a_hash_is_that_of_values_of_any_dtype_and_layout(dtype: torch.dtype) -> None:
    constant = ConstantArguments(("edges",), Convolution(), None)
    values = torch.arange(12).reshape(3, 4).to(dtype)
    one, transposed, other = (
        constant.add_hashes(Batch.from_call((), {"edges": tensor})).hashes["edges"]
        for tensor in (
            values,
            values.t().contiguous().t(),
            ~values if dtype == torch.bool else values + 1,
        )
    )
    assert one == transposed != other


def test_a_name_of_nothing_and_a_tensor_without_values_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no tensor in 'edge_index' among batch\[0\], batch\[1\]"):
        _compiled(constant=("edge_index",))(_batches()[0], EDGES)
    with pytest.raises(UsageError, match=r"constant to be names, as in .*, found 'edges'"):
        _compiled(constant="edges")
    with pytest.raises(UsageError, match=r"found batch\[1\] on meta"):
        zerofx.plan(*_model(), (_batches()[0], EDGES.to("meta")), world_size=2, constant=("edges",))
    with pytest.raises(CaptureError, match=r"constant=\('edge_index',\)"):
        _compiled(constant=())(_batches()[0], EDGES)


def test_plans_and_tuning_know_them() -> None:
    batch = (_batches()[0], EDGES)
    planned = zerofx.plan(*_model(), batch, world_size=2, constant=("edges",), backend="eager")
    assert planned.plan.peak_bytes["device"] > 0
    tuned = zerofx.tune(
        *_model(), batch, constant=("edges",), backend="eager", num_steps=2, num_candidates=1, machine="cpu"
    )
    assert tuned.best.measured is not None


def _one_edge_differs() -> tuple[bool, str]:
    rank = torch.distributed.get_rank()
    step, x = _compiled(), _batches()[rank]
    step(x, EDGES)
    edges = EDGES.clone()
    edges[0, 0] += rank
    try:
        step(x, edges)
    except RankMismatchError as error:
        return True, str(error)
    return False, ""


def test_ranks_have_the_same_values() -> None:
    for refused, text in run_ranks(_one_edge_differs, 2):
        assert refused and "with values" in text
