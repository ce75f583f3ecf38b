"""What traced nodes are told of the Python that made them: entries that torch keeps in their metadata under ``custom``.

It hands those of a forward's node to the nodes of its backward, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import fx
from torch.fx import traceback

_ENTRIES = "custom"

keeping_annotations = traceback.preserve_node_meta
"""A context in which traced nodes are told what has been ``annotated``."""


def annotated(key: str, text: str) -> AbstractContextManager[None]:
    """While open, traced nodes have ``text`` under ``key``."""
    return traceback.annotate({key: text})


def running_annotation(key: str) -> str:
    """What nodes that are traced now have under ``key``."""
    annotation = traceback.current_meta.get(_ENTRIES, {}).get(key, "")
    assert isinstance(annotation, str)
    return annotation


def annotations_of(node: fx.Node) -> Mapping[str, Any]:
    """What a node of a traced graph has."""
    return node.meta.get(_ENTRIES) or {}
