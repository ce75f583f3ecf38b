"""Nets: sweeps over code that nobody here wrote, each of which counts what is exact, refused and wrong."""
