"""Tensor values while a forward is traced: which are known, which become checks, and results of collectives."""
