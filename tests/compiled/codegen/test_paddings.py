"""The gradient of padding with edges, which compiled regions have as loops: ATen's, and in the right places."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zerofx
from tests.lib import compiling
from zerofx.codegen.inductor.decompositions import replication_pad_backward

pytestmark = compiling.regions
KERNELS = [
    torch.ops.aten.replication_pad1d_backward,
    torch.ops.aten.replication_pad2d_backward,
    torch.ops.aten.replication_pad3d_backward,
]


@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_it_is_atens_for_all_sizes_and_widths(num_dims: int) -> None:
    torch.manual_seed(0)
    for size, last_size in product((1, 2, 5), repeat=2):
        x = torch.randn([2, 3, *[size] * (num_dims - 1), last_size], dtype=torch.float64)
        for before, after, last_before in product((0, 1, 3), repeat=3):
            padding = [last_before, after, *[before, after] * (num_dims - 1)]
            grad = torch.randn_like(functional.pad(x, padding, mode="replicate"))
            found = replication_pad_backward(grad, x, padding)
            torch.testing.assert_close(found, KERNELS[num_dims - 1](grad, x, padding))


def test_what_is_cut_off_has_no_gradient() -> None:
    x, padding = torch.randn(1, 2, 4, 5), [-1, 2, 1, -2]
    grad = torch.randn_like(functional.pad(x, padding, mode="replicate"))
    expected = torch.ops.aten.replication_pad2d_backward(grad, x, padding)
    torch.testing.assert_close(replication_pad_backward(grad, x, padding), expected)


class Padded(nn.Module):
    """A convolution, which Inductor lays out with channels last, padded with its edges, and a loss of that."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(self.conv(x), (1, 2, 3, 1), mode="replicate").flatten(1).square().mean()


def test_a_model_that_pads_with_edges_trains_like_eager_mode_within_rounding() -> None:
    torch.manual_seed(0)
    plain, compiled = Padded(), Padded()
    compiled.load_state_dict(plain.state_dict())
    batch = torch.randn(4, 3, 10, 10)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    step = zerofx.compile(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1), stage=0)
    for _ in range(3):
        optimizer.zero_grad()
        expected = plain(batch)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(batch), expected.detach())
    step.close()
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict())
