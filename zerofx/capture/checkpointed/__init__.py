"""Checkpointed blocks: how eager mode updates buffers when it recomputes them."""
