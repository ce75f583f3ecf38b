"""Let operators make tensors on ``cuda``, the current device, where they were traced on ``cuda:1``.

    arange(8, device="cuda:1")     ->     arange(8, device="cuda")

A rank's graph is that of the others, a step runs with its own device as the current one, and a plan that was saved on
one device is for all of its kind.

Does not handle: a forward that uses two devices of a kind, which tracing refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_aggregate

from zerofx.capture.normalise.joint import Joint


@dataclass(frozen=True)
class NameDevices:
    """Let operators make tensors on the current device of a kind."""

    name: str = "name_devices"

    def run(self, joint: Joint) -> None:
        def kind(arg: Any) -> Any:
            return torch.device(arg.type) if isinstance(arg, torch.device) else arg

        for node in joint.graph.nodes:
            node.args, node.kwargs = map_aggregate(node.args, kind), map_aggregate(node.kwargs, kind)
