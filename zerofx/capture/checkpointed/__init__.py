"""Checkpointed blocks: what eager mode does to buffers as it computes them again."""
