"""Results on disk, which whoever reads them finds whole, whatever becomes of who writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` to ``path`` in the place of what is there, at once; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1))
    part.rename(path)
