"""``Machine.measure()`` next to the built-in row of the same device.

python -m benchmarks.gpu.workers.machine '{"device": "cuda", "drive": "/mnt/nvme"}' FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.case import Answers
from benchmarks.lib.turn import turn
from zerofx.scheduler.cost.catalog import find_machine, machine_of_device
from zerofx.scheduler.cost.machine import Machine


def main() -> None:
    request, answers = json.loads(sys.argv[1]), Answers(Path(sys.argv[2]))
    if request["device"] == "cuda":
        properties = torch.cuda.get_device_properties(0)
        row = machine_of_device(properties.name, properties.total_memory)
        answers.add(device=properties.name)
    else:
        row = find_machine("cpu")
    answers.add(row=row.to_json() if row is not None else None)
    with turn(whole_machine=True):
        began = time.perf_counter()
        machine = Machine.measure(request["device"], nvme_path=request["drive"])
    answers.add(seconds=time.perf_counter() - began, machine=machine.to_json())


if __name__ == "__main__":
    main()
