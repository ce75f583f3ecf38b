"""Triton kernels of zerofx's own: each does in one pass what torch and Inductor do in several (``docs/kernels.md``)."""
