"""Names of the groups of ``benchmarks.kernels``: data that needs no torch."""

CUDA = ("update", "loss")
CPU = ("attention", "products")
