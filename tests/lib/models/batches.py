"""Batches of the models: drawn from a generator, as arguments and keywords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DIM = 8  # features of a row
ROWS = 4  # of a batch

BatchOf = Callable[[torch.Generator], tuple[tuple[Any, ...], dict[str, Any]]]


def rows(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Features [ROWS, DIM] and targets of the same shape."""
    x = torch.randn(ROWS, DIM, generator=generator)
    return (x, torch.randn(ROWS, DIM, generator=generator)), {}


def tokens(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Token ids [2, 7] below 19, and the ids that follow."""
    ids = torch.randint(19, (2, 8), generator=generator)
    return (ids[:, :-1], ids[:, 1:]), {}


def images(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Images [4, 3, 8, 8] and classes below 5."""
    x = torch.randn(4, 3, 8, 8, generator=generator)
    return (x, torch.randint(5, (4,), generator=generator)), {}


def labelled(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What language models of transformers take: `input_ids` [2, 8] below 32 and `labels`, by keyword."""
    ids = torch.randint(1, 32, (2, 8), generator=generator)
    return (), {"input_ids": ids, "labels": ids.clone()}


def masked(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As `labelled`, and a mask that ends one of the two sequences early."""
    _, batch = labelled(generator)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return (), {**batch, "attention_mask": mask}


def pixels(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What image models of transformers take: as `images`, by keyword."""
    (x, y), _ = images(generator)
    return (), {"pixel_values": x, "labels": y}


def many_arguments(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `ManyArguments` takes."""
    (x, y), _ = rows(generator)
    shift = torch.randn(DIM, generator=generator)
    return (x, [shift, {"scale": 0.5}]), {
        "target": {"pair": (True, y), "name": "y"}, "repeat": 2, "mode": "shift", "mask": None,
    }  # fmt: skip
