"""Batches of any length, padded to few lengths that steps are built for."""
