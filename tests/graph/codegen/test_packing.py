"""Blocks of known lifetimes in one pool: none overlaps another that is live with it."""

from __future__ import annotations

import random

import pytest

from zerofx.codegen.packing import ALIGNMENT, Block, Packing, least_bytes, pack


def _blocks(seed: int) -> list[Block]:
    """Blocks as steps have them: few sizes, most of them short-lived, some from forward to a layer's backward."""
    draw = random.Random(seed)
    number, span = draw.randint(1, 120), draw.randint(2, 200)
    sizes = [draw.randint(1, 100_000) for _ in range(draw.randint(1, 6))]
    blocks = []
    for _ in range(number):
        start = draw.randrange(span)
        nested = draw.random() < 0.3 and start < span // 2
        end = span - start if nested else start + 1 + min(int(draw.expovariate(0.3)), span)
        blocks.append(Block(draw.choice(sizes), start, max(end, start + 1)))
    return blocks


def _overlaps(blocks: list[Block], packing: Packing) -> list[tuple[int, int]]:
    """Pairs of blocks that are live at one time and have bytes in common."""
    placed = list(enumerate(zip(blocks, packing.offsets, strict=True)))
    return [
        (number, other)
        for number, (a, low) in placed
        for other, (b, lower) in placed[:number]
        if a.start < b.end and b.start < a.end and low < lower + b.num_bytes and lower < low + a.num_bytes
    ]


@pytest.mark.parametrize("seed", range(50))
def test_blocks_that_are_live_together_lie_apart(seed: int) -> None:
    blocks = _blocks(seed)
    packing = pack(blocks)
    assert _overlaps(blocks, packing) == []
    assert all(offset % ALIGNMENT == 0 for offset in packing.offsets)
    tops = [offset + block.num_bytes for block, offset in zip(blocks, packing.offsets, strict=True)]
    assert max(tops) <= packing.num_bytes < max(tops) + ALIGNMENT
    # Against the definition, at every time at which a block begins.
    live = [sum(b.size for b in blocks if b.start <= at.start < b.end) for at in blocks]
    assert packing.least_bytes == max(live) <= packing.num_bytes
    assert pack(blocks) == packing


def test_pools_are_near_the_bound() -> None:
    ratios = [packing.num_bytes / packing.least_bytes for packing in map(pack, map(_blocks, range(50)))]
    print(f"pool over bound: {sum(ratios) / len(ratios):.4f} in the mean, {max(ratios):.4f} at the most")
    assert sum(ratios) / len(ratios) < 1.02
    assert max(ratios) < 1.25


def test_a_gap_is_filled() -> None:
    # Two that live throughout, one between them in time that the last may take the place of.
    blocks = [Block(1024, 0, 9), Block(512, 0, 4), Block(512, 4, 9), Block(2048, 0, 9)]
    packing = pack(blocks)
    assert packing.offsets[1] == packing.offsets[2]
    assert packing.num_bytes == packing.least_bytes == 1024 + 512 + 2048


def test_the_bound_may_be_out_of_reach() -> None:
    # Whatever the offsets, one of four that are live in pairs has to be on top (an odd ring of lifetimes).
    blocks = [Block(1024, 0, 3), Block(512, 2, 5), Block(1536, 4, 7), Block(1024, 6, 9), Block(512, 0, 9)]
    packing = pack(blocks)
    assert _overlaps(blocks, packing) == []
    assert packing.num_bytes >= least_bytes(blocks)


def test_nothing_takes_nothing() -> None:
    assert pack([]) == Packing((), 0, 0)
