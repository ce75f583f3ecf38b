"""Which torch this is: the one place where its version is compared with others.

What a version makes necessary is a function of this folder whose docstring names the versions. A test in
``tests/graph/package/test_torch_versions.py`` fails where the torch that is installed does not need it.
"""

from __future__ import annotations

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Torch's major and minor version."""
