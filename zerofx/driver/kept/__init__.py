"""Results kept on disk for the next run: steps, and how ranks share a computation."""
