"""Whose fault it is that a plan which was given cannot be carried out."""

from __future__ import annotations

import pytest
import torch

from zerofx.driver.driver import _blame_plan
from zerofx.errors import InternalError, PlanError, wrap_defects
from zerofx.options import CompileOptions


def _fail(options: CompileOptions, error: Exception) -> None:
    with _blame_plan(options), wrap_defects("run a pass", only_own=False):
        raise error


def test_a_pass_that_breaks_on_a_given_plan_is_the_plans_fault(tmp_path: object) -> None:
    with pytest.raises(PlanError, match=r"cannot be \(KeyError: 'layers.7'\): make the plan again"):
        _fail(CompileOptions(plan=tmp_path), KeyError("layers.7"))  # type: ignore[arg-type]


def test_without_a_given_plan_it_is_a_defect() -> None:
    with pytest.raises(InternalError, match="found a defect of zerofx"):
        _fail(CompileOptions(), KeyError("layers.7"))


def test_memory_that_runs_out_is_no_plans_fault(tmp_path: object) -> None:
    with pytest.raises(torch.OutOfMemoryError), _blame_plan(CompileOptions(plan=tmp_path)):  # type: ignore[arg-type]
        raise torch.OutOfMemoryError("CUDA out of memory")
