"""Kernels of regions, captured as CUDA graphs."""
