"""Plots of the parts whose numbers are read best as pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.gpu.tables import Cases, results


def losses(cases: Cases, path: Path) -> None:
    """A panel for each case: the losses of plain torch and of zerofx, step by step."""
    listed = [(name, result) for name, result in results(cases) if "losses" in result]
    if not listed:
        return
    figure, grid = panels(len(listed))
    for axes, (name, result) in zip(grid, listed, strict=False):
        axes.plot(result["torch_losses"], label="torch", color="tab:gray", linewidth=2.5)
        axes.plot(result["losses"], label="zerofx", color="tab:red", linewidth=1)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.legend()
    save(figure, path)


def peaks(cases: Cases, path: Path) -> None:
    """What was allocated and reserved next to what was predicted, and the line on which both are the same."""
    listed = [result for _, result in results(cases) if "allocated_bytes" in result]
    if not listed:
        return
    figure, (axes, *_) = panels(1)
    predicted = [result["predicted_bytes"]["device"] / 1e9 for result in listed]
    for key, marker in (("reserved_bytes", "_"), ("allocated_bytes", "x")):
        axes.scatter(predicted, [result[key] / 1e9 for result in listed], marker=marker, label=key.partition("_")[0])
    axes.plot([0, max(predicted)], [0, max(predicted)], color="tab:gray", linewidth=0.5)
    axes.set_xlabel("predicted peak, GB")
    axes.set_ylabel("measured peak, GB")
    axes.legend()
    save(figure, path)


def panels(number: int) -> tuple[Any, list[Any]]:
    """A figure with so many axes, three in a row."""
    num_columns = min(3, number)
    num_rows = -(-number // num_columns)
    figure, grid = plt.subplots(num_rows, num_columns, figsize=(5 * num_columns, 3.5 * num_rows), squeeze=False)
    listed = list(grid.flat)
    for axes in listed[number:]:
        axes.set_visible(False)
    for axes in listed:
        axes.grid(visible=True, alpha=0.3)
    return figure, listed


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


PLOTS: Mapping[str, Callable[[Cases, Path], None]] = {"train": losses, "memory": peaks}
