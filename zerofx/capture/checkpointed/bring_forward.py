"""Move operators that are run again for buffers right after the last of their inputs.

    y = batch_norm(x, ..., mean)                 y = batch_norm(x, ..., mean)
    ...                                   ->     mean_2 = batch_norm(x, ..., mean_1)     # again
    loss = ...                                   ...
    mean_2 = batch_norm(x, ..., mean_1)          loss = ...

Otherwise all layers' inputs would stay alive until the end of the forward, where a plan may want to have dropped them.

Does not handle: operators that ``blocks.py`` has not run again.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerofx.capture.layers import is_run_again
from zerofx.capture.normalise.joint import Joint


@dataclass(frozen=True)
class BringForward:
    """Move operators that are run again for buffers right after the last of their inputs."""

    name: str = "bring_forward"

    def run(self, joint: Joint) -> None:
        for node in list(joint.graph.nodes):
            if node.op == "call_function" and is_run_again(node) and node.all_input_nodes:
                latest = max(node.all_input_nodes)  # nodes compare by their place in the graph
                if latest.op != "placeholder":
                    latest.append(node)
