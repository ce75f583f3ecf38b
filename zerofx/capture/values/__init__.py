"""Tensor values while a forward is traced: known ones, checks of unknown ones, and results of collectives."""
