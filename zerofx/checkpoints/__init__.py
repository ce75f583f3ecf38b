"""Save a step's state and restore it: on any number of ranks, at any stage, from any tiers."""
