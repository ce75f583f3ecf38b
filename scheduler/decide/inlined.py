"""What a compiled backward computes again in the kernels that read it: for nothing where memory bandwidth limits them.

    saved: x, silu = silu(x);  backward: f(silu, x)     ->     saved: x;  backward: f(silu(x), x), one kernel

Reading less of what forward has saved, such a kernel takes less time, not more. (AOTAutograd's partitioner goes by the
bytes that are saved, too, but also computes again what has to be written out to be read.)

Does not handle: what a matrix product or another operator with a kernel of its own reads, which would be written again.
"""

from __future__ import annotations

from torch import fx

from zerofx.ir.edit import consumers
from zerofx.ir.facts import is_random
from zerofx.scheduler.analysis.saved_values import is_forward_call
from zerofx.scheduler.cost.fusion import is_inlined, is_loop


def is_free_again(node: fx.Node) -> bool:
    """Whether to compute ``node`` again in backward moves nothing more through memory than to read what it needs."""
    if not is_inlined(node) or is_random(node):
        return False
    readers = (reader for reader in consumers(node) if reader.op == "call_function" and not is_forward_call(reader))
    return all(map(is_loop, readers))
