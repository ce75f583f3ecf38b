"""What a benchmark measures in a process of its own, whose memory and caches are its alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]  # as in ``processes.py``, which imports torch
_TAIL_CHARACTERS = 2000


def answer_alone(what: str, module: str, *arguments: str, **variables: str) -> Any:
    """The last line that a module prints in a process of its own, as JSON.

    Args:
        what: for messages.
        arguments: of its command line, which tell it to measure there and then.
        variables: what else its environment has.

    Raises:
        RuntimeError: it failed; the message has the end of what it wrote.
    """
    paths = os.pathsep.join((str(_ROOT), str(_ROOT / "examples")))
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=_ROOT, env={**os.environ, "PYTHONPATH": paths, **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if result.returncode != 0:
        raise RuntimeError(f"{what} failed:\n{result.stderr[-_TAIL_CHARACTERS:]}")
    return json.loads(result.stdout.splitlines()[-1])
