"""``zerofx opt`` on regions: what they go through in front of Inductor, as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerofx.cli.commands import main

pytestmark = pytest.mark.filterwarnings("default")  # importing Inductor warns of what torch itself deprecates


def texts(*arguments: object) -> str:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout.rstrip("\n")


def test_regions_in_front_of_inductor(
    tmp_path: Path, golden: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROFX_KERNELS", "none")  # which run depends on the machine
    graph, plan, done = (tmp_path / f"{name}.json" for name in ("graph", "plan", "done"))
    given = ("--world-size", 2, "--machine", "cpu", "--save", plan, "--save-graph", graph)
    texts("plan", "tests.plan.driver.test_opt:make", *given)
    texts("opt", graph, "--plan", plan, "--save", done)
    every = texts("opt", done, "--phase", "region", "--print-after-all")
    golden("\n\n".join(text for text in every.split("\n\n") if "in region layers_forward" in text.splitlines()[0]))
    rewrites = "planned_strides,take_products,keep_copies,hoist_views"
    last = texts("opt", done, "--passes", rewrites)
    assert [line for line in last.splitlines() if line.startswith("#")] == [
        f"# region {name}"
        for name in ("layers_forward", "head_forward", "head_backward", "layers_backward", "layers_backward_2")
    ]  # fmt: skip
