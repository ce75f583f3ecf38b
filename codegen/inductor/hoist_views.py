"""Take views of a region's inputs outside of the compiled code: Inductor then sees plain contiguous tensors.

    f(full, x):                                      f(x, view_0):
        w = as_strided(full, [4, 4], [4, 1], 16)         return mm(x, view_0)
        return mm(x, w)                        ->    called with x, full.as_strided([4, 4], [4, 1], 16)

So parameters in a gathered bucket and slots of a gradient buffer come as what they are.

Does not handle: views of views, which stay inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zerofx.codegen.inductor.traced import TracedRegion


@dataclass(frozen=True)
class HoistViews:
    """Turn ``as_strided`` views of inputs into inputs."""

    name: str = "hoist_views"

    def run(self, region: TracedRegion) -> None:
        graph = region.graph
        placeholders = list(graph.find_nodes(op="placeholder"))
        passed: list[tuple[int, tuple[Any, ...]]] = []
        last = placeholders[-1]
        for index, original in enumerate(placeholders):
            for user in list(original.users):
                if user.target is torch.ops.aten.as_strided.default:
                    with graph.inserting_after(last):
                        last = graph.placeholder(f"view_{len(passed)}")
                    last.meta["val"] = user.meta["val"]
                    user.replace_all_uses_with(last)
                    passed.append((index, tuple(user.args[1:])))
                    graph.erase_node(user)
        own = [(index, ()) for index, node in enumerate(placeholders) if node.users]
        for node in placeholders:
            if not node.users:
                graph.erase_node(node)
        graph.lint()
        region.module.recompile()
        region.views = [*own, *passed]
