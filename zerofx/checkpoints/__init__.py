"""What a step saves, and takes over from what was saved: by any number of ranks, at any stage, from any tiers."""
