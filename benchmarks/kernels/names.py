"""Names of the groups of ``benchmarks.kernels``: data that needs no torch."""

CUDA = ("update", "loss", "norms", "quantise", "sum")
CPU = ("attention", "products")
