"""What a compiled backward computes again in the kernels that read it: for nothing on a GPU, where they await memory.

    saved: x, silu = silu(x);  backward: f(silu, x)     ->     saved: x;  backward: f(silu(x), x), one kernel

Reading less of what forward has saved, such a kernel takes less time, not more. (AOTAutograd's partitioner goes by the
bytes that are saved, too, but also computes again what has to be written out to be read.)

Does not handle: what a matrix product or another operator with a kernel of its own reads, which would be written again.
"""

from __future__ import annotations

import operator

from torch import fx

from zerofx.ir.aliasing import is_view
from zerofx.ir.facts import is_random
from zerofx.scheduler.analysis.saved_values import is_forward_call
from zerofx.scheduler.cost.fusion import is_inlined, is_loop


def is_free_again(node: fx.Node) -> bool:
    """Whether to compute ``node`` again in backward moves nothing more through memory than to read what it needs."""
    return is_inlined(node) and not is_random(node) and all(map(is_loop, _read_in_backward(node)))


def _read_in_backward(node: fx.Node) -> set[fx.Node]:
    """The operators of backward that read ``node``, through views or not."""
    readers: set[fx.Node] = set()
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if is_view(user) or user.target is operator.getitem:
            pending.extend(user.users)
        elif not is_forward_call(user) and user.op == "call_function":
            readers.add(user)
    return readers
