"""Marks of tests that compile regions: they need a C++ compiler, and Inductor uses what torch itself deprecates."""

from __future__ import annotations

import shutil

import pytest

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="needs a C++ compiler")
regions = [needs_compiler, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
trainings = [needs_compiler, pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]
