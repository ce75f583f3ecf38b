"""Check a step graph after a pass: every rule that the emitted step relies on.

=====================  =====================================================================================
order                  a node comes behind everything that it reads
release                a gathered buffer is released once, and nothing reads it afterwards
waits                  nothing but its wait reads a started collective; each is awaited once
gradients              every trained bucket is reduced at most once
gather before use      a gather's buffer is not read before its wait (follows from order and waits)
random operators       none is run twice
=====================  =====================================================================================
"""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

import torch
from torch import fx

from zerofx import ops
from zerofx.errors import InvalidGraphError
from zerofx.graph import StepGraph, target_name
from zerofx.passes.base import consumers

_NEIGHBOURS = 6
_STARTED = frozenset({ops.all_gather, ops.all_gather_into, ops.reduce_scatter})


def verify(step: StepGraph, after: str) -> None:
    """Check all rules.

    Raises:
        InvalidGraphError: names the rule, the pass ``after`` which it was broken, and shows the nodes around the spot.
    """
    order = step.positions()
    for node in step.calls():
        for source in node.all_input_nodes:
            if order[source] > order[node]:
                _fail(step, after, node, f"order: {node.name} reads {source.name}, which comes later")
        if node.target in _STARTED:
            _check_started(step, after, node)
        if node.target is ops.release:
            _check_release(step, after, node, order)
    _check_reductions(step, after)
    _check_random(step, after)


def _check_started(step: StepGraph, after: str, node: fx.Node) -> None:
    waits = [user for user in node.users if user.target is ops.wait]
    others = [user.name for user in node.users if user.target is not ops.wait]
    if len(waits) != 1 or others:
        _fail(step, after, node, f"waits: {node.name} has {len(waits)} waits and is read by {others}")


def _check_release(step: StepGraph, after: str, node: fx.Node, order: dict[fx.Node, int]) -> None:
    full = node.args[0]
    assert isinstance(full, fx.Node)
    for reader in consumers(full):
        if order[reader] > order[node]:
            _fail(step, after, reader, f"release: {reader.name} reads {full.name} after its release")
        if reader.target is ops.release and reader is not node:
            _fail(step, after, reader, f"release: {full.name} is released twice")


def _check_reductions(step: StepGraph, after: str) -> None:
    counts = Counter(node.args[1] for node in step.calls() if node.target is ops.reduce_scatter)
    for bucket, count in counts.items():
        if count > 1:
            _fail(step, after, step.output, f"gradients: bucket {bucket} is reduced {count} times")


def _check_random(step: StepGraph, after: str) -> None:
    seen: set[str] = set()
    for node in step.calls():
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            original = node.meta.get("zerofx_copy_of", node.name)
            if original in seen:
                _fail(step, after, node, f"random operators: {node.name} runs {original} a second time")
            seen.add(original)


def _fail(step: StepGraph, after: str, node: fx.Node, what: str) -> NoReturn:
    nodes = list(step.graph.nodes)
    at = nodes.index(node)
    around = nodes[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS + 1]
    lines = [f"{'>' if n is node else ' '} {n.name} = {target_name(n)}{n.args}" for n in around]
    raise InvalidGraphError(f"after pass {after}, {what}\n" + "\n".join(lines))
