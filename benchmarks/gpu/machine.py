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
        free, _ = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "name": properties.name,
                "num_bytes": properties.total_memory,
                "free_bytes": free,
                "capability": list(torch.cuda.get_device_capability(index)),
            }
        )
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "cores": len(os.sched_getaffinity(0)),
        "host_bytes": available_bytes(),
        "libraries": [name for name in LIBRARIES if importlib.util.find_spec(name) is not None],
    }


def available_bytes() -> int:
    """Host memory that is free, or can be made free: within the container's limit, where there is one."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        free = min(free, int(text) - int(used.read_text()))
    return free


if __name__ == "__main__":
    json.dump(facts(), sys.stdout)
