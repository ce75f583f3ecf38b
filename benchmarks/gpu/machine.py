"""What there is on this machine, as JSON on stdout: asked in a process of its own, which a driver may take down.

python -m benchmarks.gpu.machine
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

LIBRARIES = ("deepspeed", "matplotlib", "pytest", "transformers", "triton")


def facts() -> dict[str, Any]:
    """Versions, devices and memory; ``gpus`` is empty where torch sees none."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "num_bytes": properties.total_memory,
                "capability": list(torch.cuda.get_device_capability(index)),
            }
        )
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "cores": len(os.sched_getaffinity(0)),
        "host_bytes": host_bytes(),
        "libraries": [name for name in LIBRARIES if importlib.util.find_spec(name) is not None],
    }


def host_bytes() -> int:
    """Host memory, or the container's limit where that is less.

    As ``scheduler/cost/probe.py`` counts it, which is not imported: what zerofx needs may be missing here.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


if __name__ == "__main__":
    json.dump(facts(), sys.stdout)
