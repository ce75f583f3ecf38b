"""Tests in as many processes of pytest as it takes, where one breaks the device or hangs, until each has an outcome.

python -m benchmarks.gpu.workers.tests '{"arguments": ["-m", "gpu", "tests/gpu"]}' FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.case import RESULT

TEST_SECONDS = 60  # with the waiting for its turn left out
MOST_PROCESSES = 20


def main() -> None:
    request, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    seconds = str(request.get("test_seconds", TEST_SECONDS))
    for _ in range(MOST_PROCESSES):
        before = _num_outcomes(folder)
        subprocess.run(
            [
                sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.workers.pytest_record", "-p", "no:cacheprovider",
                "--capture=no", "--record", str(folder), "--test-seconds", seconds, *request["arguments"],
            ],
            check=False,
        )  # fmt: skip
        path = folder / f"{RESULT}.json"
        if not path.exists():
            sys.exit("RuntimeError: expected pytest to collect tests, found that it did not: its output says why")
        result = json.loads(path.read_text())
        if len(result["outcomes"]) == len(result["collected"]) or _num_outcomes(folder) == before:
            return


def _num_outcomes(folder: Path) -> int:
    """Of tests whose outcome is known, and of those that their process ended in."""
    path = folder / f"{RESULT}.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    return len(result.get("outcomes", {})) + bool(result.get("running"))


if __name__ == "__main__":
    main()
