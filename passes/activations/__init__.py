"""Activations between forward and backward: computed again, kept in parts, or elsewhere meanwhile."""
