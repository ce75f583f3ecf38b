"""Capture for a GPU that is absent: the operators it would run, traced on a CPU's fake tensors."""
