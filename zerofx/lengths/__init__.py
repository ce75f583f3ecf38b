"""Batches of any length, padded to the few lengths that steps are built for."""
