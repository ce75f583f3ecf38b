"""The page shows one layer as the ranks of the axis ``model`` share it."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.runs.sharing import SHARING
from zerofx.report.saved import SavedPlan
from zerofx.report.shared_layer import SharedStep, shared_lines

WIDTH, TOKENS = 64, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).relu().exp())
        return out


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def planned(mesh: dict[str, int], **options: Any) -> zerofx.PlannedStep:
    model, batch = Layers(), (torch.zeros(2, TOKENS, WIDTH),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return zerofx.plan(model, optimizer, batch, mesh=mesh, machine=SHARING, backend="eager", **options)


def line(step: SharedStep) -> str:
    about = f"{step.placement:4} {list(step.shape)}" if step.placement else f"{step.num_bytes} bytes sent"
    return f"{step.name}: {about}"


def test_products_by_columns_and_rows_are_seen_in_the_page(golden: Callable[..., None], tmp_path: Path) -> None:
    pins = {"layers.*.up": "column", "layers.*.down": "row", "layers.*.norm": "replicated"}
    step = planned({"model": 4}, shardings=pins)
    shared = step.schedule().shared
    assert shared is not None and (shared.layer, shared.num_ranks) == ("layers.1", 4)
    golden("\n".join(map(line, shared.steps)))
    lines = list(shared_lines(shared))
    assert len(lines) == len(shared.steps) and any(" sent, " in words for _, _, words in lines)
    step.schedule().to_html(path := tmp_path / "plan.html")
    page = path.read_text()
    assert all("".join(f"<td>{escape(cell)}</td>" for cell in line) in page for line in lines)
    step.save(path := tmp_path / "plan.json")
    assert SavedPlan.load(path).schedule.shared == shared


@pytest.mark.parametrize("mesh", [{"shard": 4}, {"replicate": 2, "shard": 2}])
def test_without_the_axis_there_is_nothing_to_see(mesh: dict[str, int], tmp_path: Path) -> None:
    schedule = planned(mesh).schedule()
    schedule.to_html(path := tmp_path / "plan.html")
    assert schedule.shared is None and "One layer, shared" not in path.read_text()
