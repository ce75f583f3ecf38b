"""Which nodes can be run on some rows at a time, by the rules of ``zerofx/ir/operators/row_rules.py``."""

from __future__ import annotations

from torch import fx

from zerofx.ir.aliasing import mutated_inputs
from zerofx.ir.facts import is_random
from zerofx.ir.operators import row_rules
from zerofx.ir.operators.operator import Given
from zerofx.ir.operators.rows import RowKinds
from zerofx.ir.operators.table import facts_of
from zerofx.torch_private.operators import OpOverload


def rows_of_result(node: fx.Node, given: Given) -> RowKinds:
    """Where the rows lie in what ``node`` gives (in each output, if it gives several); None: it needs them all at once.

    ``given`` has the rows of what it reads; None is for what every tile reads whole.
    """
    if not isinstance(node.target, OpOverload) or is_random(node) or mutated_inputs(node) or not any(given.values()):
        return None
    facts = facts_of(node.target)
    rule = facts.rows or (row_rules.elementwise if facts.is_pointwise else None)
    return None if rule is None else rule(node, given)
