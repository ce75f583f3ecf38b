"""The version of the installed torch, and the one place where it is compared with others.

A workaround for a version is a function of this folder whose docstring names the versions. A test in
``tests/graph/rules/test_torch_versions.py`` fails if the installed torch does not need it.
"""

from __future__ import annotations

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Torch's major and minor version."""

_LACKING = (
    (
        (2, 12),
        "fusions that fit one loop to another, where one of them reads after a write: Inductor forgets the order",
    ),
    ((2, 12), "one kernel for Adagrad's update on GPUs: torch's own optimizer refuses it"),
    ((2, 13), "meshes with an axis `model`: DTensor has no rules of most operators that are of one axis alone"),
)


def limitations() -> tuple[str, ...]:
    """Features that zerofx has with later torch versions only, a line each that says why."""
    return tuple(line for version, line in _LACKING if version > TORCH)
