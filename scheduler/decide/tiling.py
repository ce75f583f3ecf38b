"""Tiling: values and numbers of tiles, as the user names them, or as rungs of the search within a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zerofx.errors import UsageError
from zerofx.ir.facts import origin
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.analysis.loss_heads import ForwardHead, find_forward_heads, find_heads
from zerofx.scheduler.analysis.tile_chains import Chain, find_chains
from zerofx.scheduler.plan.decisions import TileDecision
from zerofx.scheduler.plan.facts import is_within
from zerofx.units import format_bytes

Tiles = tuple[TileDecision, ...]

_CHAIN_TILES = (4, 16)


def rungs(step: StepGraph, allowed: bool, *, classes: bool = False) -> list[list[Tiles]]:
    """The ways to tile, in the order in which they are turned to: nothing, losses, then chains of operators as well.

    Those of one rung are tried together: losses into some numbers of tiles, of rows and, where ``classes``, of classes;
    chains on one rung each, into more and more.
    """
    if not allowed:
        return [[()]]
    heads = [*find_heads(step), *find_forward_heads(step)]
    chains = {chain: chain.most_tiles() for chain in find_chains(step) if chain.most_tiles() > 1}
    counts = sorted({count for head in heads for count in head.tile_counts()})
    of_heads = [tuple(_decide_tiles(head, n) for head in heads if n in head.tile_counts()) for n in counts]
    finest = of_heads[-1] if of_heads else ()
    by_class = sorted({count for head in heads for count in head.class_counts()}) if classes else []
    of_heads += [tuple(_tile_classes(head, n) for head in heads if n in head.class_counts()) for n in by_class]
    most = max(chains.values(), default=1)
    of_chains = [
        (*finest, *(_decide_tiles(chain, min(n, limit)) for chain, limit in chains.items()))
        for n in sorted({min(n, most) for n in _CHAIN_TILES} - {1})
    ]
    return [[()], *([of_heads] if of_heads else []), *([tiles] for tiles in of_chains)]


def tiles_of_modules(step: StepGraph, counts_by_name: Mapping[str, int]) -> Tiles:
    """All that can be tiled in the modules that ``counts_by_name`` names (``""``: the whole model), into as many tiles.

    Names of parameters are about slices (``scheduler.analysis.slices.slices_of_names``).

    Raises:
        UsageError: there is nothing to tile in one of them, or not so many rows; lists what there is.
    """
    targets: list[ForwardHead | Chain] = [*find_heads(step), *find_forward_heads(step), *find_chains(step)]
    layers = {target.product.name: origin(target.product).layer for target in targets}
    decisions: dict[str, TileDecision] = {}
    parameters = {alias for info in step.parameters for alias in (info.source, *info.aliases)}
    for name, num_tiles in counts_by_name.items():
        if name in parameters:
            continue
        here = [target for target in targets if not name or is_within(layers[target.product.name], name)]
        if not here or any(num_tiles > target.num_rows for target in here):
            listed = ", ".join(
                sorted({f"{layers[target.product.name]} (up to {target.num_rows})" for target in targets})
            )
            raise UsageError(
                f"expected tile to name parameters, or modules with something to tile, found {name!r} into "
                f"{num_tiles}: there is {listed or 'nothing in this model'}"
            )
        for target in here:
            decisions[target.product.name] = _decision(target, num_tiles, f"as asked for {name or 'the model'}")
    return tuple(decisions[target.product.name] for target in targets if target.product.name in decisions)


def _decide_tiles(target: ForwardHead | Chain, num_tiles: int) -> TileDecision:
    what = "logits" if isinstance(target, ForwardHead) else "values"
    whole, each = format_bytes(target.num_bytes), format_bytes(target.num_bytes // num_tiles)
    return _decision(
        target, num_tiles, f"no plan with whole {what} ({whole}) fits; each of {num_tiles} tiles has {each}"
    )


def _tile_classes(head: ForwardHead, num_tiles: int) -> TileDecision:
    return replace(_decide_tiles(head, num_tiles), over="classes")


def _decision(target: ForwardHead | Chain, num_tiles: int, reason: str) -> TileDecision:
    return TileDecision(target.product.name, num_tiles, target.num_bytes, reason, origin(target.product).layer)
