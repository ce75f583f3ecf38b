"""Where tensors live: the device, the host's memory, or files on NVMe."""

from __future__ import annotations

import typing
from typing import Literal

Tier = Literal["device", "host", "nvme"]
TIERS: tuple[Tier, ...] = typing.get_args(Tier)  # the fastest first
