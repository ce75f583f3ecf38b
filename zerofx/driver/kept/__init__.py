"""What a run keeps on disk for the next one: steps, and how ranks share a computation."""
